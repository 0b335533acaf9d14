"""The names of `coldstart` and `coldstart.api`, and the cost of importing them."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import DestinationExistsError
from coldstart.artifacts.store import BundleNotFoundError
from coldstart.artifacts.store import Store as BundleStore
from support.recorded_models import engine, model
from tools.bundles import NAME, publish, publish_sections

from coldstart import api
from coldstart.api.bundles import Store
from coldstart.errors import UsageError
from coldstart.launch import driver
from coldstart.launch.planning import ServeRequest
from coldstart.materialize import materialize
from coldstart.materialize.materialize import MaterializationPlan
from coldstart.materialize.options import SECTIONS, Options, Phase, Steps
from coldstart.models.inspection import BundleLookup
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.system import paths
from coldstart.system.paths import Cache

__all__ = ["engine", "model"]
HEAVY = ("torch", "vllm", "pandas", "typer", "transformers", "numpy", "huggingface_hub", "ray")
# The fastest of several imports counts, because other processes on this machine add noise.
IMPORT_LIMIT_S, TRIES = 0.1, 5
PROBE = """
import json, sys, time
began = time.perf_counter()
import {module}
seconds = time.perf_counter() - began
print(json.dumps([seconds, [name for name in {heavy!r} if name in sys.modules]]))
"""


def _import(module: str) -> tuple[float, list[str]]:
    script = PROBE.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, heavy = json.loads(done.stdout)
    return seconds, heavy


def test_import_coldstart_is_fast_and_light() -> None:
    probes = [_import("coldstart") for _ in range(TRIES)]
    assert min(seconds for seconds, _ in probes) < IMPORT_LIMIT_S
    assert [heavy for _, heavy in probes] == [[]] * TRIES


def test_import_api_is_light() -> None:
    assert _import("coldstart.api")[1] == []


def test_modules_of_every_start_import_neither_torch_nor_a_driver() -> None:
    parts = (
        "launch.ladder, materialize.materialize, validate.start, graphs.offline, graphs.prove, "
        "graphs.restore, vllm.graphs.plugin"
    )
    code = f"import sys, {', '.join(f'coldstart.{part}' for part in parts.split(', '))}\n"
    code += "from coldstart.vllm.graphs import entry\nentry.register()\n"
    code += "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'vllm', 'cuda'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


ARGS = ["--max-model-len", "512"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Replace the build by one small section and return the options of each build."""
    asked: list[Options] = []

    def build(lookup: BundleLookup, options: Options, phase: Phase) -> Bundle:
        asked.append(options)
        with phase("publish") as step:
            step("written")
            signer = sign.load_host_key(paths.state_dir())
            return publish_sections(lookup.store, lookup.key, signer=signer, kv={"bytes": len(asked)})

    monkeypatch.setattr(materialize, "assemble_bundle", build)
    return asked


def test_materialize_reports_each_stage(model: str, built: list[Options]) -> None:
    said: list[object] = []

    @contextmanager
    def progress(stage: str) -> Iterator[Steps]:
        said.append(stage)
        yield said.append

    api.materialize(model, on_progress=progress)
    assert said == ["publish", "written"]


def test_plan_names_key_sections_and_the_existing_bundle(model: str, built: list[Options]) -> None:
    before = api.plan_materialization(model, ARGS)
    assert isinstance(before, MaterializationPlan) and built == []
    assert (before.existing, {*SECTIONS} - {*before.sections}) == (None, {"graphs"})
    assert api.plan_materialization(model, ARGS, Options(graphs=True)).sections == SECTIONS
    bundle = before.run()
    after = api.plan_materialization(model, ARGS, Options(snapshot=True))
    assert (after.existing, after.sections, after.key) == (bundle, (*before.sections, "snapshot"), before.key)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return publish(BundleStore(tmp_path / "bundles"), tmp_path / "scratch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "deep"}, "invalid level 'deep'"),
        ({"vllm_args": ["--dtype", "half"]}, "--level checksum starts no server"),
        ({"model": "/m"}, "cannot use --model"),
        ({"vllm_args": "--dtype half"}, "expected a sequence of strings"),
    ],
)
def test_validate_refuses_unusable_options(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        api.validate("tiny:v1", cache_dir=tmp_path, **options)  # type: ignore[arg-type]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[ServeRequest]:
    """Record the requests of `serve` without starting a server."""
    sent: list[ServeRequest] = []
    monkeypatch.setattr(driver, "start_server", sent.append)
    return sent


def test_serve_builds_the_bundle_when_on_miss_is_materialize(
    model: str, requests: list[ServeRequest], built: list[Options]
) -> None:
    api.serve(model, on_miss="materialize")
    found = requests[0].lookup.bundle
    assert found is not None and found.read_json("kv") == {"bytes": 1}
    assert api.find_bundle(model) == found and api.find_bundle(model, ["--dtype", "float32"]) is None


def test_serve_passes_every_option_on(model: str, requests: list[ServeRequest]) -> None:
    scheduler = SchedulerSettings("fcfs", batch=3)
    api.serve(
        model, ["--max-model-len", "512"], host="::1", port=7, api_key="k", mode="snapshot", on_miss="warn",
        ready_timeout_s=9, scheduler=scheduler, weights_from="/w", require_signature=True,
        untrusted=True, offline=True, defer_capture=True,
    )  # fmt: skip
    (sent,) = requests
    assert sent.listen == ["--host", "::1", "--port", "7", "--api-key", "k"]
    assert (sent.mode, sent.without_bundle, sent.ready_timeout) == ("snapshot", True, 9)
    assert (sent.scheduler, sent.weights_from) == (scheduler, "/w")
    assert (
        sent.defer_capture
        and sent.require_signature
        and sent.lookup.accepts is not None
        and sent.lookup.offline
    )
    assert list(sent.lookup.vllm_args) == ["--max-model-len", "512"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"mode": "fast"}, "invalid mode 'fast'", "choose one of: auto, standby"),
        ({"on_miss": "ignore"}, "invalid on_miss 'ignore'", "choose one of: fail, warn, materialize"),
        ({"vllm_args": "--dtype half"}, "expected a sequence", r"vllm_args=\['--dtype', 'half'\]"),
        ({"scheduler": SchedulerSettings("magic")}, "--scheduler must be one of", ""),
    ],
)
def test_serve_refuses_an_invalid_option_before_it_looks_at_the_model(
    options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        api.serve("no-such-model", **options)
    assert re.search(hint, raised.value.hint or "")


@pytest.fixture
def bundles(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Bundle]:
    """Two versions of one key in the default store."""
    # All processes of this user share the real directory, and may write to it at any time.
    monkeypatch.setattr(paths, "frozen_dir", lambda: home / "frozen")
    store = BundleStore(Cache.at().bundles)
    return [publish(store, tmp_path / "scratch", blocks=blocks) for blocks in (1, 2)]


def test_store_lists_and_finds(bundles: list[Bundle]) -> None:
    store = Store()
    assert list(store.list()) == bundles and store.root == Cache.at().bundles
    assert store.get(f"{NAME}:v1") == bundles[0]
    with pytest.raises(BundleNotFoundError):
        store.get("other")


def test_prune_removes_old_versions(bundles: list[Bundle]) -> None:
    planned = Store().prune(dry_run=True)
    assert planned.removed == (bundles[0].digest,) and list(Store().list()) == bundles
    assert Store().prune() == planned and list(Store().list()) == [bundles[1]]


def test_archive_carries_bundles_to_another_store(bundles: list[Bundle], tmp_path: Path) -> None:
    file, other = tmp_path / "two.oci.tar", Store(tmp_path / "other")
    size = Store().export_archive([one.ref for one in bundles], file)
    assert size == file.stat().st_size
    with pytest.raises(DestinationExistsError):
        Store().export_archive([NAME], file)
    Store().export_archive([NAME], file, replace=True)
    assert list(other.import_archive(file)) == [bundles[1]] == list(other.list())


def test_push_returns_the_address_that_pull_takes(bundles: list[Bundle], tmp_path: Path) -> None:
    address = Store().push(bundles[0].ref, str(tmp_path / "shared"))
    other = Store(tmp_path / "other")
    assert other.pull(address) == bundles[0] and list(other.list()) == [bundles[0]]
