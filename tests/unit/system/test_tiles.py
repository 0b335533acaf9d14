"""Leave to use AMX is the kernel's to give: what is said agrees with what the processor has."""

from __future__ import annotations

from coldstart.system.devices import amx_tiles, hardware


def test_leave_is_given_where_the_processor_has_tiles() -> None:
    assert amx_tiles.ask() is ("amx_tile" in hardware.flags().split())
    assert amx_tiles.ask() is amx_tiles.ask()
