"""Work on a module when it is imported, and not before: vLLM loads its plug-ins in processes that need no runner."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Work = Callable[[Any], None]


def when_imported(name: str, work: Work) -> None:
    """Call `work(module)` now if the module is there, else right after its import."""
    if name in sys.modules:
        work(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, work))


class _Finder:
    """Finds one module, once, by asking the others."""

    def __init__(self, name: str, work: Work) -> None:
        self._name, self._work = name, work

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders give, with the work behind its execution."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then(module: ModuleType) -> None:
                execute(module)
                self._work(module)

            spec.loader.exec_module = then  # type: ignore[method-assign]
        return spec
