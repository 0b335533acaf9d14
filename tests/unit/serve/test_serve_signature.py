"""`--require-signature`: a bundle that nobody trusted has signed is refused before anything is unpacked."""

from __future__ import annotations

from typing import Any

import pytest
from coldstart.artifacts.bundle import TrustResult, anyone

from coldstart.contract.plan import LaunchPlan
from coldstart.errors import Failed
from coldstart.serve import serve

PLANNED = LaunchPlan(["planned"])


class _Bundle:
    ref = name = "made@sha256:0"
    version = 1


def _request(trust: Any) -> serve.Request:
    return serve.Request("tiny-llama", require_signature=True, trust=trust)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        bundle, model = _Bundle(), None

    monkeypatch.setattr(serve.inspection, "look_up_for", lambda request: Found())
    monkeypatch.setattr(serve.models, "ensure_weights", lambda model, offline: model)
    monkeypatch.setattr(serve.prepare, "prepare", lambda *arguments, **options: PLANNED)


@pytest.mark.usefixtures("found")
def test_refuses_what_no_trusted_key_has_signed() -> None:
    nobody = lambda bundle: TrustResult(False, None, "it carries no signature")  # noqa: E731 - a one-line judge
    with pytest.raises(Failed, match="no signature") as caught:
        serve.plan(_request(nobody), phase=None)  # type: ignore[arg-type]
    assert "coldstart trust add" in (caught.value.mend or "")


@pytest.mark.usefixtures("found")
def test_takes_what_a_trusted_key_has_signed() -> None:
    _, planned = serve.plan(_request(anyone), phase=None)  # type: ignore[arg-type]
    assert planned == PLANNED
