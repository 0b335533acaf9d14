"""Build vLLM's API application in a thread while the engine starts.

vLLM builds the application only after the engine has started. This module makes the same call earlier, with the same
arguments. vLLM receives the result if it requests the same application; otherwise, it builds a new one.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import Thread
from typing import Any

from coldstart.system import timeline
from coldstart.vllm import compat, late

_ENTRY = "vllm.entrypoints.launchers.api_server.entry"
# Supported tasks of most generative models. For other tasks, vLLM builds the application itself.
_TASKS = ("generate",)


def warm_up(args: Namespace, config: Any) -> None:
    """Build an application and discard it, in order to import its modules and cache its route schemas."""
    with timeline.measure("import app", track="server"):
        _build_application(args, config)


def _build_application(args: Namespace, config: Any) -> Any:
    import uvicorn
    from vllm.entrypoints.launchers.app import build_app

    app = build_app(args, _TASKS, config.model_config)
    uvicorn.Config(app).load()
    return app


class EarlyApplication:
    """API application that a thread builds before vLLM requests it."""

    def __init__(self) -> None:
        self._arguments: tuple[Namespace, Any] | None = None
        self._thread: Thread | None = None
        self._application: Any = None

    def start_building_after_fork(self, args: Namespace, config: Any) -> None:
        """Start building after this process has forked its engine, because forking a multithreaded process is unsafe."""
        self._arguments, server = (args, config), os.getpid()
        # An engine that forks its ranks has inherited this function.
        os.register_at_fork(after_in_parent=lambda: self._begin() if os.getpid() == server else None)

    def start_building(self, args: Namespace, config: Any) -> None:
        """Start building the application now, before vLLM requests it."""
        self._arguments = args, config
        self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._build, name="build app", daemon=True)
            self._thread.start()

    def _build(self) -> None:
        # vLLM makes the same call and reports its error.
        with suppress(Exception):
            self._application = _build_application(*self._arguments)  # type: ignore[misc]

    def _fits(self, args: Namespace, tasks: Any, model_config: Any) -> bool:
        if self._thread is None or self._arguments is None:
            return False
        given, config = self._arguments
        return args is given and tuple(tasks or ()) == _TASKS and model_config is config.model_config

    @contextmanager
    def provide_to_vllm(self) -> Iterator[None]:
        """In this block, make vLLM use the prebuilt application if it requests the same one. vLLM waits until it is built."""
        if compat.find_unsupported_reason("application", lambda: import_module(_ENTRY).build_app):
            yield
            return
        entry: Any = import_module(_ENTRY)
        build = entry.build_app

        def build_app(args: Namespace, supported_tasks: Any = None, model_config: Any = None) -> Any:
            if self._fits(args, supported_tasks, model_config):
                assert self._thread is not None
                self._thread.join()
                if self._application is not None:
                    return self._application
            return build(args, supported_tasks, model_config)

        with late.replace_attribute(entry, "build_app", build_app):
            yield
