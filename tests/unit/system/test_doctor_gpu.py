"""doctor on simulated GPU machines: permitted modes, and a hint for each missing requirement."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.fake_nvml import Fake

from coldstart.launch import modes
from coldstart.system import probes, runtime
from coldstart.system.paths import Cache
from coldstart.system.probes import Probe


@pytest.fixture(autouse=True)
def gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate vLLM's GPU build and CRIU."""
    monkeypatch.setattr(runtime, "find_vllm_distribution", lambda: ("vllm", "0.32.0"))
    monkeypatch.setattr(runtime, "targets_cpu", lambda: False)
    monkeypatch.setattr(probes, "probe_criu", lambda: Probe("criu", "ok", "4.2"))


def _found(tmp_path: Path) -> tuple[dict[str, Probe], dict[str, bool]]:
    found = probes.run_probes(Cache(tmp_path))
    return {probe.name: probe for probe in found}, modes.list_permitted(found)


def test_doctor_accepts_a_mig_instance(fake: Fake, tmp_path: Path) -> None:
    fake.add(mig=1)
    fake.add(("NVIDIA H200 MIG 3g.71gb", 0, 0, 0, 60), parent=0)
    found, ways = _found(tmp_path)
    assert "MIG 3g.71gb" in found["gpu"].found and ways["fresh"]


def test_modes_unavailable_on_a_gpu_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert set(modes.list_reasons()) == {"template-engine", "snapshot", "runtime-snapshot", "parked"}
    assert all(found.reason and found.hint for found in modes.list_reasons().values())
