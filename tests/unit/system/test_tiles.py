"""Permission of the kernel to use AMX tiles agrees with the features of the processor."""

from __future__ import annotations

from coldstart.system.devices import amx_tiles, hardware


def test_permission_is_granted_when_the_processor_has_amx_tiles() -> None:
    assert amx_tiles.ask() is ("amx_tile" in hardware.flags().split())
    assert amx_tiles.ask() is amx_tiles.ask()
