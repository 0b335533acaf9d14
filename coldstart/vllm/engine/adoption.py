"""Decide whether what was built before a start fits it, by comparing vLLM's engine arguments.

vLLM builds an engine from these arguments, the environment and the model. Environment and code are compared before
(`launch/template_environment.py`, `system/fingerprint.py`), and the bundle's key and the weights' digest cover the model. An
argument that differs prevents the use of a built worker unless APART has a reason why a worker cannot have read it. An
argument of a newer vLLM is therefore compared at once.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields

from coldstart.contract.plan import LaunchPlan
from coldstart.scheduling.settings import KEY
from coldstart.system import secrets

_ENGINE = "used by the engine only, which every server builds"
_LOGS = "affects logs only"
APART: Mapping[str, str] = {
    "served_model_name": "a name of the server",
    "hf_token": "a credential",
    "scheduler_cls": _ENGINE,
    "scheduling_policy": _ENGINE,
    "max_num_queued_reqs": _ENGINE,
    "max_num_queued_tokens": _ENGINE,
    "max_num_active_seqs": _ENGINE,
    "long_prefill_token_threshold": _ENGINE,
    "long_prefill_token_threshold_adaptive": _ENGINE,
    "prefill_schedule_interval": _ENGINE,
    "stream_interval": _ENGINE,
    "shutdown_timeout": _ENGINE,
    "structured_outputs_config": _ENGINE,
    "kv_transfer_config": "passed to the worker when it is adopted",
    "logging_config": _LOGS,
    "log_level": _LOGS,
    "log_config_file": _LOGS,
    "disable_log_stats": _LOGS,
    "enable_log_requests": _LOGS,
    "aggregate_engine_logging": _LOGS,
}
# A worker with larger buffers than this start needs can serve it, because the scheduler enforces the limit.
ROOMY = frozenset({"max_num_seqs"})
MODEL = "the model's directory"


def describe(args: Namespace) -> dict[str, str]:
    """Return the parsed engine arguments by name. Call this before a configuration is created, which changes some."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = AsyncEngineArgs.from_cli_args(args)
    return {field.name: repr(getattr(given, field.name)) for field in fields(given)}


def describe_worker(args: Namespace, plan: LaunchPlan) -> dict[str, str]:
    """Return what a worker for `args` depends on: the arguments but APART, and the model's content, not its directory."""
    found = describe(args)
    # The settings of our scheduler, which the engine builds, are among the additional ones.
    found["additional_config"] = repr({k: v for k, v in (args.additional_config or {}).items() if k != KEY})
    found = {name: MODEL if value == found["model"] else value for name, value in found.items()}
    content = {"the bundle's key": str(plan.key), "the weights": str(plan.weights)}
    return {name: value for name, value in found.items() if name not in APART} | content


def difference(built: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return the first argument that differs, with both values; None if the worker can be adopted."""
    for name in sorted({*built, *wanted}):
        had, requested = built.get(name, "none"), wanted.get(name, "none")
        if had != requested and not (name in ROOMY and _is_roomier(had, requested)):
            return f"{name}: the built worker has {_shown(name, had)}, this start needs {_shown(name, requested)}"
    return None


def _is_roomier(had: str, requested: str) -> bool:
    return had.isdecimal() and requested.isdecimal() and int(had) >= int(requested)


def _shown(name: str, value: str) -> str:
    return secrets.HIDDEN if secrets.is_secret_name(name) else secrets.redact_text(value)[:200]
