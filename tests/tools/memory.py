"""Memory of processes that no file backs: what weights, KV caches and vLLM itself take."""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from threading import Event


def measure_private_bytes(pids: Iterable[int]) -> int:
    """Return the proportional set sizes in bytes without pages that files back. A process that has ended counts 0.

    Pages of a memory file count once, also those that no process maps.
    """
    total, pids = 0, [*pids]
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += sum(
                int(line.split()[1]) << 10 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
            )
    left = measure_memory_files(pids)
    for pid in pids if left else ():
        with suppress(OSError):
            if "/memfd:" in Path(f"/proc/{pid}/maps").read_text():
                for place in re.split(r"\n(?=[0-9a-f]+-)", Path(f"/proc/{pid}/smaps").read_text()):
                    if (inode := int(place.split(maxsplit=5)[4])) in left:
                        found = re.search(r"\nPss: +(\d+)", place)
                        left[inode] -= int(found[1]) << 10 if found else 0
    return total + sum(max(0, size) for size in left.values())


def measure_memory_files(pids: Iterable[int]) -> dict[int, int]:
    """Return the allocated bytes of the memory files that the processes have open, by inode."""
    found = dict[int, int]()
    for pid in pids:
        with suppress(OSError):
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if str(file.readlink()).startswith("/memfd:"):
                        found[file.stat().st_ino] = file.stat().st_blocks * 512
    return found


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

    Page tables are read again only if a process or its memory files grew or shrank by 1 MiB, because reading takes long. They
    are read one after the other, so they count twice what a process meanwhile returned to others that share it. After each
    fall they are read again; while memory falls all the time, the median of nine readings counts.
    """
    samples = list[tuple[float, int]]()

    def count() -> dict[int, int]:
        pages = dict[int, int]()
        for pid in find_pids():
            pages[-pid] = sum(measure_memory_files([pid]).values()) >> 20
            with suppress(OSError):
                pages[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) >> 8
        return pages

    def run(end: Event) -> None:
        held, before = 0, dict[int, int]()
        while not end.wait(0.05):
            pages, tries = count(), list[int]()
            stable = pages == before
            while not stable and len(tries) < 9:
                begun = pages
                tries.append(measure_private_bytes(pid for pid in begun if pid > 0))
                pages = count()
                stable = begun.keys() == pages.keys() and all(begun[pid] <= pages[pid] for pid in begun)
            held = held if not tries else tries[-1] if stable else int(median(tries))
            before = pages if stable else {}
            samples.append((time.monotonic(), held))

    with run_beside(run):
        yield samples
