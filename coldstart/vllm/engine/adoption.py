"""Decide whether a server can adopt a prebuilt worker, by comparing vLLM's engine arguments.

An engine depends on its arguments, the environment, the code and the model. The environment and the code are compared
earlier (`launch/template_environment.py`, `system/fingerprint.py`). The bundle's key and the digest of the weights
identify the model. Any argument that differs prevents adoption, unless IGNORED_ARGUMENTS gives a reason why it does not
affect a worker. So arguments that a newer vLLM adds are compared automatically.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import fields

from coldstart.contract.plan import LaunchPlan
from coldstart.scheduling.settings import KEY
from coldstart.system import secrets

_ENGINE = "used only by the engine core, which every server builds"
_LOGS = "affects logs only"
IGNORED_ARGUMENTS: Mapping[str, str] = {
    "served_model_name": "only names the model in the API",
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
# A worker built for a larger value can serve a smaller one, because the scheduler enforces the limit.
MAXIMUM_ARGUMENTS = frozenset({"max_num_seqs"})
MODEL = "the model's directory"


def describe_engine(args: Namespace) -> dict[str, str]:
    """Return the repr of each engine argument by name.

    Call this before creating a configuration from `args`, because creating it changes some of the arguments.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    given = AsyncEngineArgs.from_cli_args(args)
    return {field.name: repr(getattr(given, field.name)) for field in fields(given)}


def describe_worker(args: Namespace, plan: LaunchPlan) -> dict[str, str]:
    """Return the engine arguments that affect a worker, with the model's identity instead of its directory."""
    found = describe_engine(args)
    # additional_config also contains the settings of our scheduler, which does not affect the worker.
    found["additional_config"] = repr({k: v for k, v in (args.additional_config or {}).items() if k != KEY})
    found = {name: MODEL if value == found["model"] else value for name, value in found.items()}
    content = {"the bundle's key": str(plan.key), "the weights": str(plan.weights)}
    return {name: value for name, value in found.items() if name not in IGNORED_ARGUMENTS} | content


def find_difference(built: Mapping[str, str], required: Mapping[str, str]) -> str | None:
    """Return a message with the first engine argument that differs and both values, or None if there is no difference."""
    for name in sorted({*built, *required}):
        had, requested = built.get(name, "none"), required.get(name, "none")
        is_limit = name in MAXIMUM_ARGUMENTS and had.isdecimal() and requested.isdecimal()
        if had != requested and not (is_limit and int(had) >= int(requested)):
            return f"{name}: the prebuilt worker has {_shown(name, had)}, but this start needs {_shown(name, requested)}"
    return None


def _shown(name: str, value: str) -> str:
    return secrets.HIDDEN if secrets.is_secret_name(name) else secrets.redact_text(value)[:200]
