"""One validation from request to reports: find the bundles, mend what is to be mended, check each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from coldstart.artifacts import remote
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from coldstart.artifacts.verify import Finding
from coldstart.errors import Usage
from coldstart.validate import against, checks, prompts, subject
from coldstart.validate.answers import PromptSettings
from coldstart.validate.start import REPLAY, Starts, real_pair
from coldstart.validate.subject import Source

HOST = "host"
STARTING = ("load", "replay")
MOST = 256


@dataclass(frozen=True)
class ValidationRequest:
    """What to validate: references or models. `against` is "host" or the name of a fingerprint file; `source` is of what
    servers are started, `replay` what they are asked.
    """

    words: Sequence[str]
    level: checks.Level = "checksum"
    against: str | None = None
    repair: bool = False
    repair_from: Sequence[str] = ()
    source: Source = field(default_factory=Source)
    replay: PromptSettings = REPLAY


def run(store: Store, request: ValidationRequest) -> list[checks.ValidationReport]:
    """One report per word.

    Raises NotFound and NoBundle for a word that names no bundle, Usage for an unreadable fingerprint or prompts that no server
    takes, and what models.resolve raises.
    """
    fingerprint = _fingerprint(request.against)
    found = [(word, subject.find(store, word, request.source)) for word in request.words]
    return [_one(store, word, bundle, fingerprint, request) for word, bundle in found]


def _one(
    store: Store,
    word: str,
    bundle: Bundle,
    fingerprint: dict[str, checks.Scalar] | None,
    request: ValidationRequest,
) -> checks.ValidationReport:
    validation = checks.Validation(request.level, fingerprint, _starter(word, request))
    if not request.repair and not request.repair_from:
        return validation.run(bundle)
    sources = [remote.source(address) for address in request.repair_from]
    notes = checks.repair(store, bundle, sources)
    # What was read before the repair may be the damaged bytes: open it anew.
    fresh = Bundle(store, bundle.descriptor, bundle.version)
    return checks.with_notes(validation.run(fresh), notes)


def _fingerprint(wanted: str | None) -> dict[str, checks.Scalar] | None:
    if wanted is None:
        return None
    return against.host() if wanted == HOST else against.load(Path(wanted))


def _starter(word: str, request: ValidationRequest) -> checks.StartCheck | None:
    if request.level not in STARTING:
        return None
    from coldstart.validate.graphs import with_graphs

    def check(bundle: Bundle, level: checks.Level) -> list[Finding]:
        lookup = subject.of_bundle(bundle, word, request.source)
        if others := subject.not_served(bundle, lookup):
            return others  # what would be started is not what is checked
        return with_graphs(Starts(real_pair(subject.subject(lookup)), request.replay))(bundle, level)

    return check


def replay_settings(file: Path | None, concurrency: str, max_tokens: int) -> PromptSettings:
    """What a replay asks: the prompts of `file` (None: our own), again with each number of requests of `concurrency`, such as
    "1,8", in flight. Raises Usage.
    """
    try:
        counts = sorted({int(word) for word in concurrency.split(",")})
    except ValueError:
        counts = [0]
    if not 1 <= counts[0] <= counts[-1] <= MOST:
        raise Usage(
            f"--concurrency takes numbers from 1 to {MOST}, found {concurrency!r}.", mend="--concurrency 1,8"
        )
    asked = prompts.read(file) if file is not None else prompts.PROMPTS
    return PromptSettings(asked, max_tokens, crowds=[count for count in counts if count > 1])


def check_request(request: ValidationRequest) -> None:
    """Raises Usage for options that mean nothing together."""
    if request.level in STARTING:
        return
    pinned = [word for word in request.words if not subject.names_model(word)]
    if pinned and request.source.vllm_args:
        raise Usage(
            f"level {request.level} starts no server, and {pinned[0]} is no model to be looked up, so nothing may follow --.",
            mend="--level load",
        )
    if request.source.model is not None:
        raise Usage(f"level {request.level} starts no server, so --model means nothing.", mend="--level load")
