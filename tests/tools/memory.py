"""Memory of processes that no file backs: what weights, KV caches and vLLM itself take."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def measure_private_bytes(pids: Iterable[int]) -> int:
    """Return the proportional set sizes in bytes without pages that files back. A process that has ended counts 0."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(
                int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
            )
    return total
