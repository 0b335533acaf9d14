"""Workloads, loads and memory regimes of the express lane's grid; nothing here depends on a scheduler.

Load 1 is what a full batch of those that fit decodes. `burst` is half of it with a third of all requests arriving at one
instant. The traces give a consecutive run of rows at a place that the seed chooses; outputs are divided by 2, prompts by 2 too
and those of Mooncake by 16, which keeps the shape and makes a run short. All other lengths are drawn; outputs have a mean
near 50 tokens and end at 1,024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log
from pathlib import Path
from random import Random

from benchmarks.common import Model, poisson
from coldstart.scheduling import IterationProfile
from coldstart.scheduling.simulate import SimSettings
from coldstart.scheduling.simulate.settings import CONTEXT_SHARE
from coldstart.traces import TraceRequest, read_trace

MODEL = Model("8B, keys shared by four", 8e9, 32, 1024, 1)
"""131 kB of KV a token, as in a bfloat16 model of 8e9 parameters with grouped heads, on one roofline GPU."""

LONGEST_PROMPT, LONGEST_OUTPUT, BLOCK_TOKENS = 2048, 1024, 16
LOADS = ("0.5", "0.7", "0.9", "1.1", "burst")
SLOTS = 32
REGIMES = {"slots bind": None, "KV binds 3x": 3, "KV binds 10x": 10, "nothing binds": None}
"""With what share of the KV of full slots the pool holds."""

PHASE = 500
"""Requests between two changes of the drifting lengths."""


@dataclass(frozen=True, slots=True)
class Regime:
    """The machine, the batch, and how many requests of a workload fit it."""

    machine: SimSettings
    batch: int
    fitting: int


def regime(name: str, rows: Sequence[TraceRequest]) -> Regime:
    """Twice as many slots of the model runner as requests in a batch: who pauses keeps its KV."""
    needs = [ceil((r.prompt_tokens + r.output_tokens) / BLOCK_TOKENS) for r in rows]
    held = _held(rows)
    common = {"block_tokens": BLOCK_TOKENS, "block_bytes": BLOCK_TOKENS * MODEL.kv_bytes_per_token}
    share = REGIMES[name]
    if share is None:
        batch = 16 if name == "slots bind" else 256
        return Regime(SimSettings(slots=2 * batch, **common), batch, min(batch, SLOTS))  # type: ignore[arg-type]
    blocks = max(max(needs) + 1, round(SLOTS * held / share))
    machine = SimSettings(slots=2 * SLOTS, device_blocks=blocks, **common)  # type: ignore[arg-type]
    return Regime(machine, SLOTS, max(1, min(SLOTS, round(blocks / held))))


def _held(rows: Sequence[TraceRequest]) -> float:
    """Blocks of a resident request, in the mean over time: the longer it stays the more it counts."""
    time_held = sum(
        r.output_tokens * ((r.prompt_tokens + r.output_tokens / 2) / BLOCK_TOKENS + 0.5) for r in rows
    )
    return time_held / sum(r.output_tokens for r in rows)


def capacity(rows: Sequence[TraceRequest], fitting: int, profile: IterationProfile) -> float:
    """Requests per second of a full batch of those that fit; a prefill rides on an iteration that decodes anyway."""
    held = _held(rows) * BLOCK_TOKENS
    decode_s = profile.decode(fitting) / fitting + CONTEXT_SHARE * profile.decode(1) * held
    each = (profile.prefill(r.prompt_tokens) - profile.shortest_s + r.output_tokens * decode_s for r in rows)
    return len(rows) / sum(each)


def arriving(
    rows: list[TraceRequest], load: str, fitting: int, profile: IterationProfile, seed: int, cv: float = 1.0
) -> list[TraceRequest]:
    """The same lengths with arrival times."""
    rate = capacity(rows, fitting, profile)
    if load != "burst":
        return list(poisson(rows, float(load) * rate, seed, cv))
    third = len(rows) // 3
    spread = list(poisson(rows[third:], rate / 2, seed, cv))
    at_s = spread[len(spread) // 4].arrival_s
    return sorted(
        [*spread, *(replace(row, arrival_s=at_s) for row in rows[:third])], key=lambda row: row.arrival_s
    )


Draw = Callable[[Random], float]
"""An output length in tokens."""


def _lognormal(median: float, sigma: float) -> Draw:
    return lambda random: random.lognormvariate(log(median), sigma)


def _bimodal(random: Random) -> float:
    return random.gauss(400, 30) if random.random() < 0.1 else random.gauss(8, 2)


DRAWN: dict[str, tuple[Draw, float]] = {
    "log-normal": (_lognormal(20, 1.4), 60),
    "Pareto": (lambda random: 15 * random.paretovariate(1.4), 60),
    "exponential": (lambda random: random.expovariate(1 / 50), 60),
    "uniform": (lambda random: random.uniform(1, 100), 60),
    "gamma, rising hazard": (lambda random: random.gammavariate(4, 12.5), 200),
    "constant": (lambda random: 50, 60),
    "bimodal": (_bimodal, 60),
    "bursts": (_lognormal(20, 1.4), 60),
    "long prompts": (lambda random: random.gammavariate(2, 8), 600),
}
"""Output lengths, and the median prompt."""

DRIFT: tuple[tuple[Draw, float], ...] = tuple(
    DRAWN[name] for name in ("log-normal", "gamma, rising hazard", "bimodal")
)
WORKLOADS = ("Azure conversation", "Mooncake conversation", *DRAWN, "drift")
HEAVY = {"log-normal": 1.5, "bimodal": 2.5}
"""What their mean is to gain at load 1.1 with KV binding."""


def lengths(workload: str, count: int, seed: int, traces: Path) -> list[TraceRequest]:
    """`count` requests without arrival times. Raises SystemExit where the trace is not there."""
    if workload == "Azure conversation":
        return _rows(traces / "azure_llm_2023_conv.csv", "azure-llm", count, seed, 2)
    if workload == "Mooncake conversation":
        return _rows(traces / "mooncake_fast25_conversation.jsonl", "mooncake", count, seed, 16)
    random = Random(f"{workload} {seed}")
    if workload == "drift":
        return [_drawn(random, *DRIFT[number // PHASE % len(DRIFT)]) for number in range(3 * PHASE)]
    return [_drawn(random, *DRAWN[workload]) for _ in range(count)]


def cv(workload: str) -> float:
    """Coefficient of variation of the gaps between arrivals."""
    return 4.0 if workload == "bursts" else 1.0


def _drawn(random: Random, draw: Draw, median: float) -> TraceRequest:
    prompt = 60 if draw is DRAWN["constant"][0] else random.lognormvariate(log(median), 0.6)
    output = draw(random)
    return TraceRequest(
        0.0, max(1, min(LONGEST_PROMPT, round(prompt))), max(1, min(LONGEST_OUTPUT, round(output)))
    )


_READ: dict[Path, list[TraceRequest]] = {}


def _rows(path: Path, form: str, count: int, seed: int, share: int) -> list[TraceRequest]:
    if path not in _READ:
        if not path.is_file():
            raise SystemExit(f"{path} is not there: name the traces' folder with --traces")
        _READ[path] = list(read_trace(path, form))
    rows = _READ[path]
    first = Random(f"rows {seed}").randrange(len(rows) - count)
    return [
        TraceRequest(
            0.0,
            max(1, min(LONGEST_PROMPT, row.prompt_tokens // share)),
            max(1, min(LONGEST_OUTPUT, row.output_tokens // 2)),
        )
        for row in rows[first : first + count]
    ]
