"""coldstart materialize and validate: messages, exit codes and formats; each line of the CI page runs."""

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools import bundles, tiny_models
from tools.bundles import damage, publish, publish_sections
from tools.command_line import main

from coldstart.materialize import materialize
from coldstart.materialize.options import Options
from coldstart.models import inspection, tiny
from coldstart.models.inspection import BundleLookup
from coldstart.system.paths import Cache


@pytest.fixture
def model(home: Path) -> Path:
    """Create a model directory without weights."""
    directory = home / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return directory


@pytest.mark.parametrize("there", [False, True])
def test_materialize_reports_whether_the_bundle_existed(
    home: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    # Building the model takes seconds, and this test does not read it.
    monkeypatch.setattr(tiny, "build_tiny_model", lambda name, models: model)
    store = Store(Cache.at().bundles)
    early = publish(store, home / "scratch") if there else None
    monkeypatch.setattr(
        materialize,
        "assemble_bundle",
        lambda asked, options, phase: early or publish(store, home / "scratch"),
    )
    assert main("materialize", "tiny-llama", "--format", "json") == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["made"] is not there
    assert ("Found" if there else "Built") in printed.err


def test_materialize_reports_missing_sections(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Options] = []

    def make(lookup: BundleLookup, options: Options, phase: object) -> Bundle:
        asked.append(options)
        stages = {inspection.NOT_MADE: {"compile": "PicklingError"}}
        return publish_sections(Store(Cache.at().bundles), stages=stages)

    monkeypatch.setattr(materialize, "assemble_bundle", make)
    main("materialize", str(model), "--profile-seconds", "30")
    said = capsys.readouterr().err
    assert asked[0].profile_s == 30
    assert "no compile: PicklingError" in said
    assert main("materialize", str(model), "--", "-dp", "2") == 2 and len(asked) == 1
    assert "would wait for others" in capsys.readouterr().err


def test_dry_run_names_the_snapshot_and_the_whole_command(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny, "build_tiny_model", lambda name, models: model)
    main("materialize", "tiny-llama", "--dry-run", "--snapshot")
    printed = capsys.readouterr()
    assert "stages, snapshot" in printed.out and "coldstart materialize tiny-llama --snapshot" in printed.err


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return bundles.publish(Store(tmp_path / "cache" / "bundles"), tmp_path / "scratch")


def validate(bundle: Bundle, *arguments: str, word: str = bundles.NAME) -> int:
    return main("validate", word, "--cache-dir", str(bundle.layout.root.parent), *arguments)


def test_validate_names_the_damaged_section(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    damage(bundle, "kv")
    assert validate(bundle, "--format", "json") == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["ok"], found["schema_version"]) == (False, 2)
    assert found["bundles"][0]["findings"][0]["subject"] == "kv"
    assert validate(bundle, "--level", "manifest") == 0


def test_each_format_is_alone_on_stdout(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    damage(bundle, "kv")
    shown = {}
    for name in ("junit", "github"):
        assert validate(bundle, "--format", name) == 1
        shown[name] = capsys.readouterr().out
    assert ElementTree.fromstring(shown["junit"]).attrib["failures"] == "1"
    assert shown["github"].startswith("::error title=CS-")


@pytest.mark.vllm
def test_a_bundle_of_another_machine_does_not_fit(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(bundle, "--against", "this", "--format", "json") == 1
    (report,) = json.loads(capsys.readouterr().out)["bundles"]
    assert {finding["code"] for finding in report["findings"]} == {"CS-KEY-MISMATCH"}


@pytest.mark.slow
def test_validate_names_what_serve_would_not_use(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_models.place("tiny-llama", Cache.at(bundle.layout.root.parent).models)
    words = ("--model", "tiny-llama", "--level", "load", "--format", "junit", "--", "--max-model-len", "64")
    assert validate(bundle, *words) == 1
    (failure,) = ElementTree.fromstring(capsys.readouterr().out).iter("failure")
    assert failure.attrib["type"] == "CS-NOT-SERVED"


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
    damage(runner.bundle, "compile")
    lines = [line for line in lines if "pip install" not in line]
    results = [runner.run(line) for line in lines]
    (pulled,) = [result for line, result in zip(lines, results, strict=True) if "coldstart pull" in line]
    assert pulled[0] == 1 and "CS-DIGEST" in pulled[1]
    assert {code for line, (code, _) in zip(lines, results, strict=True) if "validate" in line} == {3}
