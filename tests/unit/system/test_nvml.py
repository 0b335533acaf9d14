"""nvidia-ml-py with a small fake NVML library whose answers follow NVML's manual."""

from __future__ import annotations

import pytest
from support.fake_nvml import A100, GIB, H200, Fake

from coldstart.system.devices import nvml

RETURN_CODES = [2, 4, 5, 7, 9, 10, 11, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 999]


MANDATORY = (
    "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetUUID",
)  # fmt: skip


@pytest.mark.parametrize("code", RETURN_CODES)
@pytest.mark.parametrize("name", MANDATORY)
def test_no_return_code_becomes_a_figure(fake: Fake, name: str, code: int) -> None:
    """CUDA's numbering ends at a device that does not answer, so later devices are not renumbered."""
    for _ in range(3):
        fake.add()
    fake.fail(name, code, device=1)
    found = nvml.machine()
    assert len(found.devices) == 1 and found.devices[0].memory_bytes == 140 * GIB
    assert len(found.problems) == 1 and "device 1" in found.problems[0]


@pytest.mark.parametrize("code", RETURN_CODES)
@pytest.mark.parametrize("name", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2", "nvmlSystemGetDriverVersion"])
def test_a_library_that_does_not_answer_is_named(fake: Fake, name: str, code: int) -> None:
    fake.add()
    fake.fail(name, code)
    found = nvml.machine()
    assert found.devices == [] and nvml.free_bytes() is None and len(found.problems) == 1


OPTIONAL = ("nvmlDeviceGetNumGpuCores", "nvmlDeviceGetMigMode")
UNSUPPORTED = (2, 3, 6, 13)


@pytest.mark.parametrize("code", sorted(set(RETURN_CODES) - set(UNSUPPORTED)))
@pytest.mark.parametrize("name", OPTIONAL)
def test_optional_facts_may_be_unsupported_only(fake: Fake, name: str, code: int) -> None:
    fake.add()
    fake.fail(name, code)
    found = nvml.machine()
    assert found.devices == [] and len(found.problems) == 1


@pytest.mark.parametrize(
    ("mask", "expected", "problems"),
    [
        (None, [0, 1, 2], 0), ("1", [1], 0), ("2,0", [2, 0], 0), ("-1", [], 0), ("", [], 0), ("9", [], 1),
        ("0,9,1", [0], 1), ("0,-1,1", [0], 0), (" 1 , 2 ", [1, 2], 0), ("GPU-00000002", [2], 0),
        ("GPU-00000001-0000-0000-0000-000000000000,GPU-00000000", [1, 0], 0), ("GPU-0000000", [], 1),
        ("GPU-ffff", [], 1), ("MIG-ffff", [], 1), ("none", [], 1),
    ],
)  # fmt: skip
def test_visible_devices_mask(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, mask: str | None, expected: list[int], problems: int
) -> None:
    """Devices are given by index, UUID or unique prefix; the list ends at the first unknown entry."""
    uuids = [fake.add() for _ in range(3)]
    if mask is not None:
        monkeypatch.setenv(nvml.VISIBLE, mask)
    found = nvml.machine()
    assert [g.uuid for g in found.devices] == [uuids[i] for i in expected]
    assert len(found.problems) == problems


def test_mig_device_is_listed_as_its_instance(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add(mig=1)
    first = fake.add(("NVIDIA H200 MIG 1g.18gb", 0, 0, 0, 16), parent=0, free=17)
    second = fake.add(("NVIDIA H200 MIG 3g.71gb", 0, 0, 0, 60), parent=0, free=70)
    (device,) = nvml.query()
    assert (device.uuid, device.multiprocessors, device.compute_capability, device.mig) == (
        first,
        16,
        "9.0",
        True,
    )
    assert nvml.free_bytes() == 17 * GIB
    monkeypatch.setenv(nvml.VISIBLE, second)
    assert [(g.uuid, g.multiprocessors) for g in nvml.query()] == [(second, 60)]


def test_two_device_models_need_the_bus_order(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add(A100)
    fake.add(H200)
    found = nvml.machine()
    assert found.devices == [] and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in found.problems[0]
    monkeypatch.setenv(nvml.ORDER, "PCI_BUS_ID")
    assert nvml.query()[0].name == A100[0]
    monkeypatch.delenv(nvml.ORDER)
    monkeypatch.setenv(nvml.VISIBLE, "GPU-00000001")
    assert nvml.query()[0].name == H200[0]
