"""The CI page: each line of its GitHub workflow and its GitLab job runs on a valid and on an altered bundle."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from coldstart.artifacts import blobs
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools import bundles

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/how-to/ci.md").read_text()
GITHUB, GITLAB = (yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", TEXT, re.M | re.S))


def jobs() -> Iterator[Any]:
    """Yield (variables, lines) of every job."""
    for job in GITHUB["jobs"].values():
        lines = [step["run"] for step in job["steps"] if "run" in step]
        yield pytest.param(GITHUB["env"], lines, id="github")
    for name, job in GITLAB.items():
        yield pytest.param(job["variables"], job["script"], id=f"gitlab-{name}", marks=pytest.mark.nightly)


class Runner:
    """A checkout with the files that the examples expect, and a shell."""

    def __init__(self, place: Path, variables: Mapping[str, str]) -> None:
        self.place, self.origin = place, Store(place / "origin")
        self.bundle = bundles.publish(self.origin, place / "scratch")
        # The distribution is installed already, so pip needs no index.
        own = {"BUNDLE": str(self.origin.root), "NAME": bundles.NAME, "WHEEL": "coldstart-vllm"}
        assert variables.keys() >= own.keys()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COLDSTART_")}
        self.environment = {**kept, **variables, **own, "PATH": path, "HOME": str(place), "PIP_NO_INDEX": "1"}

    def run(self, line: str) -> tuple[int, str]:
        """Return the exit code and all output, including files."""
        before = set(self.place.glob("coldstart.*"))
        done = subprocess.run(
            ["bash", "-e", "-c", line], cwd=self.place, env=self.environment, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, timeout=120, check=False,
        )  # fmt: skip
        written = [path.read_text() for path in {*self.place.glob("coldstart.*")} - before]
        return done.returncode, "\n".join([done.stdout, done.stderr, *written])


def alter(store: Store, bundle: Bundle) -> None:
    path = blobs.blob_path(store.root, bundle.find_readable_section("compile").digest)
    path.chmod(0o600)
    bundles.flip(path, 20)


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "lines"), list(jobs()))
def test_a_sound_bundle_passes(tmp_path: Path, variables: Mapping[str, str], lines: list[str]) -> None:
    runner = Runner(tmp_path, variables)
    for line in lines:
        code, said = runner.run(line)
        assert code == 0, f"{line}: {said}"
    assert sum("coldstart validate" in line for line in lines) >= 1


@pytest.mark.slow
@pytest.mark.parametrize(("variables", "lines"), list(jobs()))
def test_bundle_altered_at_its_source_is_not_accepted(
    tmp_path: Path, variables: Mapping[str, str], lines: list[str]
) -> None:
    runner = Runner(tmp_path, variables)
    alter(runner.origin, runner.bundle)
    lines = [line for line in lines if "pip install" not in line]
    results = [runner.run(line) for line in lines]
    (pulled,) = [result for line, result in zip(lines, results, strict=True) if "coldstart pull" in line]
    assert pulled[0] == 1 and "CS-DIGEST" in pulled[1]
    assert {code for line, (code, _) in zip(lines, results, strict=True) if "validate" in line} == {3}
