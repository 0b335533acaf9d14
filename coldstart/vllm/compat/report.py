"""Compare every vLLM integration point of the tables with the installed vLLM.

This imports vLLM, the workers included, so no start runs it: `materialize` does after its engine has run, and the tests do.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import suppress
from typing import get_args

from coldstart import vllm
from coldstart.system import runtime
from coldstart.vllm.compat import Feature, check, engine, graphs, scheduling
from coldstart.vllm.compat.inspection import problems
from coldstart.vllm.compat.points import Point

TABLE: tuple[Point, ...] = (*engine.POINTS, *scheduling.POINTS, *graphs.POINTS)
_CPU_ONLY = ("vllm.v1.worker.cpu_", "vllm.utils.ompmultiprocessing", "coldstart.vllm.engine.worker")


def check_compatibility() -> dict[Feature, str]:
    """Return what does not fit, by feature, as a sentence each; an empty dictionary if everything fits."""
    _import_subclasses()
    reasons = {feature: check(feature) or _misfit(feature) for feature in get_args(Feature)}
    return {feature: reason for feature, reason in reasons.items() if reason}


def _misfit(feature: Feature) -> str | None:
    points = [one for one in TABLE if feature in one.features and _is_for_this_device(one.module)]
    found = dict.fromkeys(problem for one in points for problem in problems(one))
    return f"The installed vLLM differs from what {feature!r} needs: {'; '.join(found)}." if found else None


def _is_for_this_device(module: str) -> bool:
    # Importing vLLM's CPU worker replaces parts of torch.cuda.
    return not module.startswith(_CPU_ONLY) or runtime.targets_cpu()


def _import_subclasses() -> None:
    """Import our modules: a module that fails names vLLM's missing part, which has a row of its own."""
    for name in filter(_is_for_this_device, _our_modules()):
        with suppress(Exception):
            importlib.import_module(name)


def _our_modules() -> Iterator[str]:
    for found in pkgutil.walk_packages(vllm.__path__, f"{vllm.__name__}."):
        yield found.name
