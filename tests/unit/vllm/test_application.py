"""vLLM's API application is built while the engine starts, and used only if vLLM requests exactly this application."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import pytest

from coldstart.host.live.access_control import FORWARDED_PATHS, HEALTH, MODELS, OPEN, READ_PATHS
from coldstart.vllm import compat
from coldstart.vllm.engine import server
from coldstart.vllm.engine.application import EarlyApplication

pytestmark = pytest.mark.vllm


def _fork() -> None:
    """Fork a process, as the start of an engine does."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _begun(args: Namespace, config: Any) -> EarlyApplication:
    early = EarlyApplication()
    early.start_building_after_fork(args, config)
    _fork()
    return early


@pytest.fixture
def arguments() -> tuple[Namespace, Any]:
    args, _ = server.parse_args(["--model", "some/model", "--api-key", "k", "--root-path", "/here"])
    return args, Namespace(model_config=Namespace(get_pooling_task=lambda tasks: None))


def _routes(app: Any) -> list[tuple[str, str]]:
    return [(type(route).__name__, route.path) for route in app.routes]


def test_vllm_receives_an_equal_application(arguments: tuple[Namespace, Any]) -> None:
    from vllm.entrypoints.launchers.api_server import entry

    args, config = arguments
    stock = entry.build_app
    early = _begun(args, config)
    with early.provide_to_vllm():
        one = entry.build_app(args, ("generate",), config.model_config)
        assert entry.build_app(args, ("generate",), config.model_config) is one
    assert entry.build_app is stock
    other = stock(args, ("generate",), config.model_config)
    assert one is not other
    assert _routes(one) == _routes(other)
    assert (one.root_path, one.state.args) == ("/here", args)
    assert [one.cls for one in one.user_middleware] == [one.cls for one in other.user_middleware]


def test_gateway_forwards_no_route_of_development_mode(
    arguments: tuple[Namespace, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.entrypoints.launchers.app import build_app

    def paths() -> set[str]:
        app = build_app(args, ("generate",), config.model_config)
        return {path for _, path in _routes(app)}

    args, config = arguments
    closed = paths()
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    opened = paths() - closed
    assert {"/sleep", "/wake_up", "/collective_rpc", "/server_info", "/update_weights"} <= opened
    assert not opened & {*FORWARDED_PATHS, *READ_PATHS, *OPEN, HEALTH, MODELS}


def test_incompatible_vllm_is_not_changed(
    arguments: tuple[Namespace, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.entrypoints.launchers.api_server import entry

    monkeypatch.setattr(compat, "check", lambda feature, load=None: f"no {feature}")
    stock = entry.build_app
    with _begun(*arguments).provide_to_vllm():
        assert entry.build_app is stock
