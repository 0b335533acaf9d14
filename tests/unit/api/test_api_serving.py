"""`serve`: its options become one request, and its behaviour without a bundle."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from tools.bundles import provenance

from coldstart import api
from coldstart.errors import NoBundleError, UsageError
from coldstart.launch import driver
from coldstart.launch.planning import ServeRequest
from coldstart.materialize import materialize
from coldstart.materialize.options import Options
from coldstart.models.inspection import Lookup
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.system import paths


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[ServeRequest]:
    """Record the requests of `serve` without starting a server."""
    sent: list[ServeRequest] = []
    monkeypatch.setattr(driver, "start", sent.append)
    return sent


def _publish(lookup: Lookup, options: Options, phase: object) -> Bundle:
    with lookup.store.open_draft(lookup.key) as draft:
        draft.add_json("kv", {"bytes": 1})
        return draft.publish(provenance(), signer=sign.load_host_key(paths.state_dir()))


def test_serve_starts_a_server_without_a_bundle_when_on_miss_is_warn(
    model: str, fake_engine: Callable[[str], None]
) -> None:
    fake_engine("serves")
    with api.serve(model, ["--max-model-len", "512"], port=0, on_miss="warn", ready_timeout_s=60) as one:
        assert one.is_running() and one.mode == "fresh"
        assert one.url.startswith("http://127.0.0.1:") and not one.url.endswith(":0")
    assert not one.is_running()


def test_serve_raises_with_a_command_when_no_bundle_fits(model: str, requests: list[ServeRequest]) -> None:
    with pytest.raises(NoBundleError) as raised:
        api.serve(model, ["--max-model-len", "512"])
        driver.planning.plan(requests[0])
    command = f"coldstart materialize {model} -- --max-model-len 512"
    assert raised.value.hint == f"{command}; or fetch a bundle: coldstart pull ADDRESS"


def test_serve_builds_the_bundle_when_on_miss_is_materialize(
    model: str, requests: list[ServeRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(materialize, "materialize", _publish)
    api.serve(model, on_miss="materialize")
    found = requests[0].lookup.bundle
    assert found is not None and found.read_json("kv") == {"bytes": 1}
    assert api.find_bundle(model) == found and api.find_bundle(model, ["--dtype", "float32"]) is None


def test_serve_passes_every_option_on(model: str, requests: list[ServeRequest]) -> None:
    scheduler = SchedulerSettings("fcfs", batch=3)
    api.serve(
        model, ["--max-model-len", "512"], host="::1", port=7, api_key="k", mode="snapshot", on_miss="warn",
        ready_timeout_s=9, scheduler=scheduler, weights_from="/w", require_signature=True,
        untrusted=True, offline=True,
    )  # fmt: skip
    (sent,) = requests
    assert sent.listen == ["--host", "::1", "--port", "7", "--api-key", "k"]
    assert (sent.mode, sent.without_bundle, sent.ready_timeout) == ("snapshot", True, 9)
    assert (sent.scheduler, sent.weights_from) == (scheduler, "/w")
    assert sent.require_signature and sent.lookup.accepts is not None and sent.lookup.offline
    assert list(sent.lookup.vllm_args) == ["--max-model-len", "512"]


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"mode": "fast"}, "invalid mode 'fast'", "choose one of: auto, standby"),
        ({"on_miss": "ignore"}, "invalid on_miss 'ignore'", "choose one of: fail, warn, materialize"),
        ({"vllm_args": "--dtype half"}, "expected a sequence", r"vllm_args=\['--dtype', 'half'\]"),
        ({"scheduler": SchedulerSettings("magic")}, "--scheduler must be one of", ""),
    ],
)
def test_serve_refuses_an_invalid_option_before_it_looks_at_the_model(
    options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        api.serve("no-such-model", **options)
    assert re.search(hint, raised.value.hint or "")
