"""coldstart serve: what it refuses before anything is imported, and what it would start."""

import json
import shlex
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from support.recorded_models import publish_recorded
from tools import tiny_models
from tools.command_line import Run

from coldstart.models import resolution
from coldstart.system.ipc.addresses import find_free_port
from coldstart.system.paths import Cache

OURS = ("--scheduler", "skip-join-mlfq")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--scheduler", "magic"),
            "--scheduler must be one of auto, fcfs, skip-join-mlfq, deadline, found 'magic'",
        ),
        (
            (*OURS, "--", "--kv-transfer-config", "{}"),
            "--kv-transfer-config cannot be combined with --scheduler skip-join-mlfq",
        ),
        ((*OURS, "--", "--scheduler-cls", "x.Y"), "--scheduler-cls cannot be combined"),
        (("--ready-timeout", "nan"), "nan is not above 0"),
        (("--", "--model", "o", "--revision=1"), "--model and --revision, which coldstart sets"),
        (("--", "--config=f.yaml"), "cannot read the file of vLLM's --config"),
        (("--ready-file", "/tmp"), "cannot write /tmp: it is a directory"),
        (("--output", "/tmp"), "cannot write /tmp: it is a directory"),
        ((*OURS, "--oldest-share", "2"), "--oldest-share must be at least 0, at most 1, found 2.0"),
        (("--alpha", "1"), "cannot use --alpha with fcfs, which accepts only --batch;"),
    ],
)
def test_an_impossible_option_is_refused(arguments: tuple[str, ...], words: str, run: Run) -> None:
    said = run("serve", "no-such-model", *arguments, code=2).stderr
    assert words in " ".join(said.split())


ARGUMENTS = ("--max-model-len", "512")


@pytest.fixture
def model(run: Run) -> str:
    tiny_models.require_vllm()
    tiny_models.place("tiny-llama", Cache.at().models)
    return "tiny-llama"


def test_serve_uses_the_arguments_of_the_bundle_when_none_are_typed(model: str, run: Run) -> None:
    made = publish_recorded(model, ARGUMENTS)
    done = run("serve", model, "--dry-run", "--format", "json")
    assert "Using the arguments of tiny-llama:v1: --max-model-len 512\n" in done.stderr
    planned = json.loads(done.stdout)
    assert planned["bundle"] == made.ref
    at = planned["vllm_args"].index("--max-model-len")
    assert planned["vllm_args"][at + 1] == "512"


def test_dry_run_shows_mode_bundle_and_url(model: str, run: Run) -> None:
    publish_recorded(model, ARGUMENTS)
    shown = run("serve", model, "--mode", "fresh", "--dry-run", "--port", "8001").stdout
    lines = ["mode    fresh", "bundle  tiny-llama:v1", "url     http://127.0.0.1:8001"]
    assert shown.splitlines()[:3] == lines


def test_serve_refuses_a_port_in_use_before_it_materializes(model: str, run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        done = run("serve", model, "--on-miss", "materialize", "--port", str(port), code=2)
    assert f"cannot listen at 127.0.0.1:{port}: another process listens there" in done.stderr
    assert "hint: choose another port: --port " in done.stderr
    assert not Cache.at().bundles.exists()


@pytest.fixture
def next_command(run: Run) -> Callable[..., list[str]]:
    """next_command(*arguments): run a command and return the command that it prints as the next, without "coldstart"."""

    def read(*arguments: str) -> list[str]:
        return shlex.split(run(*arguments).stderr.partition(" Next: coldstart ")[2].splitlines()[0])

    return read


def test_the_next_command_of_import_starts_the_bundle(
    model: str, run: Run, next_command: Callable[..., list[str]]
) -> None:
    made = publish_recorded(model, ARGUMENTS)
    run("export", model)
    run("prune", model)
    following = next_command("import", "tiny-llama-v1.oci.tar")
    assert following == ["serve", "tiny-llama:v1"]
    assert json.loads(run(*following, "--dry-run", "--format", "json").stdout)["bundle"] == made.ref


@pytest.mark.parametrize("words", [("up", "--port", "0"), ("host", "--memory", "2GiB")])
def test_untrusted_bundle_is_named_before_another_build(words: tuple[str, ...], model: str, run: Run) -> None:
    publish_recorded(model, ARGUMENTS, signed=False)
    said = run(words[0], model, *words[1:], code=3).stderr
    assert "the only one for tiny-llama" in said and "is not trusted" in said
    assert "hint: run `coldstart trust add FILE`" in said


@pytest.mark.parametrize(("arguments", "end"), [((), ["--"]), (ARGUMENTS, ["--", *ARGUMENTS])])
def test_the_next_command_of_materialize_starts_the_bundle_that_was_found(
    arguments: tuple[str, ...], end: list[str], model: str, run: Run, next_command: Callable[..., list[str]]
) -> None:
    made = publish_recorded(model, arguments)
    publish_recorded(model, ("--max-model-len", "256"), created="2026-02-01T00:00:00Z")
    following = next_command("materialize", model, "--", *arguments)
    assert following == ["serve", model, *end]
    at = following.index("--")
    planned = run(*following[:at], "--dry-run", "--format", "json", *following[at:])
    assert json.loads(planned.stdout)["bundle"] == made.ref


def test_serve_ignores_variables_of_a_kubernetes_service(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDSTART_SERVE_PORT", "tcp://10.43.1.41:8000")
    monkeypatch.setenv("COLDSTART_SERVE_PORT_8000_TCP", "tcp://10.43.1.41:8000")
    reported = run("serve", "no-such-model", "--dry-run", code=2).stderr
    assert "warning: ignored COLDSTART_SERVE_PORT, COLDSTART_SERVE_PORT_8000_TCP" in reported
    assert "Invalid value" not in reported and "no-such-model" in reported


@pytest.mark.parametrize("command", [("materialize",), ("serve", "--port", "0"), ("serve", "--dry-run")])
def test_weights_that_cannot_be_loaded_are_refused_although_a_bundle_of_the_key_exists(
    command: tuple[str, ...], model: str, run: Run, tmp_path: Path
) -> None:
    source, broken = resolution.resolve(model).path, tmp_path / "broken"
    assert source is not None
    shutil.copytree(source, broken)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    publish_recorded(str(broken), ARGUMENTS)
    # Another server of this machine may listen at the usual port.
    port = ["--port", str(find_free_port())] if "serve" in command else []
    reported = run(*command, *port, str(broken), "--", *ARGUMENTS, code=2).stderr
    assert "model-00001-of-00002.safetensors, which does not exist" in " ".join(reported.split())
    assert "hint: fetch the model again" in reported
