"""Run all probes of this machine and decide whether it can serve cold starts."""

from collections.abc import Sequence

from coldstart.system import probes
from coldstart.system.paths import Cache
from coldstart.system.probes import Probe


def examine(cache: Cache) -> list[Probe]:
    """Run all probes, the most important for a new user first."""
    return [
        probes.vllm(),
        probes.cpu(),
        probes.memory(),
        probes.gpu(),
        probes.store(cache),
        probes.compiler(),
        probes.template(),
        probes.criu(),
        probes.frozen_runtime(cache),
        probes.cuda_checkpoint(),
        probes.shared_memory(),
        probes.huge_pages(),
        probes.tcmalloc(),
        probes.open_files(),
    ]


def able(results: Sequence[Probe]) -> bool:
    """Return whether cold starts can be served, because no required item is missing."""
    return not any(probe.required and probe.status == "missing" for probe in results)
