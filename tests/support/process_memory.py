"""Search the memory of another process of this user."""

from collections.abc import Iterator
from pathlib import Path

_STEP = 1 << 24


def find(pid: int, word: bytes) -> list[str]:
    """Return the readable private mappings of a process that contain the word, as lines of /proc/PID/maps."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    private = [line for line in lines if line.split()[1][::3] == "rp" and "[v" not in line]
    return [line for line in private if any(word in part for part in _read(pid, line.split()[0], len(word)))]


def _read(pid: int, place: str, overlap: int) -> Iterator[bytes]:
    """Yield the memory of a mapping in parts that overlap, so that none cuts a word."""
    first, last = (int(part, 16) for part in place.split("-"))
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for start in range(first, last, _STEP):
            memory.seek(start)
            yield memory.read(min(last - start, _STEP + overlap))
