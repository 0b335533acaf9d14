"""A dry run changes no file, sends no request, and reports what the command would do."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.store import Store
from tools import tiny_models
from tools.bundles import CODE, KV, publish_sections, write_tree
from tools.command_line import Run

from coldstart.models import inspection
from coldstart.system import paths
from coldstart.system.paths import Cache
from coldstart.weights import weights_plan

COMMIT = "0123456789abcdef0123456789abcdef01234567"
Listing = dict[str, tuple[int, ...]]


@pytest.fixture
def before(run: Run, monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[list[Listing]]:
    """Check after the test that the home is as in the listing of `note`, and that the hub received no connection."""
    tiny_models.require_vllm()
    noted: list[Listing] = []
    with socket.create_server(("127.0.0.1", 0)) as hub:
        hub.setblocking(False)
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        yield noted
        with pytest.raises(BlockingIOError):
            hub.accept()
    assert noted and noted[0] == _list(home)


def _list(home: Path) -> Listing:
    """Return what shows a change of each file and directory; those of sockets are no result of a command."""
    found = [path for path in home.rglob("*") if path.relative_to(home).parts[0] != "runtime_dir"]
    states = ((str(path.relative_to(home)), path.lstat()) for path in found)
    return {name: (one.st_ino, one.st_size, one.st_mtime_ns, one.st_mode) for name, one in states}


@pytest.fixture
def model(home: Path, run: Run) -> Path:
    """A local model with a signed bundle that nothing has looked at yet."""
    model = Path(shutil.copytree(tiny_models.shared("tiny-llama"), home / "my-model"))
    wanted = inspection.look_up(str(model)).key
    publish_sections(
        Store(Cache.at().bundles),
        wanted,
        signer=sign.load_host_key(paths.state_dir()),
        kv=KV,
        modelinfo={"vllm_modelinfos": {"llama.json": "{}"}},
        weights=weights_plan.build_plan(model),
        compile=write_tree(home / "code", CODE),
    )
    shutil.rmtree(paths.state_dir() / "verdicts", ignore_errors=True)
    shutil.rmtree(paths.state_dir() / "compared", ignore_errors=True)
    return model


@pytest.mark.parametrize("options", [(), ("--weights-from", "my-model"), ("--mode", "fresh", "-v")])
def test_serve_describes_a_start_from_a_bundle(
    before: list[Listing], model: Path, run: Run, home: Path, options: tuple[str, ...]
) -> None:
    before.append(_list(home))
    planned = json.loads(run("serve", str(model), "--dry-run", "--format", "json", *options).stdout)
    assert planned["bundle"] and planned["mode"] == "fresh" and planned["downloads"] == []
    assert str(Cache.at().unpacked) in planned["compile_dir"]
    assert not [one for one in planned["fallbacks"] if one["section"] == "compile"]
    assert "mode    fresh\n" in run("serve", str(model), "--dry-run", *options).stdout


def test_serve_reports_untrusted_code(before: list[Listing], model: Path, run: Run, home: Path) -> None:
    shutil.rmtree(paths.state_dir() / "trust")
    before.append(_list(home))
    done = run("serve", str(model), "--dry-run", "--untrusted", "--format", "json")
    planned = json.loads(done.stdout)
    assert planned["compile_dir"] is None
    assert sorted(one["section"] for one in planned["fallbacks"] if "trusted" in one["reason"]) == [
        "compile",
        "modelinfo",
    ]


@pytest.mark.slow
def test_a_dry_run_builds_a_tiny_model_elsewhere(before: list[Listing], run: Run, home: Path) -> None:
    # What is in the working directory must not be imported.
    for name in ("torch", "coldstart", "tokenizers"):
        (home / f"{name}.py").write_text("open('ran', 'w').close()\nraise SystemExit(3)\n")
    before.append(_list(home))
    missing = run("serve", "tiny-llama", "--dry-run", "--on-miss", "materialize", "--format", "json")
    planned = json.loads(missing.stdout)
    assert planned["materializes"] and str(Cache.at().models) in " ".join(planned["vllm_args"])


@pytest.fixture
def cached(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub model whose configuration alone is in the hub's cache."""
    monkeypatch.setenv("HF_HOME", str(home / "hf"))
    root = home / "hf" / "hub" / "models--acme--tiny"
    directory = root / "snapshots" / COMMIT
    directory.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    (directory / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    return directory


@pytest.mark.parametrize("revision", [(), ("--revision", "main"), ("--revision", COMMIT)])
def test_what_a_hub_model_lacks_is_named_and_not_downloaded(
    before: list[Listing], cached: Path, run: Run, home: Path, revision: tuple[str, ...]
) -> None:
    before.append(_list(home))
    words = ("serve", "acme/tiny", "--dry-run", "--on-miss", "warn", *revision)
    assert "\ndownload  weights (*.safetensors" in run(*words).stdout
    (named,) = json.loads(run(*words, "--format", "json").stdout)["downloads"]
    assert "safetensors" in named
    assert f"download: {named}" in run("materialize", "acme/tiny", "--dry-run", *revision).stdout
