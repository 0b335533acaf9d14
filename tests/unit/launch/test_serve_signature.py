"""`--require-signature`: a bundle that nobody trusted has signed is refused before anything is unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from coldstart.artifacts.bundle import TrustResult, anyone
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import planning
from coldstart.launch.request import ServeRequest
from coldstart.models import resolution
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache

PLANNED = LaunchPlan(["planned"])


class _Bundle:
    ref = name = "made@sha256:0"
    version = 1


@pytest.fixture
def found(model: ResolvedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> Lookup:
    monkeypatch.setattr(resolution, "ensure_weights", lambda model, offline: model)
    monkeypatch.setattr(planning.prepare, "prepare", lambda *arguments, **options: PLANNED)
    return Lookup(model, Arguments(), Cache.at(), key(), cast(Any, _Bundle()))


def test_refuses_what_no_trusted_key_has_signed(found: Lookup) -> None:
    nobody = lambda bundle: TrustResult(False, None, "it carries no signature")  # noqa: E731 - a one-line judge
    with pytest.raises(CommandFailedError, match="no signature") as caught:
        planning.plan(ServeRequest(found, require_signature=True, trust=nobody))
    assert "coldstart trust add" in (caught.value.hint or "")


def test_takes_what_a_trusted_key_has_signed(found: Lookup) -> None:
    assert planning.plan(ServeRequest(found, require_signature=True, trust=anyone)) == PLANNED
