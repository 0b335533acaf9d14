"""One frozen runtime starts models of different architectures; a changed runtime is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.machine import Machine, Tokens, criu

from coldstart.system.snapshot import criu as engine_criu
from coldstart.system.snapshot import criu_memory

pytestmark = pytest.mark.vllm
PLANTED = {name: f"PLANTED-{name}" for name in ("HF_TOKEN", "VLLM_API_KEY", "MY_OWN_VARIABLE", "DB_PASSWORD")}


@pytest.fixture(scope="module")
def image(machine: Machine) -> Iterator[Path]:
    """Freeze a runtime with secrets in the environment; discard it afterwards, because `auto` would use it in other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(engine_criu.VARIABLE, criu() or "")
        if (reason := engine_criu.explain_unavailable()) is not None:
            pytest.skip(reason)
    said = json.loads(Machine(machine.root, PLANTED).run("template", "freeze", "--format", "json"))
    assert said["made_now"] and said["obstacle"] is None
    yield Path(said["directory"])
    machine.run("template", "discard")
    assert not Path(said["directory"]).exists()


def test_two_llamas_at_once(machine: Machine, bundle: Any, image: Path, reference: Tokens) -> None:
    mode = ("--mode", "runtime-snapshot")
    with machine.serving("tiny-llama", *mode) as one, machine.serving("tiny-llama", *mode) as two:
        for served in (one, two):
            assert served.report["mode"] == "runtime-snapshot" and served.report["fallbacks"] == []
            assert served.report["fast_path"] == {"mode": True, "compile": True}
            environments = [Path(f"/proc/{each.pid}/environ").read_bytes() for each in served.family()]
            assert not [held for held in environments if b"PLANTED-" in held]
        assert one.tokens() == two.tokens() == reference
    assert list((machine.root / "run" / "coldstart").glob("thawed-*")) == []


def test_image_contains_no_secret_of_its_creator(image: Path) -> None:
    assert sum((image / name).stat().st_size for name in ("pages-1.img", criu_memory.MEMORY_FILE)) > 100 << 20
    assert [path.name for path in image.iterdir() if b"PLANTED-" in path.read_bytes()] == []
    assert {path.stat().st_mode & 0o777 for path in image.iterdir()} == {0o600}
