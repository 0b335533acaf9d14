"""The levels that start a server: `load` (a server returns one token), `replay` (its tokens are those of plain vLLM).

The bench uses the same launchers, so that the validated server is the measured one. Sampling is greedy: a bundle that changes
one token changes what the model computes.

CUDA graphs are replayed if a server on this machine restored them; a crowd of requests uses those of larger batches. Without a
GPU no graph can be replayed, and a finding reports that: a graph that was not replayed is never reported as valid.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.errors import ColdstartError, CommandFailedError, UsageError
from coldstart.launch.completions import RequestRefusedError
from coldstart.models import inspection
from coldstart.system.devices import nvml
from coldstart.validate import answers
from coldstart.validate.answers import PromptSettings, ServerAnswers, collect_answers
from coldstart.validate.checks import Finding, Level
from coldstart.validate.launch import Launcher, ModeUnavailableError, explain_slow_path
from coldstart.validate.launchers import FRESH, VLLM_COLD, ServeLauncher, Subject, VllmLauncher

REPLAY = PromptSettings(crowds=(8,))
GRAPHS = "graphs"
HINT = "coldstart materialize {} --force"
# The materialization has tried, and would come to the same result.
_ABSENT = "build the bundle with arguments with which vLLM compiles this model; with these, the start has no more to restore"


def check_start(
    bundle: Bundle, level: Level, subject: Subject, settings: PromptSettings = REPLAY
) -> list[Finding]:
    """Return the findings of `level`, for which servers of `subject` start; `settings` are the requests of a replay.

    Raises UsageError for prompts that every server rejects.
    """
    findings = check_tables(bundle, level) if bundle.has(GRAPHS) else []
    if any(finding.severity == "error" for finding in findings):
        return findings
    with (
        tempfile.TemporaryDirectory(prefix="coldstart-validate-") as name,
    ):
        bundled, plain = pair_launchers(subject, Path(name))
        started = _start(bundled, Path(name) / "bundle", "CS-LOAD", bundle, level, settings)
        if isinstance(started, Finding):
            return [*findings, started]
        findings += [
            _judge_fallback(reason, bundle, level) for reason in explain_slow_path(started.readiness)
        ]
        if level != "replay":
            return findings
        reference = _start(plain, Path(name) / "vllm", "CS-REFERENCE-START", bundle, level, settings)
        if isinstance(reference, Finding):
            return [*findings, reference]
        return [
            *findings,
            *answers.compare(settings.prompts, started.answers, reference.answers, bundle.name),
        ]


def pair_launchers(subject: Subject, directory: Path) -> tuple[Launcher, Launcher]:
    """Return the launchers of coldstart's fresh start, and of an ordinary start of vLLM with empty caches."""
    plain = VllmLauncher(subject, directory / "vllm" / "caches", VLLM_COLD)
    return ServeLauncher(subject, FRESH, directory / "run"), plain


def _start(
    launcher: Launcher, directory: Path, code: str, bundle: Bundle, level: Level, settings: PromptSettings
) -> ServerAnswers | Finding:
    if level != "replay":
        settings = replace(settings, prompts=settings.prompts[:1], max_tokens=1, crowds=())
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


def _judge_fallback(reason: str, bundle: Bundle, level: Level) -> Finding:
    """Return the finding for a fallback of the bundle's start. One of the graphs is an error of a replay."""
    hint = HINT.format(bundle.name)
    if reason.startswith("canary: "):
        # The weights were compared before.
        message = f"{reason.removeprefix('canary: ')}, though it has the bundle's weights"
        return Finding("CS-CANARY", "error", message, hint, "serve")
    message = f"not used: {reason}"
    if level == "replay" and bundle.has(GRAPHS) and f"{GRAPHS}:" in message:
        return Finding("CS-GRAPHS-REPLAY", "error", message, hint, GRAPHS)
    missing = inspection.list_missing_sections(bundle).items()
    absent = tuple(
        f"{section}: the bundle has none: {why}"
        for section, why in missing
        if not why.startswith(inspection.PROOF_FAILED)
    )
    return Finding("CS-FALLBACK", "warning", message, _ABSENT if reason.startswith(absent) else hint, "serve")


def check_tables(bundle: Bundle, level: Level) -> list[Finding]:
    """Check that the graphs' tables are unchanged since they were sealed, that their proof is readable, and who can replay."""
    from coldstart.graphs.errors import GraphError
    from coldstart.graphs.prove import extract, read_proof
    from coldstart.graphs.tables import load

    try:
        with extract(bundle) as directory:
            load(directory)
            read_proof(directory)
    except (GraphError, BundleError) as error:
        message = error.message if isinstance(error, BundleError) else str(error)
        return [Finding(error.code, "error", message, HINT.format(bundle.name), GRAPHS)]
    if level != "replay" or nvml.query():
        return []
    message = "cannot replay the CUDA graphs: no NVIDIA device responds on this machine; their outputs were not checked"
    hint = f"on a GPU: coldstart validate {bundle.name} --level replay"
    return [Finding("CS-GRAPHS-NOT-REPLAYED", "warning", message, hint, GRAPHS)]
