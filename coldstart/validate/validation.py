"""Run one validation: find the bundles, and check each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.verify import Finding
from coldstart.errors import UsageError
from coldstart.models import resolver
from coldstart.validate import answers, checks, start, subject
from coldstart.validate.answers import PromptSettings
from coldstart.validate.subject import Source

THIS_MACHINE = "this"
MOST = 256


@dataclass(frozen=True)
class ValidationRequest:
    """The references or models to validate.

    `against` is "this", this machine. `source` has the model and the arguments of the servers, `replay`
    their requests.
    """

    words: Sequence[str]
    level: checks.Level = "checksum"
    against: str | None = None
    source: Source = field(default_factory=Source)
    replay: PromptSettings = start.REPLAY


def run(request: ValidationRequest) -> list[checks.ValidationReport]:
    """Return one report per word.

    Raises BundleNotFoundError and NoBundleError for a word that names no bundle, UsageError for options that contradict each
    other or prompts that every server rejects, and the errors of `resolution.resolve`.
    """
    _check_request(request)
    machine = checks.describe_machine() if request.against is not None else None
    found = [(word, subject.find_bundle(word, request.source)) for word in request.words]
    reports = []
    for word, bundle in found:
        report = checks.check_bundle(bundle, request.level, machine)
        if request.level in checks.STARTING and not report.fails("error"):
            report = replace(report, findings=(*report.findings, *_check_start(bundle, word, request)))
        reports.append(report)
    return reports


def _check_start(bundle: Bundle, word: str, request: ValidationRequest) -> list[Finding]:
    lookup = subject.look_up_bundle(bundle, word, request.source)
    if others := subject.explain_not_served(bundle, lookup, word, request.level, request.source):
        return others  # a server would use another bundle
    lookup = subject.ensure_files(lookup)
    if others := subject.explain_other_weights(bundle, lookup):
        return others  # its tokens would say nothing about the bundle
    return start.check_start(bundle, request.level, subject.prepare_subject(lookup), request.replay)


def parse_replay(file: Path | None, concurrency: str, max_tokens: int) -> PromptSettings:
    """Parse the requests of a replay: the prompts of `file` (None: PROMPTS), and the numbers of requests in flight.

    `concurrency` is a list such as "1,8". Raises UsageError.
    """
    try:
        counts = sorted({int(word) for word in concurrency.split(",")})
    except ValueError:
        counts = [0]
    if not 1 <= counts[0] <= counts[-1] <= MOST:
        raise UsageError(
            f"invalid --concurrency {concurrency!r}: expected numbers from 1 to {MOST}",
            hint="--concurrency 1,8",
        )
    asked = answers.read_prompts(file) if file is not None else answers.PROMPTS
    return PromptSettings(asked, max_tokens, crowds=[count for count in counts if count > 1])


def _check_request(request: ValidationRequest) -> None:
    if request.against not in (None, THIS_MACHINE):
        raise UsageError(
            f"invalid machine {request.against!r} to validate against: the only one is {THIS_MACHINE!r}",
            hint="validate on the machine that serves",
        )
    if request.level in checks.STARTING:
        return
    pinned = [word for word in request.words if not resolver.names_model(word)]
    if pinned and request.source.vllm_args:
        raise UsageError(
            f"cannot use arguments after --: level {request.level} starts no server, and {pinned[0]} is not a model",
            hint="--level load",
        )
    if request.source.model is not None:
        raise UsageError(f"cannot use --model: level {request.level} starts no server", hint="--level load")
