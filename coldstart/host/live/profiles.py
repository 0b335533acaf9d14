"""Bundle, memory, start time and devices of models, as far as they are known before the first start on this host.

A bundle's section `stages` contains the time to ready and the memory of the start that verified it: on the CPU the
proportional set size of its processes, on a GPU the peak on all devices.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from coldstart.artifacts.bundle import accept_any
from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.host.configuration import HostFile, Profile, Profiles
from coldstart.host.launches import FAIL, FORKED, Launch
from coldstart.models import inspection, resolver
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import weight_files
from coldstart.system import runtime
from coldstart.system.devices import nvml
from coldstart.system.paths import Cache
from coldstart.system.proc import processes


def look_up_model(launch: Launch, cache: Cache, *, offline: bool) -> Lookup:
    """Look up the bundle of a launch; `weights_from` allows a machine without the model's weights.

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
    return found.drop_weights() if launch.weights_from and not found.model.weight_files else found


def adopt_arguments(launch: Launch, cache: Cache, *, offline: bool) -> tuple[Arguments, str]:
    """Return the arguments of the newest trusted bundle of the launch's model, and that bundle; none and "" without one.

    Raises the errors of `inspection.look_up`, and NoBundleError if `on_miss` is "fail" and the only bundle is not trusted.
    """
    asked = look_up_model(replace(launch, args=Arguments(), weights_from=None), cache, offline=offline)
    found = resolver.adopt_arguments(asked)
    if found.bundle is None and found.untrusted is not None and launch.on_miss == FAIL:
        raise inspection.build_miss_error(found)
    lender = found.lender
    return found.vllm_args, "" if lender is None else f"{lender.name}:v{lender.version}"


def look_up_launch(launch: Launch, cache: Cache, *, offline: bool) -> Lookup:
    """Look up the bundle of a launch. Raises the errors of `inspection.look_up`, and NoBundleError if `on_miss` is "fail"."""
    found = look_up_model(launch, cache, offline=offline)
    if found.bundle is None and launch.on_miss == FAIL:
        raise inspection.build_miss_error(
            found, lambda recorded: f"use the arguments of that bundle: {shlex.join(recorded)}"
        )
    return found


# vLLM's default on the CPU backend, the libraries of its two processes, and an ordinary start.
ASSUMED_KV = 4 << 30
ASSUMED_RUNTIME = 1 << 30
ASSUMED_START_S = 60.0
# Pages of torch and vLLM in a runtime template. A server forked from it shares them.
RUNTIME_TEMPLATE_BYTES = 540 << 20


def create_profiles(cache: Cache, *, offline: bool) -> Profiles:
    """Return profiles that are read from bundles.

    They raise what a lookup raises, NoBundleError if the launch requires a bundle, and UsageError if no source gives
    the memory.
    """

    def profile(launch: Launch) -> Profile:
        found = look_up_launch(launch, cache, offline=offline)
        known = choose_profile(launch, found)
        forked = launch.mode in FORKED
        shared = min(find_template_bytes(), known.memory * 3 // 4) if forked else 0
        return replace(known, shared=shared)

    return profile


def find_template_bytes() -> int:
    """Return the bytes that a runtime template counts with: the GPU's memory has none of it."""
    return RUNTIME_TEMPLATE_BYTES if runtime.targets_cpu() else 0


def choose_profile(launch: Launch, found: Lookup, memory: int | None = None) -> Profile:
    """Return memory and seconds of the bundle's verification run, else on the CPU an assumed profile.

    `memory` is what the user stated, in bytes. Raises UsageError if there are no local weights either, and without
    `memory` on a GPU, which vLLM fills as far as it may.
    """
    proof, on_cpu = found.bundle and inspection.read_proof(found.bundle), runtime.targets_cpu()
    if proof and (known := memory or (proof.memory_bytes if on_cpu else proof.device_bytes)):
        return Profile(known, proof.ready_s, "bundle")
    if on_cpu:
        return assumed(launch, found.model.path)
    if memory:
        return Profile(memory, ASSUMED_START_S, "assumed")
    raise UsageError(
        f"models.{launch.name}: its memory on the device is unknown: no bundle records it",
        hint=f"{found.format_materialize('--force')}; or state its memory and start_s yourself",
    )


def weights_bytes(model: Path | None) -> int:
    """Return the bytes of the weights in a model's directory; 0 if there are none."""
    return 0 if model is None else sum(file.stat().st_size for file in weight_files(model))


def assumed(launch: Launch, model: Path | None) -> Profile:
    """Return a profile assumed from the sizes of weights and KV cache. Raises UsageError without local weights."""
    weights = weights_bytes(model)
    if not weights:
        raise UsageError(
            f"models.{launch.name}: its memory is unknown: no bundle records it, and there are no local weights",
            hint="write memory and start_s for it in the host file",
        )
    kv = launch.args.number("kv_cache_memory_bytes", ASSUMED_KV)
    return Profile(weights + kv + ASSUMED_RUNTIME, ASSUMED_START_S, "assumed")


def limit_devices(file: HostFile) -> HostFile:
    """Return a configuration with the memory of its smallest device, where models name devices and it sets none.

    Raises UsageError if a model names a device that this machine does not show to the host.
    """
    if not any(launch.devices for launch in file.catalogue.launches.values()):
        return file
    found = nvml.list_gpus()
    for launch in file.catalogue.launches.values():
        beyond = [number for number in launch.devices if number >= len(found)]
        if found and beyond:
            raise UsageError(
                f"models.{launch.name}.devices: device {beyond[0]} does not exist, the host sees {len(found)}",
                hint="see the devices: coldstart doctor",
            )
    if file.settings.device_memory is not None:
        return file
    if not found:
        note = "the memory of the devices cannot be read: set device_memory in the host file"
        return replace(file, notes=(*file.notes, note))
    named = {number for launch in file.catalogue.launches.values() for number in launch.devices}
    smallest = min(found[number].memory_bytes for number in named)
    return replace(file, settings=replace(file.settings, device_memory=smallest))


def show_devices(launch: Launch) -> Mapping[str, str]:
    """Return the environment in which a server sees only its devices, by CUDA's names for them; empty: it sees all."""
    if not launch.devices:
        return {}
    visible = os.environ.get(nvml.VISIBLE)
    names = [] if visible is None else [name.strip() for name in visible.split(",")]
    shown = (names[number] if number < len(names) else str(number) for number in launch.devices)
    return {str(environment.CUDA_VISIBLE_DEVICES): ",".join(shown)}


class Meter:
    """Memory of a process and its descendants in bytes; None if it cannot be measured.

    Each method raises ProcessLookupError if the process has ended. On a GPU reservations remain as estimated.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        self.on_cpu = on_cpu

    def process_memory(self, pid: int) -> int | None:
        """Return the proportional set size. All servers together count the pages of a template at most once more."""
        return processes.measure_pss_bytes(processes.list_tree(pid)) if self.on_cpu else None

    def gpu_memory(self, pid: int) -> int | None:
        """Return the GPU memory, as the driver reports it."""
        return None if self.on_cpu else nvml.read_tree_memory(pid)
