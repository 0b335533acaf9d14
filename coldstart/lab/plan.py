"""Requests of a replay from its options: a trace with other arrivals, models, lengths or duration.

Invariant: the same options and seed give the same requests in a live replay and in each simulation.
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
from coldstart.lab.records import ModelRequest
from coldstart.lab.traces import Columns, TraceReport, TraceRequest, read_trace
from coldstart.scheduling.declaration import list_settings, setting
from coldstart.scheduling.profile import IterationProfile

HASH_TOKENS = 512
"""Number of tokens for each hash id of a Mooncake trace."""
LOWEST_TOKEN = 10
"""Lowest token id in prompts; tokenizers have their special tokens below."""
MODEL_MAPPINGS = ("round-robin", "zipf", "column")


@dataclass(frozen=True, slots=True)
class TracePlan:
    """Options for reading and transforming a trace; `rate` replaces its arrival times.

    Raises ValueError for a value out of range.
    """

    path: Path
    columns: str | None = setting(
        None,
        "Columns of a CSV file of another format than the known ones: time=C,prompt=C,output=C[,model=C][,unit=s|ms|us].",
        "--columns",
    )
    on_bad_row: str = setting(
        "skip", "Action on an invalid row: skip or refuse.", "--on-bad-row", choices=("skip", "refuse")
    )
    speedup: float = setting(1.0, "Factor by which arrivals are accelerated.", "--speedup", above=0)
    duration_s: float | None = setting(
        None, "Number of seconds to replay; default: all.", "--duration", above=0
    )
    limit: int | None = setting(None, "Number of requests to replay; default: all.", "--limit", least=1)
    rate: float | None = setting(
        None, "Arrivals per second with gamma-distributed gaps; default: as in the trace.", "--rate", above=0
    )
    cv: float = setting(
        1.0,
        "Coefficient of variation of the gaps between arrivals of --rate; 1 is Poisson.",
        "--cv",
        "CV",
        above=0,
    )
    seed: int = setting(0, "Random seed of arrivals, models and prompts.", "--seed", "N")
    models: str | None = setting(
        None, "Models, separated by commas, to which the requests of the trace are assigned.", "--models"
    )
    mapping: str = setting(
        "round-robin",
        "Assignment of rows to models: round-robin, zipf or column.",
        "--model-mapping",
        choices=MODEL_MAPPINGS,
    )
    max_prompt: int | None = setting(
        None, "Maximum number of prompt tokens; default: no limit.", "--max-prompt", least=1
    )
    max_output: int | None = setting(
        None, "Maximum number of output tokens; default: no limit.", "--max-output", least=1
    )

    rounds: int = setting(
        1,
        "Number of replays on each server or simulation, which take turns; each round has another seed.",
        "--rounds",
        least=1,
    )

    def __post_init__(self) -> None:
        for name, one in list_settings(self):
            one.require(name, getattr(self, name))
        if self.models is not None and not all(name.strip() for name in self.models.split(",")):
            raise ValueError(f"--models {self.models!r} contains an empty name")

    @property
    def names(self) -> list[str]:
        """Return the models to which rows are assigned; empty if each row retains its own."""
        return self.models.split(",") if self.models else []

    def over(self, names: Sequence[str], file: Path) -> TracePlan:
        """Return this plan with the models of `file`: all of them if the plan names none.

        Raises UsageError for an unknown model.
        """
        if unknown := sorted(set(self.names) - set(names)):
            raise UsageError(
                f"{file} contains no model {', '.join(unknown)}", hint=f"its models: {', '.join(names)}"
            )
        return replace(self, models=self.models or ",".join(names))

    def read(self, report: TraceReport) -> list[TraceRequest]:
        """Return the requests of the trace as they are. Raises TraceError."""
        return read_trace(
            self.path,
            columns=Columns.parse(self.columns) if self.columns else None,
            strict=self.on_bad_row == "refuse",
            report=report,
            until_s=self.duration_s * self.speedup if self.duration_s and self.rate is None else inf,
            limit=self.limit,
        )

    def arrange(self, trace: Iterable[TraceRequest]) -> list[TraceRequest]:
        """Return the requests of a trace with the plan's arrivals, duration, models and lengths, in order of arrival."""
        rows = trace if self.rate is None else rearrive(trace, self.rate, self.cv, self.seed)
        rows = [replace(row, arrival_s=row.arrival_s / self.speedup) for row in rows]
        if (end := self.duration_s) is not None:
            rows = list(takewhile(lambda row: row.arrival_s <= end, rows))
        return [
            replace(
                row,
                prompt_tokens=min(row.prompt_tokens, self.max_prompt or row.prompt_tokens),
                output_tokens=min(row.output_tokens, self.max_output or row.output_tokens),
            )
            for row in map_models(rows[: self.limit], self.names, self.mapping, self.seed)
        ]


def time_requests(
    rows: Iterable[TraceRequest], profile: IterationProfile | None, costs: Mapping[str, Costs]
) -> Iterator[ModelRequest]:
    """Yield the rows with the times of a batch of one, from one profile of iteration times, or from each model's costs."""
    for row in rows:
        name = str(row.model)
        if profile is None:
            prefill, decode = costs[name].prefill_s, costs[name].decode_s
        else:
            prefill, decode = profile.prefill(row.prompt_tokens), profile.decode(1)
        yield ModelRequest(row.arrival_s, name, prefill, decode, row.output_tokens, row.prompt_tokens)


def gamma_gaps(rate: float, cv: float, random: Random) -> Iterator[float]:
    """Yield endless gaps in seconds, with shape 1/CV^2 and mean 1/rate, both above 0; CV 1 is the Poisson process."""
    shape = 1 / cv**2
    while True:
        yield random.gammavariate(shape, 1 / (rate * shape))


def rearrive(rows: Iterable[TraceRequest], rate: float, cv: float, seed: int) -> Iterator[TraceRequest]:
    """Yield the same requests with the arrivals of a gamma process of `rate` per second instead of their own times."""
    times = accumulate(gamma_gaps(rate, cv, Random(seed)))
    return (replace(row, arrival_s=time) for row, time in zip(rows, times, strict=False))


def map_models(
    rows: Iterable[TraceRequest], models: Sequence[str], mapping: str, seed: int
) -> Iterable[TraceRequest]:
    """Assign one of `models` to each row: in turn, by Zipf's law (1 / rank), or by the values of the model column.

    'column' assigns the trace's names to `models` in order of appearance, and starts over after the last model.
    """
    if not models:
        return rows
    if mapping == "column":
        assigned: dict[str | None, str] = {}
        return (
            replace(row, model=assigned.setdefault(row.model, models[len(assigned) % len(models)]))
            for row in rows
        )
    chosen = _draw(models, seed) if mapping == "zipf" else (models[i % len(models)] for i in count())
    return (replace(row, model=model) for row, model in zip(rows, chosen, strict=False))


def _draw(models: Sequence[str], seed: int) -> Iterator[str]:
    weights, random = list(accumulate(1 / rank for rank in range(1, len(models) + 1))), Random(seed)
    while True:
        yield random.choices(models, cum_weights=weights)[0]


def prompt_tokens(row: TraceRequest, number: int, seed: int, vocabulary: int) -> list[int]:
    """Return the row's number of token ids below `vocabulary`; a row without hash ids shares no prefix."""
    blocks = chain(
        row.hash_ids, (-1 - number * 7919 - i for i in range(row.prompt_tokens // HASH_TOKENS + 1))
    )
    return list(
        islice(chain.from_iterable(_block(block, seed, vocabulary) for block in blocks), row.prompt_tokens)
    )


def _block(block: int, seed: int, vocabulary: int) -> Iterator[int]:
    start, step = (block * 2654435761 + seed * 40503) & 0xFFFFFFFF, (block * 97 + 31) | 1
    span = vocabulary - LOWEST_TOKEN
    return (LOWEST_TOKEN + (start + i * step) % span for i in range(HASH_TOKENS))
