"""Build the requests of a replay: read a trace, and change its arrivals, models, lengths or duration.

Invariant: the same options and seed give the same requests in a live replay and in every simulation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, count, islice, takewhile
from math import inf
from pathlib import Path
from random import Random

from coldstart.errors import UsageError
from coldstart.fleet.specification import Costs
from coldstart.lab.records import SimulatedRequest
from coldstart.lab.traces import Columns, TraceReport, TraceRequest, read_trace
from coldstart.scheduling.declaration import list_settings, setting
from coldstart.scheduling.profile import IterationProfile

HASH_TOKENS = 512
"""Tokens per hash id of a Mooncake trace."""
LOWEST_TOKEN = 10
"""Lowest token id in prompts; lower ids are often special tokens."""
MODEL_MAPPINGS = ("round-robin", "zipf", "column")


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Options for reading and transforming a trace. `rate` replaces the arrival times of the trace.

    Raises ValueError for a value that is out of range.
    """

    path: Path
    columns: str | None = setting(
        None,
        "Column names of a custom CSV format: time=C,prompt=C,output=C[,model=C][,unit=s|ms|us].",
        "--columns",
    )
    speedup: float = setting(
        1.0, "Factor by which the replay is faster than the trace.", "--speedup", exclusive_minimum=0
    )
    duration_s: float | None = setting(
        None,
        "Replay only the first SECONDS of the trace; default: the full trace.",
        "--duration",
        exclusive_minimum=0,
    )
    limit: int | None = setting(
        None, "Maximum number of requests to replay; default: no limit.", "--limit", minimum=1
    )
    rate: float | None = setting(
        None,
        "Replace the recorded arrivals with this many arrivals per second, with gamma-distributed gaps; default: as recorded.",
        "--rate",
        exclusive_minimum=0,
    )
    cv: float = setting(
        1.0,
        "Coefficient of variation of the arrival gaps with --rate; 1 gives Poisson arrivals.",
        "--cv",
        "CV",
        exclusive_minimum=0,
    )
    seed: int = setting(0, "Random seed for arrivals, models and prompts.", "--seed", "N")
    models: str | None = setting(
        None, "Comma-separated models to assign requests to; default: the models of the trace.", "--models"
    )
    mapping: str = setting(
        "round-robin",
        "How to assign requests to models: round-robin, zipf, or column (by the trace's model column).",
        "--model-mapping",
        choices=MODEL_MAPPINGS,
    )
    max_prompt: int | None = setting(
        None, "Truncate prompts to this many tokens; default: no limit.", "--max-prompt", minimum=1
    )
    max_output: int | None = setting(
        None, "Limit outputs to this many tokens; default: no limit.", "--max-output", minimum=1
    )

    rounds: int = setting(
        1,
        "Number of replays per system; systems take turns, and each round uses a new seed.",
        "--rounds",
        minimum=1,
    )

    def __post_init__(self) -> None:
        for name, one in list_settings(self):
            one.require_valid(name, getattr(self, name))
        if self.models is not None and not all(name.strip() for name in self.models.split(",")):
            raise ValueError(f"--models {self.models!r} contains an empty name")

    @property
    def model_names(self) -> list[str]:
        """Return the models to which requests are assigned, or an empty list if each request keeps its own model."""
        return self.models.split(",") if self.models else []

    def with_models(self, model_names: Sequence[str], file: Path) -> TracePlan:
        """Return this plan with the models to simulate: those of the plan, or else all models of the configuration `file`.

        Raises UsageError if the plan lists a model that is not in `model_names`.
        """
        if unknown := sorted(set(self.model_names) - set(model_names)):
            raise UsageError(
                f"the configuration {file} lacks these models: {', '.join(unknown)}",
                hint=f"use --models with some of {','.join(model_names)}",
            )
        return replace(self, models=self.models or ",".join(model_names))

    def read(self, report: TraceReport) -> list[TraceRequest]:
        """Read the trace unchanged. Raises UsageError under the same conditions as `read_trace`."""
        return read_trace(
            self.path,
            columns=Columns.parse(self.columns) if self.columns else None,
            report=report,
            until_s=self.duration_s * self.speedup if self.duration_s and self.rate is None else inf,
            limit=self.limit,
        )

    def transform(self, trace: Iterable[TraceRequest]) -> list[TraceRequest]:
        """Apply the plan's arrivals, duration, models and length limits to a trace, and return it in order of arrival."""
        rows = trace if self.rate is None else replace_arrivals(trace, self.rate, self.cv, self.seed)
        rows = [replace(row, arrival_s=row.arrival_s / self.speedup) for row in rows]
        if (end := self.duration_s) is not None:
            rows = list(takewhile(lambda row: row.arrival_s <= end, rows))
        return [
            replace(
                row,
                prompt_tokens=min(row.prompt_tokens, self.max_prompt or row.prompt_tokens),
                output_tokens=min(row.output_tokens, self.max_output or row.output_tokens),
            )
            for row in assign_models(rows[: self.limit], self.model_names, self.mapping, self.seed)
        ]


def estimate_times(
    rows: Iterable[TraceRequest], profile: IterationProfile | None, costs: Mapping[str, Costs]
) -> Iterator[SimulatedRequest]:
    """Yield requests with their prefill and decode times at batch size 1, from `profile` or from each model's costs."""
    for row in rows:
        name = str(row.model)
        if profile is None:
            prefill, decode = costs[name].prefill_s, costs[name].decode_s
        else:
            prefill, decode = profile.prefill(row.prompt_tokens), profile.decode(1)
        yield SimulatedRequest(row.arrival_s, name, prefill, decode, row.output_tokens, row.prompt_tokens)


def generate_gamma_gaps(rate: float, cv: float, random: Random) -> Iterator[float]:
    """Yield gamma-distributed gaps in seconds forever, with shape 1/cv^2 and mean 1/rate; a cv of 1 is a Poisson process."""
    shape = 1 / cv**2
    while True:
        yield random.gammavariate(shape, 1 / (rate * shape))


def replace_arrivals(
    rows: Iterable[TraceRequest], rate: float, cv: float, seed: int
) -> Iterator[TraceRequest]:
    """Yield the requests with new arrival times: `rate` per second, with gamma-distributed gaps of variation `cv`."""
    times = accumulate(generate_gamma_gaps(rate, cv, Random(seed)))
    return (replace(row, arrival_s=time) for row, time in zip(rows, times, strict=False))


def assign_models(
    rows: Iterable[TraceRequest], models: Sequence[str], mapping: str, seed: int
) -> Iterable[TraceRequest]:
    """Assign one of `models` to each row: round-robin, by Zipf's law (1 / rank), or by the model column of the trace.

    'column' maps the trace's names to `models` in order of appearance, and wraps around after the last model.
    """
    if not models:
        return rows
    if mapping == "column":
        assigned: dict[str | None, str] = {}
        return (
            replace(row, model=assigned.setdefault(row.model, models[len(assigned) % len(models)]))
            for row in rows
        )
    chosen = _draw_zipf(models, seed) if mapping == "zipf" else (models[i % len(models)] for i in count())
    return (replace(row, model=model) for row, model in zip(rows, chosen, strict=False))


def _draw_zipf(models: Sequence[str], seed: int) -> Iterator[str]:
    weights, random = list(accumulate(1 / rank for rank in range(1, len(models) + 1))), Random(seed)
    while True:
        yield random.choices(models, cum_weights=weights)[0]


def generate_prompt(row: TraceRequest, number: int, seed: int, vocabulary: int) -> list[int]:
    """Generate the prompt of a row as token IDs below `vocabulary`. Rows without hash IDs share no prefix."""
    blocks = chain(
        row.hash_ids, (-1 - number * 7919 - i for i in range(row.prompt_tokens // HASH_TOKENS + 1))
    )
    return list(
        islice(
            chain.from_iterable(_generate_block(block, seed, vocabulary) for block in blocks),
            row.prompt_tokens,
        )
    )


def _generate_block(block: int, seed: int, vocabulary: int) -> Iterator[int]:
    start, step = (block * 2654435761 + seed * 40503) & 0xFFFFFFFF, (block * 97 + 31) | 1
    span = vocabulary - LOWEST_TOKEN
    return (LOWEST_TOKEN + (start + i * step) % span for i in range(HASH_TOKENS))
