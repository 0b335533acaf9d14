"""Build vLLM's API application while the engine starts.

vLLM builds it from the parsed arguments after the engine has started, while the engine waits. A thread makes the same call with
the same arguments during the engine's start. vLLM receives the result if it requests the same application, and builds
its own otherwise.
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
from coldstart.vllm import compat

_ENTRY = "vllm.entrypoints.launchers.api_server.entry"
# The tasks of nearly every model that generates. vLLM builds the application itself for a model with other tasks.
_TASKS = ("generate",)


def warm(args: Namespace, config: Any) -> None:
    """Build and discard an application, so that its modules are imported and its route schemas cached."""
    with timeline.measure("import app", track="server"):
        _built(args, config)


def _built(args: Namespace, config: Any) -> Any:
    import uvicorn
    from vllm.entrypoints.launchers.app import build_app

    app = build_app(args, _TASKS, config.model_config)
    uvicorn.Config(app).load()
    return app


class EarlyApplication:
    """The API application for given arguments, built by a thread of this process."""

    def __init__(self) -> None:
        self._asked: tuple[Namespace, Any] | None = None
        self._thread: Thread | None = None
        self._made: Any = None

    def begin_after_fork(self, args: Namespace, config: Any) -> None:
        """Build the application after this process has forked its engine: a fork of several threads would be incomplete."""
        self._asked = args, config
        os.register_at_fork(after_in_parent=self._begin)

    def begin(self, args: Namespace, config: Any) -> None:
        """Start building the application now instead of when vLLM asks for it."""
        self._asked = args, config
        self._begin()

    def _begin(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._build, name="build app", daemon=True)
            self._thread.start()

    def _build(self) -> None:
        # vLLM makes the same call and reports its error.
        with suppress(Exception):
            self._made = _built(*self._asked)  # type: ignore[misc]

    def _fits(self, args: Namespace, tasks: Any, model_config: Any) -> bool:
        if self._thread is None or self._asked is None:
            return False
        given, config = self._asked
        return args is given and tuple(tasks or ()) == _TASKS and model_config is config.model_config

    @contextmanager
    def provide(self) -> Iterator[None]:
        """Within this block, hand vLLM the prebuilt application if it is about to build the same one.

        Waits until it is built.
        """
        if compat.check("application", lambda: import_module(_ENTRY).build_app):
            yield
            return
        entry: Any = import_module(_ENTRY)
        build = entry.build_app

        def build_app(args: Namespace, supported_tasks: Any = None, model_config: Any = None) -> Any:
            if self._fits(args, supported_tasks, model_config):
                assert self._thread is not None
                self._thread.join()
                if self._made is not None:
                    return self._made
            return build(args, supported_tasks, model_config)

        entry.build_app = build_app
        try:
            yield
        finally:
            entry.build_app = build
