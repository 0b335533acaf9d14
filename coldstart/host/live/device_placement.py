"""Devices of the models: their memory, read through NVML, and the environment that shows a server its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from coldstart.contract import environment
from coldstart.errors import UsageError
from coldstart.host.configuration import HostFile
from coldstart.host.launches import Launch
from coldstart.system.devices import nvml


def limit_devices(file: HostFile) -> HostFile:
    """Return a configuration with the memory of its smallest device, where models name devices and it sets none.

    Raises UsageError if a model names a device that this machine does not show to the host.
    """
    if not any(launch.devices for launch in file.catalogue.launches.values()):
        return file
    found = nvml.query()
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
