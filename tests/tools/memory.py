"""Memory of processes that no file backs: what weights, KV caches and vLLM itself take."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event


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


@contextmanager
def run_beside(work: Callable[[Event], None]) -> Iterator[None]:
    """Run `work` in a thread beside the block. It must end when its event is set, and its error is raised then."""
    end = Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(work, end)
        try:
            yield
        finally:
            end.set()
        running.result()


@contextmanager
def watch_memory(find_pids: Callable[[], Iterable[int]]) -> Iterator[list[tuple[float, int]]]:
    """Yield a list that receives the time and `measure_private_bytes` of processes 20 times a second during the block.

    Page tables are read again only if a kernel counter of a process moved by 1 MiB, because reading them takes long.
    """
    samples = list[tuple[float, int]]()

    def run(end: Event) -> None:
        due, held, before = time.monotonic(), 0, dict[int, int]()
        while not end.wait(max(0.0, due - time.monotonic())):
            due, pages = due + 0.05, dict[int, int]()
            for pid in find_pids():
                with suppress(OSError):
                    pages[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) >> 8
            held, before = held if pages == before else measure_private_bytes(pages), pages
            samples.append((time.monotonic(), held))

    with run_beside(run):
        yield samples
