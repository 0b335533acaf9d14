"""What `load` and `replay` say of a bundle's CUDA graphs.

Replayed means: every graph, restored in a server that starts here, gave the outputs whose hashes the proof holds.
Where no GPU answers that cannot be done, and is said: a graph that was not replayed is never reported as good.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.verify import Finding
from coldstart.contract.graphs import CANARY
from coldstart.machine import nvml
from coldstart.validate.checks import Level, StartCheck

SUBJECT = "graphs"
MEND = "coldstart materialize {} --force"


def with_graphs(start: StartCheck) -> StartCheck:
    """`start`, and beside it what is to be said of the bundle's graphs."""

    def check(bundle: Bundle, level: Level) -> list[Finding]:
        if not bundle.has(SUBJECT):
            return start(bundle, level)
        findings = sealed(bundle)
        replayable = bool(nvml.query())
        if level == "replay" and not replayable:
            findings.append(_not_replayed(bundle))
        if any(finding.severity == "error" for finding in findings):
            return findings
        with _every_graph(level):
            return [*findings, *_judged(start(bundle, level), level)]

    return check


def sealed(bundle: Bundle) -> list[Finding]:
    """Whether the tables are those that were sealed, and were proven."""
    from coldstart.graphs import bundles, gate, table_files
    from coldstart.graphs.errors import GraphError

    try:
        with bundles.unpacked(bundle) as directory:
            table_files.load(directory)
            gate.read_proof(directory)
    except GraphError as error:
        return [Finding(error.code, "error", str(error), MEND.format(bundle.name), SUBJECT)]
    except BundleError as error:
        return [Finding(error.code, "error", error.message, MEND.format(bundle.name), SUBJECT)]
    return []


def _not_replayed(bundle: Bundle) -> Finding:
    message = (
        "the CUDA graphs cannot be replayed here: no NVIDIA device answers; nothing is said of their outputs"
    )
    return Finding(
        "CS-GRAPHS-NOT-REPLAYED", "warning", message, f"on a GPU: coldstart validate {bundle.name} --level replay", SUBJECT
    )  # fmt: skip


@contextmanager
def _every_graph(level: Level) -> Iterator[None]:
    """Servers that are started in the block replay every graph before they are ready."""
    before = os.environ.get(CANARY)
    if level == "replay":
        os.environ[CANARY] = "all"
    try:
        yield
    finally:
        os.environ.pop(CANARY, None)
        if before is not None:
            os.environ[CANARY] = before


def _judged(findings: Sequence[Finding], level: Level) -> list[Finding]:
    """At `replay` a graph that was not restored is wrong, not slow."""
    return [
        replace(finding, code="CS-GRAPHS-REPLAY", severity="error", subject=SUBJECT)
        if level == "replay" and finding.code == "CS-FALLBACK" and f"{SUBJECT}:" in finding.message
        else finding
        for finding in findings
    ]
