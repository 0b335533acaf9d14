"""A frozen engine or runtime restores any number of servers, at any address, and contains no secret of its creator."""

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from tools.machine import VLLM, Machine, Tokens, require_criu

from coldstart.system.snapshot import criu_memory

pytestmark = pytest.mark.vllm
SECRETS = "HF_TOKEN AWS_SECRET_ACCESS_KEY VLLM_API_KEY OPENAI_API_KEY MY_OWN_VARIABLE DB_PASSWORD"
PLANTED = {name: f"PLANTED-{name}" for name in SECRETS.split()}


@pytest.fixture(scope="module", params=["snapshot", "runtime-snapshot"])
def frozen(machine: Machine, bundle: Any, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """Freeze an engine of the bundle, or the runtime; remove the image afterwards, because `auto` would use it in other tests.

    Yield the start mode and the image.
    """
    with pytest.MonkeyPatch.context() as patch:
        require_criu(patch)
    rich = Machine(machine.root, PLANTED)
    if request.param == "snapshot":
        said = json.loads(
            rich.run("materialize", "tiny-llama", "--snapshot", "--format", "json", "--", *VLLM)
        )
        assert (said["key"], said["ref"]) == (bundle.key, bundle.ref)
        (image,) = (one.parent for one in (machine.cache / "snapshots").glob("*/inventory.img"))
        yield request.param, image
        shutil.rmtree(machine.cache / "snapshots")
        return
    said = json.loads(rich.run("template", "freeze", "--format", "json"))
    assert said["made_now"] and said["obstacle"] is None
    yield request.param, Path(said["directory"])
    machine.run("template", "discard")
    assert not Path(said["directory"]).exists()


def test_two_servers_thaw_at_once(machine: Machine, frozen: tuple[str, Path], reference: Tokens) -> None:
    mode, image = frozen
    caller = Machine(machine.root, {"HF_TOKEN": "of-the-caller"})
    with (
        caller.serving("tiny-llama", "--mode", mode) as one,
        machine.serving("tiny-llama", "--mode", mode) as two,
    ):
        for served in (one, two):
            assert served.report["mode"] == mode and served.report["fallbacks"] == []
            assert served.report["fast_path"] == {"mode": True, "compile": True}
            environments = [Path(f"/proc/{each.pid}/environ").read_bytes() for each in served.family()]
            assert not [held for held in environments if b"PLANTED-" in held]
            if mode == "snapshot":
                assert criu_memory.MEMORY_FILE in Path(f"/proc/{served.report['pid']}/maps").read_text()
                # No port of the frozen engine is restored: another process may use it by now.
                connections = psutil.Process(served.report["pid"]).net_connections("inet")
                listens = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
                assert listens == {urlsplit(served.report["url"]).port}
                # The frozen engine has one thread: CRIU writes one file per thread.
                assert len(list(image.glob("core-*.img"))) == 1
        assert one.tokens() == two.tokens() == reference
    assert list((machine.root / "run" / "coldstart").glob("thawed-*")) == []


def test_image_contains_no_secret_of_the_creator(frozen: tuple[str, Path]) -> None:
    files = list(frozen[1].iterdir())
    assert sum(file.stat().st_size for file in files) > 100 << 20  # the memory
    assert [file.name for file in files if b"PLANTED-" in file.read_bytes()] == []
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
