"""What vLLM loads in each of its processes (`vllm.general_plugins`): the load format, registered where loaders are looked up.

vLLM's table of loaders is part of a package that its API server never imports, so importing it here would cost every start.
The import system is asked instead to register the format right after whoever needs that package has imported it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

LOAD_FORMAT = "coldstart"
_TABLE = "vllm.model_executor.model_loader"


def register() -> None:
    """Register the load format: now where vLLM's table of loaders is imported, else as soon as it is."""
    if _TABLE in sys.modules:
        _add()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Finds nothing itself; lets the table's own loader run, then adds the format, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _add()

            setattr(spec.loader, "exec_module", executed)  # noqa: B010 - a method, as far as mypy knows
        return spec


@functools.cache
def _add() -> None:
    from coldstart.vllm.weights.loader import register_loader

    # vLLM would say so in the log of every start, also of those that never use it.
    logger = logging.getLogger(_TABLE)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        register_loader(LOAD_FORMAT)
    finally:
        logger.setLevel(level)
