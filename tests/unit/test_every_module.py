"""Every module has a test that names it, or here the suite through which it runs.

A module counts as named where a test imports it, patches something of it, or has its name in the file's. The others are parts
of one thing that is tested as a whole: private helpers of a command, states of one machine, what only a child process runs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "coldstart": ROOT / "coldstart",
    "coldstart.artifacts": ROOT / "artifacts",
    "coldstart.commands": ROOT / "commands",
}
STORE = "unit/artifacts/test_artifacts_store.py"
MOVING = "unit/artifacts/test_artifacts_moving.py"
REGISTRY = "unit/artifacts/test_artifacts_oci_registry.py"
FLEET, HOST = "unit/fleet/test_fleet_core.py", "unit/host/test_core.py"
FLEET_ON_RAY = "e2e/test_e2e_fleet.py"
CUDA = "unit/graphs/test_graphs_cuda.py"
RULES, TWIN = "property/test_scheduler_rules.py", "property/test_twin.py"
SCHEDULER = "property/test_scheduler.py"
GPU = "../benchmarks/gpu/verify.py"  # where there is none, nothing has ever run it
FETCHING = "unit/weights/prefetch/test_prefetch_fetching.py"
THROUGH = {
    "coldstart.artifacts": {
        "fields": "unit/artifacts/test_artifacts_documents.py",
        "net.origin": REGISTRY, "oci_layout": MOVING, "receive": MOVING, "selection": STORE,
        "staging": STORE,
    },
    "coldstart.fleet.live": {
        **dict.fromkeys(("actors", "local_state"), FLEET_ON_RAY),
        **dict.fromkeys(("replicas", "workers"), "unit/fleet/live/test_moves.py"),
    },
    "coldstart.commands": {
        **dict.fromkeys(("_bindings", "_declared"), "cli/test_command_options.py"),
        "_fleet_live": "cli/test_fleet_command.py",
        "_host_live": "unit/host/live/test_host_control.py",
        "_received": "cli/test_cli_store.py",
        "inspect": "cli/test_cli_store.py",
        "pull": REGISTRY, "push": REGISTRY,
    },
    "coldstart.fleet": dict.fromkeys(
        ("cluster", "consolidation", "deployments", "growth", "lives", "placement", "recheck", "requests", "roster",
         "timers"), FLEET
    ),
    "coldstart.host.live": {
        **dict.fromkeys(("loading", "log_stream"), "unit/host/live/test_host_control.py"),
        "access_control": "attacks/test_client_key_rights.py",
        "site_policy": "attacks/test_foreign_pages.py",
        **dict.fromkeys(("lifecycle", "record", "server_observer"), "unit/host/live/test_driver.py"),
    },
    "coldstart.graphs": {
        **dict.fromkeys(("classify", "sides"), "unit/graphs/test_graphs_offline.py"),
        "cuda.cupti": CUDA, "cuda.reader": CUDA, "cuda.symbols": CUDA, "intervals": "unit/graphs/test_graphs_tables.py",
        "rebuild": "unit/graphs/test_graphs_restore.py",
    },
    "coldstart.host": {
        "eviction": HOST, "pending": HOST, "residents": HOST, "policies.protocol": "unit/host/test_policies.py",
    },
    "coldstart.system": {
        "proc.locked_directory": "unit/system/test_scratch.py", "trust.trust_cache": "attacks/test_untrusted_code.py",
    },
    "coldstart.scheduling": {
        "baselines": "unit/scheduling/test_mlfq.py", "queues": "unit/scheduling/test_mlfq.py",
        "placement.room": RULES, "placement.loads": RULES,
        "placement.view": RULES,
    },
    "coldstart.launch": dict.fromkeys(
        ("modes.from_template", "modes.template_engine"),
        "unit/launch/test_serve.py",
    ),
    "coldstart.lab": {
        "traces.readers": "unit/lab/traces/test_traces.py",
        **dict.fromkeys(("scheduling.placed", "scheduling.stock", "scheduling.settings"), TWIN),
        "host.html": "cli/test_trace_replay_command.py",
    },
    "coldstart.vllm": {
        "engine.recorder": GPU, "import_check": "unit/system/test_installation.py", "scheduling.events": SCHEDULER,
        "scheduling.queue": SCHEDULER,
        "scheduling.started": SCHEDULER, "scheduling.states": SCHEDULER,
        "scheduling.view": SCHEDULER, "weights.device": "unit/vllm/weights/test_loader_in_place.py",
    },
    "coldstart.validate": {"against": "unit/validate/test_validate_checks.py"},
    "coldstart.weights.prefetch": dict.fromkeys(
        ("connections", "daemon", "mapping", "object_source", "region", "resident_models", "service", "streams"), FETCHING
    ),
}  # fmt: skip


def _modules() -> Iterator[str]:
    for package, directory in PACKAGES.items():
        for path in directory.rglob("*.py"):
            if path.name != "__init__.py":
                yield ".".join([package, *path.relative_to(directory).with_suffix("").parts])


def _named(text: str) -> Iterator[str]:
    """Return our dotted names in one test: its imports and the names in its texts."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"coldstart(?:\.\w+)+", node.value)


def _unnamed() -> set[str]:
    """Patched attributes count for their module: `coldstart.a.b.c` names `coldstart.a.b` as well."""
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__)]
    dotted = {name for path in files for name in _named(path.read_text(encoding="utf-8"))}
    dotted |= {name.rpartition(".")[0] for name in dotted}
    stems = [path.stem for path in files if path.stem.startswith("test_")]
    return {
        module
        for module in _modules()
        if module not in dotted and not any(module.rpartition(".")[2].strip("_") in stem for stem in stems)
    }


def test_every_module_is_named_by_a_test_or_here() -> None:
    listed = {f"{package}.{name}" for package, names in THROUGH.items() for name in names}
    assert _unnamed() == listed


@pytest.mark.parametrize("suite", sorted({suite for names in THROUGH.values() for suite in names.values()}))
def test_the_suite_that_is_named_here_is_there(suite: str) -> None:
    assert "\ndef " in (ROOT / "tests" / suite).read_text(encoding="utf-8")
