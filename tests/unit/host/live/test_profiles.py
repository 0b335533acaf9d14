"""Profile of a model before its first start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts.errors import BundleError
from support.engines import fake_engine, home
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.errors import NoBundleError, UsageError
from coldstart.host.configuration import Profile
from coldstart.host.launches import Launch
from coldstart.host.live import profiles
from coldstart.system.paths import Cache

__all__ = ["fake_engine", "home"]
pytestmark = pytest.mark.usefixtures("home")


class Bundle:
    def __init__(self, stages: Any) -> None:
        self.stages = stages

    def json(self, section: str) -> Any:
        if self.stages is None:
            raise BundleError("the stages section is missing")
        return {"stages": self.stages}[section]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ({"memory_bytes": 5, "ready_s": 2.0}, Profile(5, 2.0, "bundle")),
        ({"memory_bytes": 0, "ready_s": 2.0}, None),
        ({"ready_s": 2.0}, None),
        ([], None),
        (None, None),
    ],
)
def test_profile_has_the_figures_of_the_bundle(stages: Any, expected: Profile | None) -> None:
    assert profiles.read_profile(Bundle(stages)) == expected  # type: ignore[arg-type]


def test_without_a_bundle_the_weights_and_the_kv_cache_are_counted(tmp_path: Path) -> None:
    launch = Launch("m", "m", Arguments(("--kv-cache-memory-bytes", "100")))
    with pytest.raises(UsageError, match=r"models\.m: its memory is unknown"):
        profiles.assumed(launch, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 50)
    found = profiles.assumed(launch, tmp_path)
    assert (found.memory, found.source) == (150 + profiles.ASSUMED_RUNTIME, "assumed")


def test_model_without_a_bundle_is_refused_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    found = SimpleNamespace(bundle=None, model=SimpleNamespace(path=tmp_path), key=key())
    monkeypatch.setattr(profiles.inspection, "look_up", lambda *_, **__: found)
    monkeypatch.setattr(profiles.inspection, "miss", lambda *_: NoBundleError("no bundle", hint="make one"))
    profile = profiles.create_profiles(Cache(tmp_path), offline=True)
    with pytest.raises(NoBundleError):
        profile(Launch("m", "m"))
    found_ = profile(Launch("m", "m", on_miss="warn"))
    assert (found_.source, found_.shared) == ("assumed", profiles.RUNTIME_TEMPLATE_BYTES)
    assert profile(Launch("m", "m", on_miss="warn", mode="fresh")).shared == 0
    monkeypatch.setattr(profiles.runtime, "targets_cpu", lambda: False)
    with pytest.raises(UsageError, match="do not contain the GPU memory"):
        profile(Launch("m", "m", on_miss="warn"))
