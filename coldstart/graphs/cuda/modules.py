"""Which binary a function came from, by what was seen while modules were loaded.

Identity is (sha256 of the binary, name).  A name that several binaries define is decided by the exact set of
functions in the function's module; where that does not decide either, the binary is unknown and the kernel
is not bundled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from coldstart.graphs.elf import Cubin, read_cubin
from coldstart.graphs.errors import AlteredTableError
from coldstart.graphs.table_files import sha256

Layout = tuple[tuple[int, int], ...]


@dataclass
class ModuleLog:
    """Binaries by digest, in order of loading; `see` is what a module-loaded callback calls."""

    images: dict[str, bytes] = field(default_factory=dict)
    cubins: dict[str, Cubin] = field(default_factory=dict)
    unreadable: int = 0
    _by_name: dict[str, list[str]] = field(default_factory=dict)

    def see(self, image: bytes) -> None:
        """Record one binary; those that are no cubin are counted and dropped."""
        digest = sha256(image)
        if digest in self.images:
            return
        try:
            cubin = read_cubin(image)
        except AlteredTableError:
            self.unreadable += 1
            return
        self.images[digest], self.cubins[digest] = image, cubin
        for name in cubin.kernels:
            self._by_name.setdefault(name, []).append(digest)

    def digest(self, name: str, layout: Layout, siblings: Callable[[], set[str]]) -> str | None:
        """The binary of a function; `siblings` lists the names in its module, asked only when needed."""
        fits = [d for d in self._by_name.get(name, []) if self.cubins[d].kernels[name] in (layout, ())]
        if len(fits) > 1:
            names = siblings()
            fits = [d for d in fits if set(self.cubins[d].kernels) == names]
        return fits[0] if len(fits) == 1 else None

    def mutable(self, digest: str | None) -> bool:
        """Whether the binary has variables of its own."""
        return digest is not None and bool(self.cubins[digest].mutable_globals)
