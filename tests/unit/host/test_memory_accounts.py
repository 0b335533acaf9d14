"""Memory accounts: reservations fit the capacity; measurements are recorded even if they exceed it."""

from __future__ import annotations

import pytest

from coldstart.host.memory_accounts import DeviceMemory, MemoryAccount


def test_reserve_rejects_a_model_when_the_free_bytes_do_not_suffice() -> None:
    account = MemoryAccount(10)
    account.reserve("a", 6)
    with pytest.raises(ValueError, match="b needs 5 bytes, 4 are free"):
        account.reserve("b", 5)
    account.reserve("a", 10)
    assert (account.reserved("a"), account.reserved("b"), account.free()) == (10, 0, 0)


def test_record_exceeds_the_capacity_when_a_model_was_measured_larger() -> None:
    account = MemoryAccount(10)
    account.reserve("a", 6)
    account.record("a", 12)
    assert (account.used, account.free()) == (12, -2)
    account.record("a", 0)
    assert (account.used, account.reserved("a")) == (0, 0)


def test_devices_hold_an_equal_share_of_each_model_that_is_placed_on_them() -> None:
    account = DeviceMemory(100, 10)
    account.place("both", (0, 1))
    account.reserve("both", 15)
    assert [account.account(place).used for place in account.list_places()] == [15, 8, 8]
    account.place("second", (1,))
    with pytest.raises(ValueError, match="second needs 3 bytes of device 1, 2 are free"):
        account.reserve("second", 3)
    assert account.reserved("second") == 0
    account.record("second", 3)
    assert account.account(1).free() == -1


def test_devices_of_a_model_change_only_while_it_holds_nothing() -> None:
    account = DeviceMemory(100, 10)
    account.place("a", (0,))
    account.reserve("a", 6)
    account.place("a", (1,))
    account.record("a", 0)
    assert account.account(0).used == 0
    account.place("a", (1,))
    account.reserve("a", 6)
    assert (account.account(0).used, account.account(1).used) == (0, 6)
