"""Change other packages' modules, for a while or right after their import.

vLLM loads plug-ins in processes that never import most modules, so a plug-in changes a module when it is imported. If a name is
not found in the module, the failure is reported, and the import still succeeds.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Work = Callable[[Any], None]
log = logging.getLogger("vllm.coldstart")


def run_when_imported(name: str, work: Work, on_failure: Callable[[str], object] = log.warning) -> None:
    """Call `work(module)` now if the module is already imported, or else right after its import.

    `on_failure` receives the reason if `work` raises ImportError or AttributeError.
    """

    def guarded(module: Any) -> None:
        try:
            work(module)
        except (ImportError, AttributeError) as error:
            on_failure(f"{name} lacks what coldstart needs: {error}")

    if name in sys.modules:
        guarded(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, guarded))


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of a module, class or object this value while this block runs."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Finder:
    """Import finder that is used once, for one module, and that delegates to the other finders."""

    def __init__(self, name: str, work: Work) -> None:
        self._name, self._work = name, work

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec from the other finders, changed so that `work` runs after the import."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_work(module: ModuleType) -> None:
                execute(module)
                self._work(module)

            spec.loader.exec_module = execute_and_work  # type: ignore[method-assign]
        return spec
