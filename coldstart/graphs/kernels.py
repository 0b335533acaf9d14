"""Resolve a kernel's identity (SHA-256 of its binary, mangled name) to a function handle.

Methods, in order: the bundled binary; the loaded modules, and again after the triggering kernels ran (section
5.2). If all of them fail, the graphs of the kernel are captured. A binary with mutable globals is
never loaded a second time, because each copy would have its own variables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from coldstart.graphs.api import DriverApi, FrameworkApi
from coldstart.graphs.elf import Cubin
from coldstart.graphs.errors import AlteredTableError, GraphError, MissingKernelError
from coldstart.graphs.tables import Kernel

Identity = tuple[str, str | None]
Load = Callable[[str], bytes]


@dataclass
class Ladder:
    """Resolver of the kernels of one process; `load` returns a verified binary by digest, or raises.

    A process without a module log cannot tell the binary of a loaded function. Such a function is accepted if
    its name and parameters match, unless `ambiguous` has the name because several binaries of the bundle
    define it.
    """

    driver: DriverApi
    framework: FrameworkApi
    load: Load
    ambiguous: frozenset[str] = frozenset()
    rungs: dict[str, int] = field(default_factory=dict)
    _libraries: dict[str, int] = field(default_factory=dict)
    _known: dict[Identity, int] = field(default_factory=dict)
    _triggered: bool = False

    def resolve(self, kernel: Kernel) -> int:
        """Return the function handle, with its attributes set.

        Raises:
            MissingKernelError: Every method failed; the message has all reasons.
        """
        reasons: list[str] = []
        for rung in (self._bundled, self._loaded, self._triggering):
            try:
                function = rung(kernel)
            except GraphError as error:
                reasons.append(f"{rung.__name__[1:]}: {error}")
                continue
            if kernel.attributes:
                self.driver.set_function_attributes(function, kernel.attributes)
            self.rungs[rung.__name__[1:]] = self.rungs.get(rung.__name__[1:], 0) + 1
            return function
        raise MissingKernelError(f"kernel {kernel.name}: " + "; ".join(reasons))

    def _bundled(self, kernel: Kernel) -> int:
        if kernel.mutable_globals:
            raise MissingKernelError("its binary has mutable globals")
        if kernel.binary is None:
            raise MissingKernelError("its binary is unknown")
        if kernel.binary not in self._libraries:
            self._libraries[kernel.binary] = self._open(kernel.binary)
        return self.driver.library_kernel(self._libraries[kernel.binary], kernel.name)

    def _open(self, digest: str) -> int:
        return self.driver.load_library(self.load(digest))

    def _loaded(self, kernel: Kernel) -> int:
        if not self._known:
            self._enumerate()
        for function in (self._known.get((kernel.name, binary)) for binary in (kernel.binary, None)):
            if function is not None and self._fits(function, kernel):
                return function
        raise MissingKernelError("no loaded module contains it")

    def _fits(self, function: int, kernel: Kernel) -> bool:
        """Return whether the binary is the same, or is unknown but name and parameters are unambiguous."""
        here = self.driver.kernel(function)
        if here.binary is None:
            return here.layout == kernel.layout and kernel.name not in self.ambiguous
        return here.binary == kernel.binary

    def _enumerate(self) -> None:
        for function in self.driver.loaded_functions():
            loaded = self.driver.kernel(function)
            self._known[loaded.name, loaded.binary] = function

    def _triggering(self, kernel: Kernel) -> int:
        if not self._triggered:
            self._triggered = True
            self.framework.trigger()
            self._enumerate()
        return self._loaded(kernel)


def ambiguous_names(kernels: Iterable[Kernel]) -> frozenset[str]:
    """Return the names that several binaries of a bundle define."""
    counts = Counter(name for name, _ in {(k.name, k.binary) for k in kernels})
    return frozenset(name for name, count in counts.items() if count > 1)


def check_layout(kernel: Kernel, cubin: Cubin) -> None:
    """Raise AlteredTableError if the binary lacks the kernel or declares other parameters than the tables.

    If the binary declares no parameters (a newer attribute), the layout that the driver reported is accepted.
    """
    declared = cubin.kernels.get(kernel.name)
    if declared is None or (declared and declared != kernel.layout):
        raise AlteredTableError(f"kernel {kernel.name}: the binary declares other parameters than the tables")
