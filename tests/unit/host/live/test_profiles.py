"""Profile of a model before its first start."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts.errors import BundleError
from support.fake_nvml import GIB, Fake
from support.fake_upstream import TWO, staged
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.errors import NoBundleError, UsageError
from coldstart.host import configuration
from coldstart.host.configuration import Profile
from coldstart.host.launches import Launch
from coldstart.host.live import profiles
from coldstart.host.live.profiles import build_device_environment, fill_in_device_memory, share_gpus
from coldstart.system.devices import nvml
from coldstart.system.paths import Cache

pytestmark = pytest.mark.usefixtures("home")


class Bundle:
    def __init__(self, stages: Any) -> None:
        self.stages = stages

    def read_json(self, section: str) -> Any:
        if self.stages is None:
            raise BundleError("the stages section is missing")
        return {"stages": self.stages}[section]


def _found(stages: Any, path: Path) -> Any:
    model = SimpleNamespace(path=path, cli_argument="m")
    return SimpleNamespace(
        bundle=Bundle(stages),
        model=model,
        key=key(),
        format_command=lambda name, *words: " ".join(("coldstart", name, "m", *words)),
    )


STAGES = {"memory_bytes": 5, "ready_s": 2.0, "device_bytes": 9}


@pytest.mark.parametrize(
    ("stages", "on_cpu", "expected"),
    [
        (STAGES, True, Profile(5, 2.0, "bundle")),
        (STAGES | {"device_bytes": None}, True, Profile(5, 2.0, "bundle")),
        (STAGES, False, Profile(9, 2.0, "bundle")),
        (
            STAGES | {"asleep_bytes": 3, "parked_bytes": 0, "device_floor_bytes": 4},
            False,
            Profile(9, 2.0, "bundle", tiers={"asleep-1": 3, "asleep-2": 3, "parked": 0}, least=4),
        ),
        *((stages, True, None) for stages in ({**STAGES, "memory_bytes": 0}, {"ready_s": 2.0}, [], None)),
        *((STAGES | {"device_bytes": size}, False, None) for size in (None, 0, "much")),
    ],
)
def test_profile_has_the_figures_of_the_bundle(
    stages: Any, on_cpu: bool, expected: Profile | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is that of the processes on the CPU, and that of the devices on a GPU, where none is assumed."""
    monkeypatch.setattr(profiles.runtime, "targets_cpu", lambda: on_cpu)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 50)
    launch, found = Launch("m", "m"), _found(stages, tmp_path)
    if expected is None and not on_cpu:
        with pytest.raises(UsageError, match="GPU memory of the model is unknown") as caught:
            profiles.choose_profile(launch, found)
        assert caught.value.hint and "coldstart materialize m --force" in caught.value.hint
        assert profiles.choose_profile(launch, found, 7).memory == 7
        return
    profile = profiles.choose_profile(launch, found)
    assert profile == expected or (expected is None and profile.source == "assumed")


def test_without_a_bundle_the_weights_and_the_kv_cache_are_counted(tmp_path: Path) -> None:
    launch = Launch("m", "m", Arguments(("--kv-cache-memory-bytes", "100")))
    with pytest.raises(UsageError, match=r"models\.m: the memory of the model is unknown"):
        profiles.estimate_profile(launch, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 50)
    found = profiles.estimate_profile(launch, tmp_path)
    assert (found.memory, found.source) == (150 + profiles.ASSUMED_RUNTIME, "assumed")


def test_model_without_bundle_is_refused_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    found = SimpleNamespace(**vars(_found(None, tmp_path)) | {"bundle": None})
    monkeypatch.setattr(profiles.inspection, "look_up", lambda *_, **__: found)
    monkeypatch.setattr(
        profiles.inspection, "build_miss_error", lambda *_: NoBundleError("no bundle", hint="make one")
    )
    profile = profiles.create_profile_reader(Cache(tmp_path), offline=True)
    with pytest.raises(NoBundleError):
        profile(Launch("m", "m"))
    found_ = profile(Launch("m", "m", on_miss="warn"))
    assert (found_.source, found_.shared) == ("assumed", profiles.RUNTIME_TEMPLATE_BYTES)
    assert profile(Launch("m", "m", on_miss="warn", mode="fresh")).shared == 0
    monkeypatch.setattr(profiles.runtime, "targets_cpu", lambda: False)
    with pytest.raises(UsageError, match="GPU memory of the model is unknown"):
        profile(Launch("m", "m", on_miss="warn"))
    found.bundle = Bundle(STAGES)
    assert profile(Launch("m", "m")) == Profile(9, 2.0, "bundle"), "a template lends no memory of a device"


def _file(*devices: list[int], **limits: Any) -> configuration.HostFile:
    models = {
        name: {"memory": 5, "start_s": 1.0, "devices": one} for name, one in zip("abc", devices, strict=False)
    }
    return configuration.parse({"memory": 500 * GIB, **limits, "models": models})


def test_memory_of_devices_is_that_of_the_smallest(fake: Fake) -> None:
    fake.add()
    fake.add()
    file = fill_in_device_memory(_file([0], [0, 1]))
    assert file.settings.device_memory == 140 * GIB and not file.notes
    assert fill_in_device_memory(_file([0], device_memory="20GiB")).settings.device_memory == 20 * GIB


def test_a_device_that_the_host_does_not_see_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add()
    fake.add()
    monkeypatch.setenv(nvml.VISIBLE, "1")
    with pytest.raises(UsageError, match=r"models\.b\.devices: device 1 does not exist"):
        fill_in_device_memory(_file([0], [1]))


def test_devices_that_cannot_be_read_are_noted(fake: Fake) -> None:
    file = fill_in_device_memory(_file([0]))
    assert file.settings.device_memory is None
    assert file.notes == ("cannot read the memory of the devices: set device_memory in the host file",)
    assert not fill_in_device_memory(_file([0], device_memory=9)).notes


def _share(
    limit: int, *sizes: tuple[int, int], host: Any = (), **more: Any
) -> tuple[list[int], list[float], tuple[str, ...]]:
    """Return what models get of a GPU of 140 GiB, as GiB and as vLLM's share, of their least and of their peak in GiB."""
    known = iter([Profile(peak * GIB, 1.0, "bundle", least=least * GIB) for least, peak in sizes])
    table = {"memory": limit * GIB, "models": {f"m{n}": more for n in range(len(sizes))}, **dict(host)}
    file = share_gpus(configuration.parse(table, lambda _: next(known)))
    words = [profiles.limit_gpu_memory(one.args, one.gpu_bytes) for one in file.catalogue.launches.values()]
    return (
        [spec.tiers[0].memory // GIB for spec in file.models],
        [float(w[1]) for w in words if w],
        file.notes,
    )


def test_models_of_a_gpu_get_less_when_they_would_not_fit_together(fake: Fake) -> None:
    """A server that gets 60 GiB less starts with a share of the GPU that is 60 GiB smaller."""
    fake.add()
    default = 0.92 * 140
    both, shares, notes = _share(138, (20, 129), (40, 129))
    assert both == [59, 79] and shares == pytest.approx(
        [(default - 70) / 140, (default - 50) / 140], abs=2e-4
    )
    assert notes[0] == "m0 gets 59.00 GiB of GPU memory instead of 129.00 GiB, so that more models fit"
    assert _share(138, (20, 60), (40, 70))[:2] == ([60, 70], []), "they fit as they are"
    assert _share(138, (20, 129), (0, 129))[:2] == ([129, 129], []), (
        "the bundle of one does not record its least"
    )
    assert _share(138, (20, 30), (40, 129))[0] == [30, 108], "one needs less than its part"
    assert _share(138, (60, 129), (60, 129), (50, 129))[0] == [69, 69, 59], "any two of three fit"
    three = ((20, 129), (20, 129), (20, 129))
    assert (
        _share(138, *three)[0] == [46] * 3 and _share(138, *three, host={"max_residents": 2})[0] == [69] * 3
    )
    assert _share(100, (20, 129))[0] == [100] and _share(100, (110, 129))[0] == [129]
    assert _share(138, (20, 129), (40, 129), memory=100 * GIB)[:2] == ([100, 100], []), "the user has set it"


def test_models_of_a_gpu_get_less_on_each_device_that_they_share(fake: Fake) -> None:
    for _ in range(2):
        fake.add()
    peaks = {"a": 129, "b": 258, "c": 129}
    models: dict[str, Any] = {"a": {"devices": [0]}, "b": {"devices": [0, 1]}, "c": {"devices": [1]}}
    models["b"]["args"] = ["--tensor-parallel-size", "2"]
    table = {"memory": 280 * GIB, "device_memory": 138 * GIB, "models": models}
    before = configuration.parse(
        table, lambda launch: Profile(peaks[launch.name] * GIB, 1.0, "bundle", least=20 * GIB)
    )
    file = share_gpus(before)
    assert [spec.tiers[0].memory // GIB for spec in file.models] == [74, 128, 74]
    pair, former = (one.catalogue.launches["b"] for one in (file, before))
    assert pair.gpu_bytes == pytest.approx((0.92 * 140 - 65) * GIB, rel=1e-6)
    assert pair.server_identity != former.server_identity, "a reload replaces the server"


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


async def test_host_starts_servers_on_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(nvml.VISIBLE, raising=False)
    models = {"a": {**TWO["a"], "devices": [1]}, "b": {**TWO["b"], "devices": [0, 1]}}
    async with staged(tmp_path, models, memory=40, device_memory=15) as stage:
        object.__setattr__(stage.driver.lifecycle.launches["b"], "gpu_bytes", 7)
        for name in "ab":
            assert (await stage.ask(model=name, prompt=1))[0] == 200
        assert [server.env for server in stage.servers.begun] == [
            {"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "0,1"}
        ]  # fmt: skip
        assert [server.order.gpu_bytes for server in stage.servers.begun] == [0, 7]
