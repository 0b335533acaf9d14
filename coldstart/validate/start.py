"""The levels that start a server: `load` (a server returns one token), `replay` (its tokens are those of plain vLLM).

The bench uses the same launchers, so that the validated server is the measured one. Sampling is greedy: a bundle that changes
one token changes what the model computes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.verify import Finding
from coldstart.errors import ColdstartError, CommandFailedError, UsageError
from coldstart.models import inspection
from coldstart.validate import process_tree, tokens
from coldstart.validate.answers import PromptSettings, ServerAnswers, collect_answers
from coldstart.validate.checks import Level
from coldstart.validate.completions import RequestRefusedError
from coldstart.validate.launch import Launcher, ModeUnavailableError, explain_slow_path
from coldstart.validate.launchers import FRESH, ServeLauncher, Subject, VllmLauncher

REPLAY = PromptSettings(crowds=(8,))
Pair = tuple[Launcher, Launcher]
HINT = "coldstart materialize {} --force"
# The materialization has tried, and would come to the same result.
_ABSENT = "build the bundle with arguments with which vLLM compiles this model; with these, the start has no more to restore"


@dataclass(frozen=True)
class Starts:
    """A check that starts servers.

    `pair` returns the launchers of coldstart and of vLLM for a bundle and an empty directory. `settings` are the requests of
    a replay to both.
    """

    pair: Callable[[Bundle, Path], Pair]
    settings: PromptSettings = REPLAY

    def __call__(self, bundle: Bundle, level: Level) -> list[Finding]:
        """Return the findings of `level`. Raises UsageError for prompts that every server rejects."""
        with (
            process_tree.adopting_orphans(),
            tempfile.TemporaryDirectory(prefix="coldstart-validate-") as name,
        ):
            bundled, plain = self.pair(bundle, Path(name))
            started = self._start(bundled, Path(name) / "bundle", "CS-LOAD", bundle, level)
            if isinstance(started, Finding):
                return [started]
            findings = _fallbacks(started, bundle)
            return (
                [*findings, *self._replay(started, plain, Path(name), bundle)]
                if level == "replay"
                else findings
            )

    def _replay(
        self, bundled: ServerAnswers, plain: Launcher, directory: Path, bundle: Bundle
    ) -> list[Finding]:
        reference = self._start(plain, directory / "vllm", "CS-REFERENCE-START", bundle, "replay")
        if isinstance(reference, Finding):
            return [reference]
        return tokens.compare(self.settings.prompts, bundled.answers, reference.answers, bundle.name)

    def _start(
        self, launcher: Launcher, directory: Path, code: str, bundle: Bundle, level: Level
    ) -> ServerAnswers | Finding:
        one_token = replace(self.settings, prompts=self.settings.prompts[:1], max_tokens=1, crowds=())
        settings = self.settings if level == "replay" else one_token
        try:
            launcher.prepare()
            return collect_answers(launcher, directory, settings)
        except (CommandFailedError, ModeUnavailableError) as error:
            if isinstance(error.__cause__, RequestRefusedError):
                raise UsageError(
                    f"the server rejected a prompt: {error.__cause__}",
                    hint="other prompts (--prompts FILE), fewer tokens (--max-tokens N)",
                ) from error
            message = error.message if isinstance(error, ColdstartError) else str(error)
            return Finding(code, "error", message, HINT.format(bundle.name), launcher.mode)
        finally:
            launcher.close()


def pair_launchers(subject: Subject) -> Callable[[Bundle, Path], Pair]:
    """Pair coldstart's fresh start with an ordinary start of vLLM with empty caches."""

    def pair(bundle: Bundle, directory: Path) -> Pair:
        plain = VllmLauncher(subject, directory / "vllm" / "caches", warm=False)
        return ServeLauncher(subject, FRESH, directory / "run"), plain

    return pair


def _fallbacks(started: ServerAnswers, bundle: Bundle) -> list[Finding]:
    absent = tuple(
        f"{section}: the bundle has none: {why}"
        for section, why in inspection.list_missing_sections(bundle).items()
        if not why.startswith(inspection.PROOF_FAILED)
    )
    return [_name_fallback(reason, absent, bundle) for reason in explain_slow_path(started.readiness)]


def _name_fallback(reason: str, absent: tuple[str, ...], bundle: Bundle) -> Finding:
    if reason.startswith("canary: "):
        # The weights were compared before.
        message = f"{reason.removeprefix('canary: ')}, though it has the bundle's weights"
        return Finding("CS-CANARY", "error", message, HINT.format(bundle.name), "serve")
    hint = _ABSENT if reason.startswith(absent) else HINT.format(bundle.name)
    return Finding("CS-FALLBACK", "warning", f"not used: {reason}", hint, "serve")
