"""Memory accounts: reservations fit the capacity; measurements are recorded even if they exceed it."""

from __future__ import annotations

import pytest

from coldstart.host.memory_accounts import MemoryAccount


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
