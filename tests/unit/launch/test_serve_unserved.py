"""Flags without an effect are reported with a reason; flags with an effect are not."""

from __future__ import annotations

import pytest

from coldstart.contract.arguments import Arguments
from coldstart.launch import planning


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--api-server-count", "2"], ["--api-server-count"]),
        (["-asc", "4", "--grpc-port", "9000"], ["--api-server-count", "--grpc-port"]),
        (["--grpc"], ["--grpc"]),
        (["--api-server-count", "1", "--no-grpc", "--seed", "3"], []),
        (["--api-server-count=0"], []),
        ([], []),
    ],
)
def test_ignored_flags_are_named(words: list[str], named: list[str]) -> None:
    said = planning.list_unserved(Arguments(words))
    assert [line.reason.split()[0] for line in said] == named
    assert all(line.stage == "server" and "has no effect: " in line.reason for line in said)
