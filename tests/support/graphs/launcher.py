"""The launching half of the simulated driver: lazy modules, stream capture."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coldstart.graphs.api import Edge, NodeKind
from coldstart.graphs.elf import read_cubin, sections
from coldstart.graphs.errors import DriverError
from coldstart.graphs.tables import MEMCPY, MEMSET, Attributes, Kernel, sha256
from tests.support.graphs.kernels import execute
from tests.support.graphs.memory import Memory


@dataclass
class Function:
    """A loaded kernel; attributes are per function, as in the driver."""

    kernel: Kernel
    routine: str
    attributes: dict[int, int] = field(default_factory=dict)


@dataclass
class Node:
    """One graph node; `payload` holds packed parameters or a MEMSET or MEMCPY row."""

    kind: NodeKind
    payload: bytes = b""
    function: int = 0
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    attributes: Attributes = ()


@dataclass
class Graph:
    """Node handles in order of creation, and edges."""

    nodes: list[int] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


@dataclass(frozen=True)
class Library:
    """A shipped binary."""

    name: str
    image: bytes


class Launcher:
    """Handles, modules and submission: what a framework and its libraries use."""

    def __init__(self, seed: int, libraries: Sequence[Library] = (), *, fixed_bases: bool = False) -> None:
        self.rng = random.Random(seed)
        self.memory = Memory(self.rng, fixed=fixed_bases)
        self.libraries = {library.name: library for library in libraries}
        self.objects: dict[int, Any] = {}
        self._images: dict[str, bytes] = {}
        self._loaded: dict[str, dict[str, int]] = {}
        self.capturing: Graph | None = None
        self._frontier: dict[int, list[Edge]] = {}
        self.launches = 0

    def _handle(self, value: Any) -> int:
        while (handle := self.rng.randrange(1 << 32, 1 << 46, 16)) in self.objects:
            continue
        self.objects[handle] = value
        return handle

    def _get(self, handle: int, kind: type[Any], call: str) -> Any:
        value = self.objects.get(handle)
        if not isinstance(value, kind):
            raise DriverError(call, "INVALID_HANDLE")
        return value

    def function(self, library: str, name: str) -> int:
        """Load the module lazily, as the first launch of any of its kernels does."""
        if library not in self._loaded:
            self._loaded[library] = self._load(self.libraries[library].image)
        return self._loaded[library][name]

    def _load(self, image: bytes) -> dict[str, int]:
        parsed, digest = read_cubin(image), sha256(image)
        self._images[digest] = image
        bodies = {name: _body(image, name) for name in parsed.kernels}
        mutable = bool(parsed.mutable_globals)
        return {
            name: self._handle(Function(Kernel(name, digest, layout, (), mutable), bodies[name]))
            for name, layout in parsed.kernels.items()
        }

    def kernel(self, function: int) -> Kernel:
        loaded: Function = self._get(function, Function, "cuFuncGetName")
        k = loaded.kernel
        attributes = tuple(sorted(loaded.attributes.items()))
        return replace(k, attributes=attributes)

    def binary(self, digest: str) -> bytes:
        return self._images[digest]

    def load_library(self, image: bytes) -> int:
        return self._handle(self._load(image))

    def library_kernel(self, library: int, name: str) -> int:
        found: dict[str, int] = self._get(library, dict, "cuLibraryGetKernel")
        if name not in found:
            raise DriverError("cuLibraryGetKernel", "NOT_FOUND")
        return found[name]

    def set_function_attributes(self, function: int, attributes: Sequence[tuple[int, int]]) -> None:
        self._get(function, Function, "cuFuncSetAttribute").attributes.update(dict(attributes))

    # --- launching and capture -----------------------------------------------------------------------
    def begin_capture(self) -> None:
        """Record every launch until end_capture as a node."""
        self.capturing, self._frontier = Graph(), {}

    def end_capture(self) -> int:
        """Return the captured graph."""
        graph, self.capturing = self.capturing, None
        return self._handle(graph)

    def submit(self, node: Node, stream: int = 0, edge_type: int = 0) -> None:
        """Run now, or record behind the stream's last nodes."""
        self.launches += 1
        if self.capturing is None:
            self._run(node)
            return
        handle = self._handle(node)
        port = 1 if edge_type else 0
        for last in self._frontier.get(stream, []):
            kind = edge_type or last.type
            self.capturing.edges.append(Edge(last.source, handle, port or last.from_port, 0, kind))
        self.capturing.nodes.append(handle)
        self._frontier[stream] = [Edge(handle, 0)]

    def wait(self, stream: int, other: int) -> None:
        """Make later work of `stream` follow the current work of `other`."""
        mine = self._frontier.setdefault(stream, [])
        mine.extend(e for e in self._frontier.get(other, []) if e not in mine)

    def _run(self, node: Node) -> None:
        if node.kind == NodeKind.KERNEL:
            execute(self.memory, self._get(node.function, Function, "launch").routine, node.payload)
        elif node.kind == NodeKind.MEMSET:
            row = np.frombuffer(node.payload, MEMSET)[0]
            self.memory.view(int(row["target"]), int(row["width"] * row["element"]))[:] = row["value"] & 0xFF
        elif node.kind == NodeKind.MEMCPY:
            row = np.frombuffer(node.payload, MEMCPY)[0]
            size = int(row["width"])
            self.memory.view(int(row["target"]), size)[:] = self.memory.view(int(row["source"]), size)


def _body(image: bytes, name: str) -> str:
    """Return the routine that a kernel's text names (the machine code of the simulator)."""
    return next(s.data for s in sections(image) if s.name == f".text.{name}").decode()
