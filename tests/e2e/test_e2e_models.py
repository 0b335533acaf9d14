"""Another architecture whose bundle has no compiled code: replayed, with a wrong canary, after a killed `materialize`."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.prune import prune
from coldstart.artifacts.store import Store
from support.processes import find_family, remaining, wait_until
from tools import bundles
from tools.machine import EAGER, READY_S, Machine

pytestmark = pytest.mark.vllm


def test_materialize_succeeds_after_a_killed_run(machine: Machine, bundle: Any) -> None:
    before = machine.run("list", "--format", "json")
    if "tiny-opt" not in before:
        family = _killed_in_the_middle(machine)
        assert len(family) >= 2 and remaining(family) == []
        assert machine.run("list", "--format", "json") == before
        machine.run("validate", bundle.ref)
    _materialized(machine, "tiny-opt", EAGER)
    assert [left for left in (machine.cache / "work").iterdir() if left.is_dir()] == []


def test_a_copy_of_the_model_replays_prompts_alone_and_at_once(machine: Machine, tmp_path: Path) -> None:
    """Levels that start servers; the copy has the same key as the model of the bundle."""
    bundle = _materialized(machine, "tiny-opt", EAGER)
    (model,) = (machine.cache / "models").glob("*/tiny-opt")
    shutil.copytree(model, tmp_path / "my-model")
    (tmp_path / "prompts.txt").write_text("Once upon a time\na b c\n")
    asked = ["--level", "replay", "--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "16"]
    said = machine.run("validate", bundle.ref, "--model", str(tmp_path / "my-model"), *asked)
    assert said.splitlines()[0] == f"{bundle.ref}: valid at level replay"


def test_server_with_a_wrong_canary_answers_no_client(machine: Machine) -> None:
    store = Store(machine.cache / "bundles")
    original = _materialized(machine, "tiny-opt", EAGER)
    info: Any = original.read_json("modelinfo")
    right = info["canary"]["tokens"]
    with store.open_draft(original.key) as draft:
        for entry in original.manifest.sections:
            if entry.section_type != "modelinfo":
                bundles.keep(draft, original, entry.section_type)
        wrong = [token + 1 for token in right]
        draft.add_json("modelinfo", info | {"canary": info["canary"] | {"tokens": wrong}})
        signer = sign.load_host_key(machine.root / "home" / "state" / "coldstart")
        forged = draft.publish(original.manifest.provenance, signer=signer)
    try:
        with machine.serving("tiny-opt", "--mode", "fresh", vllm=EAGER) as served:
            assert "canary" in [fallback["section"] for fallback in served.report["fallbacks"]]
            assert served.report["fast_path"]["mode"] is False
            answer = served.client.complete(info["canary"]["prompt"], len(right))
            assert list(answer.tokens) == right
    finally:
        prune(store.layout, keep=None, drop=[forged])


def _killed_in_the_middle(machine: Machine) -> list[psutil.Process]:
    """Kill `materialize` after its engine has imported vLLM; return all its processes."""
    process = machine.start("materialize", "tiny-opt", "--", *EAGER, stderr=subprocess.DEVNULL)

    def imports() -> bool:
        return any(
            "import vllm" in one.read_text() for one in (machine.cache / "work").glob("*/offline.events")
        )

    wait_until(lambda: process.poll() is not None or imports(), READY_S)
    family = find_family(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return family


def _materialized(machine: Machine, model: str, args: tuple[str, ...]) -> Bundle:
    said = json.loads(machine.run("materialize", model, "--format", "json", "--", *args))
    return Store(machine.cache / "bundles").find_by_reference(said["ref"])
