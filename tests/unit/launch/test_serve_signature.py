"""`--require-signature`: a bundle without a trusted signature is refused before any section is unpacked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from coldstart.artifacts.bundle import TrustResult
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import planning
from coldstart.launch.planning import ServeRequest
from coldstart.models import resolution
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache

PLANNED = LaunchPlan(["planned"])


class _Bundle:
    ref = name = "made@sha256:0"
    version = 1


@pytest.fixture
def lookup(model: ResolvedModel, home: Path, monkeypatch: pytest.MonkeyPatch) -> Lookup:
    monkeypatch.setattr(resolution, "ensure_weights", lambda model, offline: model)
    monkeypatch.setattr(planning.prepare, "prepare", lambda *arguments, **options: PLANNED)
    return Lookup(model, Arguments(), Cache.at(), key(), cast(Any, _Bundle()))


def test_plan_refuses_a_bundle_without_a_trusted_signature(lookup: Lookup) -> None:
    refuse = lambda bundle: TrustResult(False, None, "it carries no signature")  # noqa: E731 - one line
    with pytest.raises(CommandFailedError, match="no signature") as caught:
        planning.plan(ServeRequest(lookup, require_signature=True, trust=refuse))
    assert "coldstart trust add" in (caught.value.hint or "")
