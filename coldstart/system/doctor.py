"""What this machine can do: every probe once, and whether cold starts can be served at all."""

from collections.abc import Sequence

from coldstart.system import probes
from coldstart.system.paths import Cache
from coldstart.system.probes import Probe


def examine(cache: Cache) -> list[Probe]:
    """All probes, in the order in which they matter to a newcomer."""
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
    """Whether cold starts can be served: nothing that is required is missing."""
    return not any(probe.required and probe.status == "missing" for probe in results)
