"""Arguments that every function of the API takes: the model, vLLM's arguments, and the cache directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from coldstart.artifacts.bundle import anyone
from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.models import resolver
from coldstart.models.inspection import Lookup
from coldstart.system.paths import Cache

PathLike = str | Path


def look_up(
    model: str,
    vllm_args: Sequence[str],
    *,
    revision: str | None,
    offline: bool,
    cache_dir: PathLike | None,
    untrusted: bool = False,
) -> Lookup:
    """Resolve the model and look up its bundle. Raises the errors of `resolver.resolve` and `check_arguments`."""
    accepts = anyone if untrusted else None
    return resolver.resolve(
        model,
        check_arguments(vllm_args),
        cache=open_cache(cache_dir),
        offline=offline,
        revision=revision,
        accepts=accepts,
    )


def check_arguments(vllm_args: Sequence[str]) -> Arguments:
    """Return the arguments. Raises UsageError for one string, which is a sequence of characters."""
    if isinstance(vllm_args, str):
        raise UsageError(
            f"invalid vllm_args {vllm_args!r}: expected a sequence of strings",
            hint=f"vllm_args={vllm_args.split()}",
        )
    return Arguments(vllm_args)


def open_cache(cache_dir: PathLike | None) -> Cache:
    """Return the cache at `cache_dir`, or the default one."""
    return Cache.at(None if cache_dir is None else Path(cache_dir))


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Raise UsageError where `value` is not one of `choices`."""
    if value not in choices:
        raise UsageError(f"invalid {name} {value!r}", hint=f"choose one of: {', '.join(choices)}")
