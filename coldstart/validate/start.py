"""Validate a bundle by starting servers: `load` (the server returns a token) and `replay` (its tokens equal plain vLLM's).

`coldstart bench` uses the same launchers, so that it measures the same server that is validated here. Sampling is greedy,
so any different token means that the bundle changes what the model computes.

CUDA graphs are replayed if a server on this machine restored them; concurrent requests replay those of larger batches.
Without a GPU, no graph can be replayed, and a finding reports that, so graphs that were not replayed never count as
valid.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.contract.fallback import Fallback
from coldstart.errors import ColdstartError, CommandFailedError, UsageError
from coldstart.launch.completions import RequestRejectedError
from coldstart.models import inspection
from coldstart.system.devices import nvml
from coldstart.validate import responses
from coldstart.validate.checks import Finding, Level
from coldstart.validate.launch import Launcher, ModeUnavailableError, explain_slow_path
from coldstart.validate.launchers import FRESH, VLLM_COLD, ModelUnderTest, create_launchers
from coldstart.validate.responses import HINT, PromptSettings, ServerResponses, collect_responses

REPLAY_SETTINGS = PromptSettings(concurrency_levels=(8,))
GRAPHS = "graphs"
# Another materialization would omit the section again.
_MISSING_SECTION_HINT = "build the bundle with arguments for which vLLM compiles this model"


def check_start(
    bundle: Bundle, level: Level, subject: ModelUnderTest, settings: PromptSettings = REPLAY_SETTINGS
) -> list[Finding]:
    """Start servers of `subject`, and return the findings of `level`. `settings` are the requests of a replay.

    Raises UsageError if the server rejects a prompt.
    """
    findings = check_graph_tables(bundle, level) if bundle.has_section(GRAPHS) else []
    if any(finding.severity == "error" for finding in findings):
        return findings
    with tempfile.TemporaryDirectory(prefix="coldstart-validate-") as name:
        bundled, plain = create_launchers(subject, (FRESH, VLLM_COLD), Path(name))
        started = _collect_responses(bundled, Path(name) / "bundle", "CS-LOAD", bundle, level, settings)
        if isinstance(started, Finding):
            return [*findings, started]
        findings += [
            _create_fallback_finding(fallback, bundle, level)
            for fallback in explain_slow_path(started.readiness)
        ]
        if level != "replay":
            return findings
        reference = _collect_responses(
            plain, Path(name) / "vllm", "CS-REFERENCE-START", bundle, level, settings
        )
        if isinstance(reference, Finding):
            return [*findings, reference]
        return [
            *findings,
            *responses.compare_responses(
                settings.prompts, started.responses, reference.responses, bundle.name
            ),
        ]


def _collect_responses(
    launcher: Launcher, directory: Path, code: str, bundle: Bundle, level: Level, settings: PromptSettings
) -> ServerResponses | Finding:
    if level != "replay":
        settings = replace(settings, prompts=settings.prompts[:1], max_tokens=1, concurrency_levels=())
    try:
        launcher.prepare()
        return collect_responses(launcher, directory, settings)
    except (CommandFailedError, ModeUnavailableError) as error:
        if isinstance(error.__cause__, RequestRejectedError):
            raise UsageError(
                f"the server rejected a prompt: {error.__cause__}",
                hint="use other prompts (--prompts FILE) or fewer tokens (--max-tokens N)",
            ) from error
        message = error.message if isinstance(error, ColdstartError) else str(error)
        return Finding(code, "error", message, HINT.format(bundle.name), launcher.mode)
    finally:
        launcher.close()


def _create_fallback_finding(fallback: Fallback, bundle: Bundle, level: Level) -> Finding:
    """Return the finding for a fallback during the start. A fallback of the CUDA graphs is an error at level `replay`."""
    hint = HINT.format(bundle.name)
    if fallback.stage == "canary":
        # The weights have been compared before the start.
        message = f"{fallback.reason}, although the weights are those of the bundle"
        return Finding("CS-CANARY", "error", message, hint, "serve")
    message = f"not used: {fallback.stage}: {fallback.reason}"
    if level == "replay" and bundle.has_section(GRAPHS) and fallback.stage == GRAPHS:
        return Finding("CS-GRAPHS-REPLAY", "error", message, hint, GRAPHS)
    missing = inspection.list_missing_sections(bundle).get(fallback.stage, inspection.PROOF_FAILED)
    if not missing.startswith(inspection.PROOF_FAILED):
        hint = _MISSING_SECTION_HINT
    return Finding("CS-FALLBACK", "warning", message, hint, "serve")


def check_graph_tables(bundle: Bundle, level: Level) -> list[Finding]:
    """Check that the CUDA graph tables are intact and their verification record is valid. Warn if no GPU can replay them."""
    from coldstart.graphs.errors import GraphError
    from coldstart.graphs.prove import extract_graphs, read_proof
    from coldstart.graphs.tables import load

    try:
        with extract_graphs(bundle) as directory:
            load(directory)
            read_proof(directory)
    except (GraphError, BundleError) as error:
        message = error.message if isinstance(error, BundleError) else str(error)
        return [Finding(error.code, "error", message, HINT.format(bundle.name), GRAPHS)]
    if level != "replay" or nvml.list_gpus():
        return []
    message = "cannot replay the CUDA graphs: no NVIDIA GPU responds on this machine, so their outputs were not checked"
    hint = f"run on a machine with a GPU: coldstart validate {bundle.name} --level replay"
    return [Finding("CS-GRAPHS-NOT-REPLAYED", "warning", message, hint, GRAPHS)]
