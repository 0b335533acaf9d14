"""A frozen engine thaws any number of times, at any address."""

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from tools.machine import VLLM, Machine, Tokens, criu

from coldstart.system.snapshot import criu as engine_criu
from coldstart.system.snapshot import criu_memory

pytestmark = pytest.mark.vllm
PLANTED = {
    name: f"PLANTED-{name}"
    for name in (
        "HF_TOKEN",
        "AWS_SECRET_ACCESS_KEY",
        "VLLM_API_KEY",
        "OPENAI_API_KEY",
        "MY_OWN_VARIABLE",
        "DB_PASSWORD",
    )
}


@pytest.fixture(scope="module")
def frozen(machine: Machine, bundle: Any) -> Iterator[str]:
    """Freeze an engine of the bundle; remove the image afterwards for other tests on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(engine_criu.VARIABLE, criu() or "")
        if (reason := engine_criu.explain_unavailable()) is not None:
            pytest.skip(reason)
    rich = Machine(machine.root, PLANTED)
    said = json.loads(rich.run("materialize", "tiny-llama", "--snapshot", "--format", "json", "--", *VLLM))
    assert said["key"] == bundle.key
    assert said["ref"] == bundle.ref
    yield str(said["ref"])
    shutil.rmtree(machine.cache / "snapshots")


def test_two_servers_thaw_at_once(machine: Machine, frozen: str, reference: Tokens) -> None:
    caller = Machine(machine.root, {"HF_TOKEN": "of-the-caller"})
    with (
        caller.serving("tiny-llama", "--mode", "snapshot") as one,
        machine.serving("tiny-llama", "--mode", "snapshot") as two,
    ):
        for served in (one, two):
            assert served.report["mode"] == "snapshot" and served.report["fallbacks"] == []
            assert served.report["fast_path"] == {"mode": True, "compile": True}
            assert criu_memory.MEMORY_FILE in Path(f"/proc/{served.report['pid']}/maps").read_text()
            # No port of the frozen engine is restored: another process may use it by now.
            connections = psutil.Process(served.report["pid"]).net_connections("inet")
            listens = {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}
            assert listens == {urlsplit(served.report["url"]).port}
            environments = [Path(f"/proc/{each.pid}/environ").read_bytes() for each in served.family()]
            assert not [held for held in environments if b"PLANTED-" in held]
        assert one.tokens() == two.tokens() == reference
        images = [one.parent for one in (machine.cache / "snapshots").glob("*/inventory.img")]
        # The frozen engine has one thread: CRIU writes one file per thread.
        assert [len(list(image.glob("core-*.img"))) for image in images] == [1] * len(images) != []
    assert list((machine.root / "run" / "coldstart").glob("thawed-*")) == []


def test_image_contains_no_secret_of_the_creator(machine: Machine, frozen: str) -> None:
    files = list((machine.cache / "snapshots").glob("*/*"))
    assert max(file.stat().st_size for file in files) > 100 << 20  # the memory
    assert [file.name for file in files if b"PLANTED-" in file.read_bytes()] == []
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
