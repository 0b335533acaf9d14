"""Specification of a fleet, its servers, models and settings, and the TOML file that describes them.

most_ranks = 4                # every field of FleetSettings is allowed here

[servers.a10]
count = 2                     # servers a10-0 and a10-1; without `count`, one server a10
devices = 4
memory = "24GB"               # of each device
network = "6.7GB"             # per second, shared by all starts on the server
load = "12GB"                 # per second, from host memory to a device

[models.llama2-7b]            # every field of FleetModel and Costs is allowed here, and `count`
size = "13.5GB"
memory = "18GB"
container_s = 2.0
library_s = 4.0
prefill_s = 0.5
decode_s = 0.04
ttft_s = 7.5                  # optional limits
tpot_s = 0.2

Invariant: an accepted file describes a fleet that can be simulated, and every error names the file and the key. A valid model
can be started on some sufficiently large server; values are in bytes and seconds.
"""

# ruff: noqa: RUF009 - `setting` returns a dataclass field
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from math import ceil, inf
from pathlib import Path
from typing import Any

from coldstart.errors import UsageError
from coldstart.host.specification import HELD_HELP, GatewaySettings
from coldstart.host.tables import Rate, Seconds, Size, check_ranges, decode, prefix_errors, read_toml
from coldstart.scheduling.declaration import setting
from coldstart.units import format_memory

MOST_RANKS = 4


class Overlap(StrEnum):
    """Timing of the phases of a cold start: concurrent with the weight fetch (FULL), or one after another (SEQUENTIAL)."""

    SEQUENTIAL = "sequential"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured times of a model in seconds.

    Per rank: starting the container (t_cc), creating the device context (t_cu), loading libraries (t_l), joining the group
    (t_j) and one hop (t_n). On a full device: prefill (t_p) and one decode iteration (t_d).
    """

    container_s: Seconds = 0.0
    context_s: Seconds = 0.0
    library_s: Seconds = 0.0
    join_s: Seconds = 0.0
    hop_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    overlap: Overlap = Overlap.FULL

    @property
    def runtime_s(self) -> float:
        """Return the seconds that a start takes before it can load weights."""
        return self.container_s + self.context_s + self.library_s


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """Server of a fleet: `devices` GPUs with `memory` bytes each, and its bandwidths in bytes per second."""

    name: str
    memory: Size = setting(
        MISSING,
        "Memory for models on each GPU of this machine, such as 60GiB.",
        "--memory",
        "SIZE",
        exclusive_minimum=0,
    )
    network: Rate = setting(
        1e9,
        "Network bandwidth of this machine in bytes per second; default: 1GB.",
        "--network",
        "SIZE",
        exclusive_minimum=0,
    )
    load: Rate = setting(
        10e9,
        "Bandwidth from CPU memory to a GPU of this machine, in bytes per second; default: 10GB.",
        "--load",
        "SIZE",
        exclusive_minimum=0,
    )
    devices: int = setting(
        1, "Number of GPUs of this machine that the fleet may use.", "--devices", "N", minimum=1
    )

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class FleetModel:
    """A model with `size` bytes of weights that needs `memory` bytes on a device and has `least` to `most` workers.

    A worker serves up to `batch` concurrent requests, and stops after `idle_s` seconds without a request. If known, `shares`
    maps each number of ranks to the weight bytes of each rank; otherwise ranks are equal. `recorded` maps each number of
    ranks to the seconds from loaded weights to ready, measured in the start that verified the bundle; `joins` contains the
    same times of the fleet's own starts. `joins` takes precedence over `recorded`, and both over `join_s` of the costs.
    `unavailable` maps each number of ranks that cannot start to the reason. While the full worker replaces a rank, the
    device also holds the fraction `held_twice` (0 to 1) of the rank's own memory, which is its weights and its KV cache. It
    is 0 in the ParaServe paper, which extends the rank itself, and for CPU engines, which share weights.
    """

    name: str
    size: Size
    memory: Size
    costs: Costs
    ttft_s: Seconds = inf
    tpot_s: Seconds = inf
    batch: int = 8
    least: int = 0
    most: int = 16
    idle_s: Seconds = 60.0
    shares: dict[int, tuple[int, ...]] = field(default_factory=dict)
    joins: dict[int, float] = field(default_factory=dict)
    recorded: dict[int, float] = field(default_factory=dict)
    unavailable: dict[int, str] = field(default_factory=dict)
    held_twice: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.size <= self.memory:
            raise UsageError(
                f"model {self.name}: `size` must be above 0 and at most `memory` ({self.memory} bytes), found {self.size} bytes"
            )
        if self.batch < 1 or not 0 <= self.least <= self.most or self.most < 1 or self.idle_s < 0:
            raise UsageError(
                f"model {self.name}: `batch` and `most` must be at least 1, `least` must be between 0 and `most`, "
                "and `idle_s` must be at least 0"
            )
        if not 0 <= self.held_twice <= 1:
            raise UsageError(
                f"model {self.name}: `held_twice` must be between 0 and 1, found {self.held_twice}"
            )
        for ranks, shares in self.shares.items():
            if len(shares) != ranks or min(shares) <= 0:
                raise UsageError(
                    f"model {self.name}: expected {ranks} positive weight sizes for {ranks} ranks, found {list(shares)}"
                )

    def group_costs(self, count: int) -> Costs:
        """Return the costs of a group of `count` ranks, with its measured or recorded join time if there is one."""
        seen = self.joins.get(count, self.recorded.get(count))
        return self.costs if seen is None else replace(self.costs, join_s=seen / count)

    def ranks(self, count: int) -> tuple[int, ...]:
        """Return the weight bytes of each rank in a group of `count` ranks."""
        if count in self.shares:
            return self.shares[count]
        return tuple(self.size * (r + 1) // count - self.size * r // count for r in range(count))

    def full_memory(self, count: int) -> int:
        """Return the device bytes of a full worker in a group of `count` ranks, including what its rank holds beside it."""
        return self.memory + (ceil(self.held_twice * self.part(count)) if count > 1 else 0)

    def part(self, count: int) -> int:
        """Return the device bytes of a worker for one of `count` ranks: its share of `memory`, but at least its weights."""
        return max(ceil(self.memory / count), *self.ranks(count))


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """Options of a deployment. Sizes are text such as 16GiB, and times are in seconds."""

    name: str | None = setting(None, "Model name in requests; default: MODEL.", "--name", "NAME")
    least: int = setting(0, "Minimum number of workers.", "--min", "N")
    most: int = setting(1, "Maximum number of workers.", "--max", "N")
    slo: str | None = setting(
        None,
        "Latency limits that a placement must meet, in seconds, such as ttft=2,tpot=0.1.",
        "--slo",
        "METRIC=S",
    )
    idle_s: float = setting(
        600.0, "Stop a worker after this many seconds without a request.", "--idle", "SECONDS"
    )
    batch: int = setting(64, "Maximum number of concurrent requests per worker.", "--batch", "N")
    memory: str | None = setting(
        None,
        "Memory of a worker, such as 16GiB; default: what the bundle records, on a GPU for --batch requests.",
        "--memory",
        "SIZE",
    )
    size: str | None = setting(
        None, "Size of the weights, such as 14GiB; default: size of the weight files.", "--size", "SIZE"
    )
    start_s: float | None = setting(
        None,
        "Duration of a start without loading weights, in seconds; default: as recorded in the bundle.",
        "--start",
        "SECONDS",
    )
    weights_from: str | None = setting(
        None,
        "Source from which servers without local weights fetch them: http(s)://..., s3://... or hf://REPO@REV.",
        "--weights-from",
        "SOURCE",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings(GatewaySettings):
    """Settings of a fleet. If `reclaim` is set, idle workers stop early when another model fits on no server."""

    most_ranks: int = setting(
        MOST_RANKS,
        "Maximum number of servers that start one model as a pipeline; 1 starts single workers only.",
        "--ranks",
        "N",
        minimum=1,
        maximum=MOST_RANKS,
    )
    window_s: Seconds = setting(1.0, "", minimum=0)
    consolidate: bool = setting(
        True,
        "Replace a pipeline with a single worker when that worker is ready, and move the streams to it.",
        "--consolidate/--no-consolidate",
    )
    reclaim: bool = True
    retries: int = setting(2, "", minimum=0)
    max_held: int = setting(1 << 20, HELD_HELP, "--max-held", "N", minimum=0)


def parse_slo(text: str, metrics: Sequence[str]) -> dict[str, float]:
    """Parse latency limits such as 'ttft=2,tpot=0.1' into seconds by metric. Raises UsageError if the text is invalid."""
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        name = name.strip()
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in metrics or not limits[name] > 0:
            raise UsageError(
                f"--slo {part!r}: expected METRIC=SECONDS with a time above 0 and a metric of {', '.join(metrics)}",
                hint="specify limits in seconds: --slo ttft=2,tpot=0.1",
            )
    return limits


@dataclass(frozen=True, slots=True)
class FleetFile:
    settings: FleetSettings
    servers: tuple[ServerSpec, ...]
    models: tuple[FleetModel, ...]


def load(path: Path) -> FleetFile:
    """Load a fleet file. Raises UsageError if it cannot be read or is not a valid fleet configuration."""
    table = read_toml(path, "fleet")
    with prefix_errors(f"fleet file {path}"):
        return parse(table)


def parse(table: Mapping[str, Any]) -> FleetFile:
    """Parse the content of a fleet file. Raises UsageError if it is not a valid fleet configuration."""
    top = dict(table)
    servers, models = (_tables(top.pop(kind, {}), kind) for kind in ("servers", "models"))
    settings = decode(FleetSettings, top)
    found = FleetFile(
        settings,
        tuple(server for name, given in servers.items() for server in _servers(name, given)),
        tuple(model for name, given in models.items() for model in _models(name, given)),
    )
    _fits(found)
    return found


def _tables(given: Any, kind: str) -> dict[str, dict[str, Any]]:
    if not isinstance(given, dict) or not given or not all(isinstance(one, dict) for one in given.values()):
        raise UsageError(
            f"no {kind} are defined: at least one table [{kind}.NAME] is required",
            hint=f"add a table [{kind}.NAME] with its settings",
        )
    return given


def _servers(name: str, given: dict[str, Any]) -> Iterator[ServerSpec]:
    place, table = f"servers.{name}", dict(given)
    for one in _names(place, name, table.pop("count", None)):
        yield decode(ServerSpec, table, place, name=one)


def _models(name: str, given: dict[str, Any]) -> Iterator[FleetModel]:
    place, table = f"models.{name}", dict(given)
    names = _names(place, name, table.pop("count", None))
    own = {field.name for field in fields(Costs)}
    costs = decode(Costs, {key: table.pop(key) for key in own & table.keys()}, place)
    for one in names:
        yield decode(FleetModel, table, place, name=one, costs=costs, **{member: {} for member in _OBSERVED})


# Fields of FleetModel that a file cannot set.
_OBSERVED = ("shares", "joins", "recorded", "unavailable")


def _names(place: str, name: str, count: object) -> list[str]:
    if count is None:
        return [name]
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UsageError(
            f"{place}.count: expected an integer of 1 or more, found {count!r}",
            hint="use a positive integer, such as `count = 2`",
        )
    return [f"{name}-{number}" for number in range(count)]


def _fits(file: FleetFile) -> None:
    largest = max(server.memory for server in file.servers)
    for model in file.models:
        if model.memory > largest:
            hint = "add a server with a larger device, because a worker cannot span devices"
            raise UsageError(
                f"models.{model.name} needs {format_memory(model.memory)}, but the largest device has {format_memory(largest)}",
                hint=hint,
            )
