"""Python API: build, find, serve and check bundles from a program.

Each function resolves its model once and raises subclasses of `ColdstartError`. No function prints or exits. Importing
this package imports neither torch nor vLLM. `docs/reference/python-api.md` is its reference.
"""

from coldstart.api.bundles import (
    Store,
    find_bundle,
    materialize,
    plan_materialization,
    validate,
)
from coldstart.api.serving import OnMiss, serve
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.prune import PruneReport
from coldstart.contract.fallback import Fallback
from coldstart.errors import (
    AuthRequiredError,
    ColdstartError,
    CommandFailedError,
    NoBundleError,
    UsageError,
)
from coldstart.launch.server import Server
from coldstart.materialize.materialize import MaterializationPlan
from coldstart.materialize.options import Options, Phase
from coldstart.scheduling.settings import SchedulerSettings
from coldstart.validate.checks import ValidationReport
from coldstart.validate.responses import PromptSettings
from coldstart.validate.validation import Source, ValidationRequest, validate_all

__all__ = [
    "AuthRequiredError",
    "Bundle",
    "ColdstartError",
    "CommandFailedError",
    "Fallback",
    "MaterializationPlan",
    "NoBundleError",
    "OnMiss",
    "Options",
    "Phase",
    "PromptSettings",
    "PruneReport",
    "SchedulerSettings",
    "Server",
    "Source",
    "Store",
    "UsageError",
    "ValidationReport",
    "ValidationRequest",
    "find_bundle",
    "materialize",
    "plan_materialization",
    "serve",
    "validate",
    "validate_all",
]
