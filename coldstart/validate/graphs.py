"""The check of a bundle's CUDA graphs at the levels `load` and `replay`.

A graph is replayed if a server on this machine restored it and its outputs have the hashes of the proof. Without a GPU no
graph can be replayed, and a finding reports that: a graph that was not replayed is never reported as valid.
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
from coldstart.system.devices import nvml
from coldstart.validate.checks import Level, StartCheck

SUBJECT = "graphs"
HINT = "coldstart materialize {} --force"


def check_graphs(start: StartCheck) -> StartCheck:
    """Return a check that runs `start` and checks the CUDA graphs of the bundle as well."""

    def check(bundle: Bundle, level: Level) -> list[Finding]:
        if not bundle.has(SUBJECT):
            return start(bundle, level)
        findings = check_tables(bundle)
        replayable = bool(nvml.query())
        if level == "replay" and not replayable:
            findings.append(_not_replayed(bundle))
        if any(finding.severity == "error" for finding in findings):
            return findings
        with _every_graph(level):
            return [*findings, *_judged(start(bundle, level), level)]

    return check


def check_tables(bundle: Bundle) -> list[Finding]:
    """Check that the tables are unchanged since they were sealed, and that their proof is readable."""
    from coldstart.graphs.errors import GraphError
    from coldstart.graphs.overview import extract
    from coldstart.graphs.prove import read_proof
    from coldstart.graphs.tables import load

    try:
        with extract(bundle) as directory:
            load(directory)
            read_proof(directory)
    except GraphError as error:
        return [Finding(error.code, "error", str(error), HINT.format(bundle.name), SUBJECT)]
    except BundleError as error:
        return [Finding(error.code, "error", error.message, HINT.format(bundle.name), SUBJECT)]
    return []


def _not_replayed(bundle: Bundle) -> Finding:
    message = "cannot replay the CUDA graphs: no NVIDIA device responds on this machine; their outputs were not checked"
    return Finding(
        "CS-GRAPHS-NOT-REPLAYED", "warning", message, f"on a GPU: coldstart validate {bundle.name} --level replay", SUBJECT
    )  # fmt: skip


@contextmanager
def _every_graph(level: Level) -> Iterator[None]:
    """Make servers that start in the block replay every graph before they are ready."""
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
    """Turn a fallback of the graphs into an error at the level `replay`."""
    return [
        replace(finding, code="CS-GRAPHS-REPLAY", severity="error", subject=SUBJECT)
        if level == "replay" and finding.code == "CS-FALLBACK" and f"{SUBJECT}:" in finding.message
        else finding
        for finding in findings
    ]
