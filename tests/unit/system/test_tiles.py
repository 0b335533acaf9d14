"""Permission of the kernel to use AMX tiles agrees with the features of the processor."""

from __future__ import annotations

from coldstart.system.devices import hardware
from coldstart.system.proc import fork_state


def test_permission_is_granted_when_the_processor_has_amx_tiles() -> None:
    assert fork_state.request_tiles() is ("amx_tile" in hardware.flags().split())
    assert fork_state.request_tiles() is fork_state.request_tiles()
