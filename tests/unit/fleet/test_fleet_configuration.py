"""The fleet file, plans made from it, and errors about invalid files."""

import copy
from math import inf
from pathlib import Path
from typing import Any

import pytest

from coldstart.errors import UsageError
from coldstart.fleet import specification
from coldstart.fleet.specification import FleetSettings, Overlap

GOOD: dict[str, Any] = {
    "window_s": 2,
    "servers": {
        "a": {"count": 2, "devices": 4, "memory": "24GB", "network": "2GB", "load": "12GB"},
        "b": {"devices": 3, "memory": "32GB", "network": 10**9, "load": "12GB"},
    },
    "models": {
        "small": {"size": "12GB", "memory": "16GB", "container_s": 2, "prefill_s": 1, "ttft_s": 10},
        "many": {
            "count": 3,
            "size": "24GB",
            "memory": "30GB",
            "overlap": "sequential",
            "least": 1,
            "held_twice": 1,
        },
    },
}


HINTS = {
    "batch 1.5": "use a value such as 4",
    "count 0": "use a positive integer, such as `count = 2`",
    "memory 24 apples": "use a number of bytes, or a size such as 14GiB",
    "overlap most": "use a value such as sequential or full",
}


def test_a_file_is_read() -> None:
    found = specification.parse(GOOD)
    assert [server.name for server in found.servers] == ["a-0", "a-1", "b"]
    assert found.servers[2].network == 10**9
    assert [model.name for model in found.models] == ["small", "many-0", "many-1", "many-2"]
    small, many = found.models[:2]
    assert (small.size, small.costs.container_s, small.ttft_s, small.tpot_s) == (12 * 10**9, 2.0, 10.0, inf)
    assert many.costs.overlap is Overlap.SEQUENTIAL and many.least == 1
    assert found.settings.window_s == 2.0 and (small.held_twice, many.held_twice) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("placement",), "pipeline", "unknown key placement"),
        (("models", "small", "held_twice"), 2, "`held_twice` must be between 0 and 1, found 2"),
        (("most_ranks",), 0, "most_ranks"),
        (("retries",), True, "retries"),
        (("colour",), 1, "unknown key colour"),
        (("servers",), {}, r"no servers are defined: at least one table \[servers.NAME\] is required"),
        (("models",), {"x": 3}, r"no models are defined: at least one table \[models.NAME\] is required"),
        (("servers", "a", "memory"), "24 apples", r"servers\.a\.memory: invalid size"),
        (("servers", "a", "count"), 0, "count: expected an integer of 1 or more, found 0"),
        (("servers", "a", "network"), 0, "above 0"),
        (("models", "small", "size"), "17GB", r"above 0 and at most `memory` \(.* bytes\), found 17"),
        (("models", "small", "memory"), "40GB", "largest device"),
        (("models", "small", "container_s"), -1, "container_s"),
        (("models", "small", "overlap"), "most", "overlap"),
        (("models", "small", "shares"), 1, "unknown key shares"),
        (("models", "small", "batch"), 0, "batch"),
        (("models", "small", "batch"), 1.5, "batch"),
    ],
)
def test_a_bad_member_is_named(path: tuple[str, ...], value: object, said: str) -> None:
    table = copy.deepcopy(GOOD)
    place = table
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(UsageError, match=said) as raised:
        specification.parse(table)
    assert raised.value.hint == HINTS.get(f"{path[-1]} {value}", raised.value.hint)


def test_load_reports_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        specification.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[")
    with pytest.raises(UsageError, match=r"cannot parse the fleet file .* as TOML"):
        specification.load(tmp_path / "bad.toml")
    (tmp_path / "other.toml").write_text("colour = 1")
    with pytest.raises(UsageError, match=r"other\.toml: no servers"):
        specification.load(tmp_path / "other.toml")


def test_settings_of_a_caller_have_the_ranges_of_the_file() -> None:
    with pytest.raises(UsageError, match=r"window_s must be at least 0, found -1\.0"):
        FleetSettings(window_s=-1.0)
