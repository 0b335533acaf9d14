"""Models on devices of their own: their memory comes from NVML, and each server sees its devices only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.fake_nvml import GIB, Fake, built, fake
from support.fake_upstream import TWO, staged

from coldstart.errors import UsageError
from coldstart.host import configuration
from coldstart.host.live.profiles import build_device_environment, set_device_memory
from coldstart.system.devices import nvml

__all__ = ["built", "fake"]


def _file(*devices: list[int], **limits: Any) -> configuration.HostFile:
    models = {
        name: {"memory": 5, "start_s": 1.0, "devices": one} for name, one in zip("abc", devices, strict=False)
    }
    return configuration.parse({"memory": 500 * GIB, **limits, "models": models})


def test_memory_of_devices_is_that_of_the_smallest(fake: Fake) -> None:
    fake.add()
    fake.add()
    file = set_device_memory(_file([0], [0, 1]))
    assert file.settings.device_memory == 140 * GIB and not file.notes
    assert set_device_memory(_file([0], device_memory="20GiB")).settings.device_memory == 20 * GIB


def test_a_device_that_the_host_does_not_see_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add()
    fake.add()
    monkeypatch.setenv(nvml.VISIBLE, "1")
    with pytest.raises(UsageError, match=r"models\.b\.devices: device 1 does not exist: the host sees 1"):
        set_device_memory(_file([0], [1]))


def test_devices_that_cannot_be_read_are_noted(fake: Fake) -> None:
    file = set_device_memory(_file([0]))
    assert file.settings.device_memory is None
    assert file.notes == ("cannot read the memory of the devices: set device_memory in the host file",)
    assert not set_device_memory(_file([0], device_memory=9)).notes


@pytest.mark.parametrize(
    ("visible", "shown"), [(None, "0,2"), ("GPU-a, GPU-b,GPU-c", "GPU-a,GPU-c"), ("5,6,7", "5,7")]
)
def test_a_server_sees_its_devices_only(
    visible: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nvml.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(nvml.VISIBLE, visible)
    launches = _file([0, 2]).catalogue.launches
    assert build_device_environment(launches["a"]) == {"CUDA_VISIBLE_DEVICES": shown}
    assert build_device_environment(_file([]).catalogue.launches["a"]) == {}


async def test_a_host_starts_each_server_on_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(nvml.VISIBLE, raising=False)
    models = {"a": {**TWO["a"], "devices": [1]}, "b": {**TWO["b"], "devices": [0, 1]}}
    async with staged(tmp_path, models, memory=40, device_memory=15) as stage:
        for name in "ab":
            assert (await stage.ask(model=name, prompt=1))[0] == 200
        assert [server.env for server in stage.servers.begun] == [
            {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0,1"}
        ]  # fmt: skip
