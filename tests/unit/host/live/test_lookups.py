"""One look-up for a model's figures and its start, with the same arguments and trust."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from coldstart.artifacts.bundle import anyone

from coldstart.contract.arguments import Arguments
from coldstart.errors import NoBundleError
from coldstart.host.launches import WARN, Launch
from coldstart.host.live import lookups
from coldstart.models import inspection
from coldstart.system.paths import Cache


@pytest.mark.parametrize("untrusted", [False, True])
def test_lookup_uses_arguments_and_trust_of_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrusted: bool
) -> None:
    asked: list[Any] = []
    found = SimpleNamespace(bundle=None)

    def look_up(*words: Any, **more: Any) -> Any:
        asked.append((words, more))
        return found

    monkeypatch.setattr(inspection, "look_up", look_up)
    monkeypatch.setattr(inspection, "miss", lambda *_: NoBundleError("none"))
    cache = Cache.at(tmp_path)
    launch = Launch("m", "dir", Arguments(("--seed", "1")), revision="r", untrusted=untrusted, on_miss=WARN)
    assert lookups.look_up_launch(launch, cache, offline=True) is found
    ((model, args), more) = asked[0]
    assert (model, list(args)) == ("dir", ["--seed", "1"])
    assert more == {
        "cache": cache,
        "offline": True,
        "revision": "r",
        "accepts": anyone if untrusted else None,
    }
    with pytest.raises(NoBundleError):
        lookups.look_up_launch(Launch("m", "dir"), cache, offline=True)
