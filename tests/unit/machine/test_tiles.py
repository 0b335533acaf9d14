"""Leave to use AMX is the kernel's to give: what is said agrees with what the processor has."""

from __future__ import annotations

from coldstart.machine import hardware, tiles


def test_leave_is_given_where_the_processor_has_tiles() -> None:
    assert tiles.ask() is ("amx_tile" in hardware.flags().split())
    assert tiles.ask() is tiles.ask()
