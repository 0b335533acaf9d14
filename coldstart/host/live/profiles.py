"""Find the bundle, memory, start time and devices of a model before its first start on this host.

The `stages` section of a bundle records how long its verification run took to become ready, and how much memory it used: on
the CPU the proportional set size of its processes, and on GPUs the memory used on all devices together, at most and asleep.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from math import floor, inf
from pathlib import Path

from coldstart.artifacts.bundle import accept_any
from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import PARKED
from coldstart.errors import UsageError
from coldstart.host.configuration import HostFile, ModelTable, Profile, Profiles
from coldstart.host.launches import FAIL, FORKED, Catalogue, Launch
from coldstart.host.residents import share_memory
from coldstart.models import inspection, resolver
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import weight_files
from coldstart.system import runtime
from coldstart.system.devices import nvml
from coldstart.system.paths import Cache
from coldstart.system.proc import processes
from coldstart.units import format_memory


def look_up_bundle(launch: Launch, cache: Cache, *, offline: bool) -> BundleLookup:
    """Look up the bundle of a launch. If `weights_from` is set, the model's weights need not be on this machine.

    Raises the errors of `inspection.look_up`.
    """
    found = inspection.look_up(
        launch.model,
        launch.args,
        cache=cache,
        offline=offline,
        revision=launch.revision,
        accepts=accept_any if launch.untrusted else None,
    )
    if launch.weights_from and not found.model.weight_files:
        return found.accept_nearest_without_weights()
    return found


def read_bundle_arguments(launch: Launch, cache: Cache, *, offline: bool) -> tuple[Arguments, str]:
    """Return the vLLM arguments and the name of the model's newest trusted bundle. Both are empty if there is no such bundle.

    Raises the errors of `resolver.look_up_for_start`, and NoBundleError if `on_miss` is "fail" and the only bundle is
    untrusted.
    """
    found = resolver.look_up_for_start(
        launch.model,
        None,
        cache=cache,
        offline=offline,
        revision=launch.revision,
        accepts=accept_any if launch.untrusted else None,
    )
    if found.bundle is None and found.untrusted is not None and launch.on_miss == FAIL:
        raise inspection.build_miss_error(found)
    lender = found.arguments_bundle
    return found.vllm_args, "" if lender is None else f"{lender.name}:v{lender.version}"


def look_up_required_bundle(launch: Launch, cache: Cache, *, offline: bool) -> BundleLookup:
    """Look up a launch's bundle.

    Raises the errors of `inspection.look_up`, or NoBundleError if a required bundle is missing.
    """
    found = look_up_bundle(launch, cache, offline=offline)
    if found.bundle is None and launch.on_miss == FAIL:
        raise inspection.build_miss_error(
            found, lambda recorded: f"use the arguments of that bundle: {shlex.join(recorded)}"
        )
    return found


# Assumptions: vLLM's default KV cache on the CPU, the libraries of its two processes, and the duration of an ordinary start.
ASSUMED_KV = 4 << 30
ASSUMED_RUNTIME = 1 << 30
ASSUMED_START_S = 60.0
# Memory of torch and vLLM in a runtime template, which forked servers share.
RUNTIME_TEMPLATE_BYTES = 540 << 20


def create_profile_reader(cache: Cache, *, offline: bool) -> Profiles:
    """Return a function that reads the profile of a launch (its memory and start time) from its bundle.

    The function raises the errors of a lookup, NoBundleError if the launch requires a bundle, and UsageError if the memory
    is unknown.
    """

    def profile(launch: Launch) -> Profile:
        found = look_up_required_bundle(launch, cache, offline=offline)
        known = choose_profile(launch, found, launch.memory if isinstance(launch, ModelTable) else None)
        forked = launch.mode in FORKED
        shared = min(find_template_bytes(), known.memory * 3 // 4) if forked else 0
        return replace(known, shared=shared)

    return profile


def find_template_bytes() -> int:
    """Return the memory in bytes to reserve for a runtime template. On a GPU, it is 0: a template uses no device memory."""
    return RUNTIME_TEMPLATE_BYTES if runtime.targets_cpu() else 0


def choose_profile(launch: Launch, found: BundleLookup, memory: int | None = None) -> Profile:
    """Return the memory and start time that the bundle's verification run recorded. If it recorded none, estimate them.

    `memory` is the size in bytes that the user specified. Raises UsageError if the estimate on a CPU needs local weights
    that are missing, or if the GPU memory is unknown: it cannot be estimated, because vLLM uses all memory that it may use.
    """
    start, on_cpu = found.bundle and inspection.read_verification_start(found.bundle), runtime.targets_cpu()
    if start and (known := memory or (start.memory_bytes if on_cpu else start.device_bytes)):
        # Both sleep levels release the same memory of the device.
        sizes = {"asleep-1": start.asleep_bytes, "asleep-2": start.asleep_bytes, PARKED: start.parked_bytes}
        tiers = {name: size for name, size in sizes.items() if size is not None}
        least = 0 if on_cpu or memory else start.device_floor_bytes or 0
        return Profile(known, start.ready_s, "bundle", tiers=tiers, least=least)
    if on_cpu:
        return estimate_profile(launch, found.model.path)
    if memory:
        return Profile(memory, ASSUMED_START_S, "assumed")
    raise UsageError(
        f"models.{launch.name}: the GPU memory of the model is unknown, because no bundle has recorded it",
        hint=f"run `{found.format_command('materialize', '--force')}`, or set memory and start_s in [models.{launch.name}]",
    )


def measure_weights(model: Path | None) -> int:
    """Return the size in bytes of the weights in a model directory, or 0 if there are none."""
    return 0 if model is None else sum(file.stat().st_size for file in weight_files(model))


def estimate_profile(launch: Launch, model: Path | None) -> Profile:
    """Estimate a profile from the sizes of the weights and the KV cache. Raises UsageError if there are no local weights."""
    weights = measure_weights(model)
    if not weights:
        raise UsageError(
            f"models.{launch.name}: the memory of the model is unknown, because it has neither a bundle nor local weights",
            hint=f"set memory and start_s in [models.{launch.name}]",
        )
    kv = launch.args.get_integer("kv_cache_memory_bytes", ASSUMED_KV)
    return Profile(weights + kv + ASSUMED_RUNTIME, ASSUMED_START_S, "assumed")


def fill_in_device_memory(file: HostFile) -> HostFile:
    """Return `file` with the memory per device set to that of the smallest device that a model uses, unless it is set.

    Raises UsageError if a model uses a device that the host cannot see.
    """
    if not any(launch.devices for launch in file.catalogue.launches.values()):
        return file
    found = nvml.list_gpus()
    for launch in file.catalogue.launches.values():
        beyond = [number for number in launch.devices if number >= len(found)]
        if found and beyond:
            raise UsageError(
                f"models.{launch.name}.devices: device {beyond[0]} does not exist: the highest index is {len(found) - 1}",
                hint="run `coldstart doctor` to list the devices",
            )
    if file.settings.device_memory is not None:
        return file
    if not found:
        note = "cannot read the memory of the devices: set device_memory in the host file"
        return replace(file, notes=(*file.notes, note))
    named = {number for launch in file.catalogue.launches.values() for number in launch.devices}
    smallest = min(found[number].memory_bytes for number in named)
    return replace(file, settings=replace(file.settings, device_memory=smallest))


def share_gpus(file: HostFile) -> HostFile:
    """Return `file` with less GPU memory for models that would not fit together, so that as many as possible run together.

    Each server keeps at least the KV cache for one request of the maximum length. A model keeps its memory if its bundle
    does not record how much less is enough, or if the user has set its memory.
    """
    if not any(spec.least_memory for spec in file.models) or not (gpus := nvml.list_gpus()):
        return file
    launches, models = dict(file.catalogue.launches), {spec.name: spec for spec in file.models}
    notes, shared = list(file.notes), share_memory(file.models, file.settings)
    for spec in file.models:
        launch, full, size = launches[spec.name], spec.tiers[0].memory, shared[spec.name]
        if size == full:
            continue
        allowed = launch.args.gpu_memory_share() * gpus[min(launch.devices, default=0)].memory_bytes
        limit = floor(allowed - (full - size) / launch.args.ranks_per_node())
        launches[spec.name] = replace(launch, gpu_bytes=limit)
        tiers = (replace(tier, memory=min(tier.memory, size)) for tier in spec.tiers)
        models[spec.name] = replace(spec, tiers=tuple(tiers))
        less, more = format_memory(size), format_memory(full)
        notes.append(f"{spec.name} gets {less} of GPU memory instead of {more}, so that more models fit")
    catalogue = Catalogue(launches.values(), file.settings.default_model)
    return replace(file, models=tuple(models.values()), catalogue=catalogue, notes=tuple(notes))


def build_device_environment(launch: Launch) -> Mapping[str, str]:
    """Return the environment variables that restrict a server to its devices, or none if it may use all devices."""
    if not launch.devices:
        return {}
    visible = os.environ.get(nvml.VISIBLE)
    names = [] if visible is None else [name.strip() for name in visible.split(",")]
    shown = (names[number] if number < len(names) else str(number) for number in launch.devices)
    return {str(environment.CUDA_VISIBLE_DEVICES): ",".join(shown)}


def limit_gpu_memory(args: Arguments, limit_bytes: int) -> list[str]:
    """Return vLLM arguments that limit a server to `limit_bytes` of its GPU, or none if `args` already set a lower limit.

    vLLM requires this share of the GPU to be free when a server starts, even if `--kv-cache-memory-bytes` sets the size of
    its KV cache. There is no limit if `limit_bytes` is 0 or the size of the GPU is unknown.
    """
    gpus = nvml.list_gpus() if limit_bytes else []
    share = floor(limit_bytes / gpus[0].memory_bytes * 1e4) / 1e4 if gpus else inf
    return ["--gpu-memory-utilization", str(share)] if share < args.gpu_memory_share() else []


class MemoryMeter:
    """Memory meter for a process and its descendants, in bytes. A method returns None if it cannot measure the memory.

    Its methods raise ProcessLookupError if the process has exited.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        self.on_cpu = on_cpu

    def measure_pss_bytes(self, pid: int) -> int | None:
        """Return the proportional set size in bytes, or None on a GPU, where the host does not correct reservations."""
        return processes.measure_pss_bytes(processes.list_tree(pid)) if self.on_cpu else None

    def measure_gpu_bytes(self, pid: int) -> int | None:
        """Return the GPU memory in bytes that the driver reports, or None on the CPU."""
        return None if self.on_cpu else nvml.read_tree_memory(pid)
