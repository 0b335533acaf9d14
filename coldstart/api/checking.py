"""Check bundles."""

from __future__ import annotations

from collections.abc import Sequence

from coldstart.api.lookups import PathLike, check_arguments, check_choice, open_cache
from coldstart.validate import validation
from coldstart.validate.answers import PromptSettings
from coldstart.validate.checks import LEVELS, Level, ValidationReport
from coldstart.validate.start import REPLAY
from coldstart.validate.subject import Source
from coldstart.validate.validation import ValidationRequest


def validate(
    model_or_reference: str,
    level: Level = "checksum",
    *,
    vllm_args: Sequence[str] = (),
    model: str | None = None,
    against: str | None = None,
    replay: PromptSettings = REPLAY,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: PathLike | None = None,
) -> ValidationReport:
    """Check one bundle. A fault of the bundle is a finding in the report and raises nothing.

    Args:
        model_or_reference: Reference of a bundle, or a model that is looked up with `vllm_args`.
        level: "manifest", "checksum", "load" (a server starts) or "replay" (it answers as vLLM without a bundle does).
        vllm_args: Command-line arguments of vLLM; empty: those of the bundle.
        model: Directory of the model, for a bundle of a model directory at levels "load" and "replay".
        against: "this": the bundle must match the hardware and the versions of this machine.
        replay: Prompts, answer length and numbers of concurrent requests for level "replay".
        revision: Commit, branch or tag of a hub model.
        offline: Download nothing.
        cache_dir: As for `materialize`.

    Raises:
        UsageError: An option is invalid, contradicts the level, or the model does not exist.
        BundleNotFoundError, AmbiguousReferenceError, InvalidReferenceError: A reference does not name one bundle.
        NoBundleError: The model has no bundle with these arguments.
        AuthRequiredError: The hub requires authentication, or `offline` forbids a download.
    """
    check_choice("level", level, LEVELS)
    source = Source(check_arguments(vllm_args), model, revision, offline, open_cache(cache_dir))
    words = [model_or_reference]
    (report,) = validate_all(ValidationRequest(words, level, against, source, replay))
    return report


def validate_all(request: ValidationRequest) -> list[ValidationReport]:
    """Check several bundles, and return one report for each in this order. All are found before the first is checked.

    Raises:
        ColdstartError: The errors of `validate`, raised before any server is started.
    """
    return validation.run(request)
