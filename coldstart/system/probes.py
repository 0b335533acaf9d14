"""Probes of this machine. Each function returns one `Probe` without importing torch or vLLM.

A probe does not raise an error if something is missing; its result reports that.
"""

import ctypes
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coldstart.contract import environment
from coldstart.errors import ColdstartError, CommandFailedError
from coldstart.system import paths, runtime
from coldstart.system.devices import hardware, nvml
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.system.snapshot import criu as snapshots
from coldstart.system.snapshot import runtime_image

Status = Literal["ok", "missing", "note"]

_NUMA_HINT = "install the system library libnuma, for example with `apt install libnuma1`"
_SHM_BYTES = 1 << 30
_FULL_BYTES = 1 << 20
_FREE_BYTES = 5 << 30


@dataclass(frozen=True)
class Probe:
    """Result of one probe. If a `required` probe has the status "missing", this machine cannot serve cold starts."""

    name: str
    status: Status
    found: str
    hint: str | None = None
    required: bool = False

    @property
    def prevents_starts(self) -> bool:
        """Return whether this machine cannot start servers because of this probe."""
        return self.required and self.status == "missing"


def probe_cpu() -> Probe:
    """Check that the processor has vector instructions for vLLM's CPU kernels, which a GPU engine does not need."""
    fields = hardware.read_cpu_fields()
    isa = str(fields["cpu.isa"]).split()
    best = next(
        (flag for flag in ("amx_tile", "avx512f", "avx2", "sve", "asimd", "neon") if flag in isa), None
    )
    summary = (
        f"{fields['cpu.vendor']} family {fields['cpu.family']} model {fields['cpu.model']}, "
        f"{fields['cpu.threads']} threads, {best or 'no usable vector extension'}"
    )
    bad = best is None and runtime.targets_cpu()
    hint = "run on a processor with AVX2 or NEON" if bad else None
    return Probe("cpu", "missing" if bad else "ok", summary, hint, required=True)


def probe_memory() -> Probe:
    """Report the total and available RAM."""
    total, free = (processes.read_meminfo(name) / 2**20 for name in ("MemTotal", "MemAvailable"))
    return Probe("memory", "ok", f"{total:.1f} GiB, {free:.1f} GiB available")


def probe_gpu() -> Probe:
    """Report the NVIDIA GPUs. They are required only if the installed vLLM is built for GPUs."""
    state = nvml.read_gpu_state()
    hints = "; ".join(state.problems) or None
    if state.devices:
        first = state.devices[0]
        size = first.memory_bytes / 2**30
        text = f"{len(state.devices)} x {first.name}, {size:.0f} GiB, capability {first.compute_capability}"
        return Probe("gpu", "note" if hints else "ok", text, hints)
    if hints:
        return Probe("gpu", "missing", "no GPU responds", hints, required=not runtime.targets_cpu())
    needed = runtime.find_vllm_distribution() is not None and not runtime.targets_cpu()
    hint = "install the NVIDIA driver, run the container with `--gpus all`, or run `coldstart install cpu`"
    return Probe("gpu", "missing" if needed else "note", "none", hint if needed else None, required=needed)


def require_device() -> None:
    """Raise CommandFailedError if vLLM is built for GPUs and none responds, or if its CPU kernels lack a library."""
    probe = probe_gpu()
    if probe.prevents_starts:
        raise CommandFailedError(
            "cannot start an engine: the installed vLLM is built for GPUs, and no GPU responds",
            hint=probe.hint,
        )
    if (reason := _find_missing_library()) is not None:
        raise CommandFailedError(f"cannot start an engine of the installed vLLM: {reason}", hint=_NUMA_HINT)


def probe_criu() -> Probe:
    """Check that CRIU, which snapshots of a CPU engine need, is installed and may run."""
    if (limit := snapshots.find_limit()) is not None:
        return Probe("criu", "missing", *limit)
    try:
        checked = snapshots.run_criu("check")
    except OSError as error:
        return Probe("criu", "missing", str(error), f"set {snapshots.VARIABLE} to another CRIU")
    last = ((checked.stdout + checked.stderr).strip().splitlines() or [""])[-1]
    (program,) = snapshots.find_command()
    label = f"{snapshots.read_version(program) or '?'}, check: {last}"
    hint = f"{program} check -v4" if checked.returncode else None
    return Probe("criu", "missing" if hint else "ok", label, hint)


def probe_frozen_runtime(cache: Cache) -> Probe:
    """Report whether a runtime snapshot for this interpreter exists, and how to create one."""
    name, make = "frozen runtime", "coldstart template freeze"
    if not runtime.targets_cpu():
        return Probe(name, "note", "none: only the runtime of vLLM's CPU build can be frozen")
    if (limit := snapshots.find_limit()) is not None:
        return Probe(name, "note", f"none, and it cannot be created: {limit[0]}")
    try:
        place = runtime_image.choose_image_directory(cache.runtimes)
        image = runtime_image.describe_image(place) if place.is_dir() else None
    except (ColdstartError, OSError) as error:
        return Probe(name, "note", f"none: {error}", getattr(error, "hint", None))
    if image is None:
        return Probe(name, "note", "none yet", make)
    if image.obstacle is not None:
        return Probe(name, "note", image.obstacle, make)
    return Probe(name, "ok", f"{image.size / 2**20:.0f} MiB, created {image.made}")


def probe_shared_memory() -> Probe:
    """Check the free space in /dev/shm, through which the processes of a server exchange tensors."""
    place = Path("/dev/shm")
    if not place.is_dir():
        return Probe("shared memory", "missing", "no /dev/shm", "mount -t tmpfs tmpfs /dev/shm")
    free = shutil.disk_usage(place).free
    enough = free >= _SHM_BYTES
    hint = None if enough else "mount -o remount,size=4G /dev/shm (container: --shm-size 4g)"
    return Probe("shared memory", "ok" if enough else "missing", f"{free / 2**30:.1f} GiB free", hint)


def find_full_directory() -> str | None:
    """Return a hint if /dev/shm or the temporary directory is full, which may have crashed a server, or else None."""
    hints = {
        Path(
            "/dev/shm"
        ): "free space in it, or run `mount -o remount,size=4G /dev/shm` (container: --shm-size 4g)",
        Path(environment.TMPDIR.read() or "/tmp"): "free space in it, or set TMPDIR to another directory",
    }
    for place, hint in hints.items():
        if place.is_dir() and (free := shutil.disk_usage(place).free) < _FULL_BYTES:
            return f"{place} has {free} bytes free: {hint}"
    return None


def probe_template() -> Probe:
    """Check that a template process can fork servers, which requires a private directory for its socket."""
    try:
        place = paths.runtime_dir()
    except (ColdstartError, OSError) as error:
        hint = getattr(error, "hint", "set XDG_RUNTIME_DIR to a directory that you own")
        return Probe("template", "missing", str(error), hint)
    return Probe("template", "ok", f"sockets in {place}")


def probe_compiler() -> Probe:
    """Report the C++ compiler that builds a CPU engine's kernels. Its version is part of the bundle key."""
    path = runtime.find_compiler()
    needed = runtime.targets_cpu()
    status: Status = "ok" if path else ("missing" if needed else "note")
    return Probe("compiler", status, path or "none", None if path else "apt-get install g++", required=needed)


def probe_vllm() -> Probe:
    """Check that a supported version of vLLM is installed, and the library that the CPU build's kernels need."""
    distribution = runtime.find_vllm_distribution()
    if distribution is None:
        return Probe("vllm", "missing", "none", "coldstart install cpu (or gpu)", required=True)
    name, version = distribution
    fits = runtime.is_within(version, runtime.SUPPORTED_VLLM)
    low, high = (".".join(map(str, bound)) for bound in runtime.SUPPORTED_VLLM)
    hint = None if fits else f"pip install '{name}>={low},<{high}'"
    label = f"{name} {version}, torch {runtime.read_torch_build().get('__version__', 'none')}"
    if (reason := _find_missing_library()) is not None:
        label, hint = f"{label}; {reason}", _NUMA_HINT
    return Probe("vllm", "missing" if hint else "ok", label, hint, required=True)


def _find_missing_library() -> str | None:
    """Return why the kernels of vLLM's CPU build cannot be loaded, or None. vLLM only warns, and fails later."""
    try:
        _ = runtime.targets_cpu() and ctypes.CDLL("libnuma.so.1")
    except OSError as error:
        return f"its kernels cannot be loaded: {error}"
    return None


def probe_store(cache: Cache) -> Probe:
    """Check that the bundle store is writable, and report its free space."""
    place = cache.bundles
    held = next(parent for parent in (place, *place.parents) if parent.exists())
    if not os.access(held, os.W_OK | os.X_OK):
        return Probe(
            "store",
            "missing",
            f"cannot write to {place}",
            "pass another directory: --cache-dir DIR",
            required=True,
        )
    free = shutil.disk_usage(held).free
    label = f"{place}, {free / 2**30:.1f} GiB free"
    if free < _FREE_BYTES:
        return Probe(
            "store", "note", label, "free space with coldstart prune, or pass --cache-dir DIR", required=True
        )
    return Probe("store", "ok", label, required=True)


def run_probes(cache: Cache) -> list[Probe]:
    """Run all probes, and return their results in order of importance to a new user."""
    return [
        probe_vllm(),
        probe_cpu(),
        probe_memory(),
        probe_gpu(),
        probe_store(cache),
        probe_compiler(),
        probe_template(),
        probe_criu(),
        probe_frozen_runtime(cache),
        probe_shared_memory(),
    ]


def can_serve(results: Sequence[Probe]) -> bool:
    """Return whether this machine can serve cold starts: no required probe has the status "missing"."""
    return not any(probe.prevents_starts for probe in results)
