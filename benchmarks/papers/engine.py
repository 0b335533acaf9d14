"""Iteration-level simulator of FastServe's engine (section 4), which drives the server's own policy objects.

The simulator in coldstart/lab runs vLLM's scheduler, which takes ten times as long and copies KV to the host before it is
evicted. This one has the paper's three strategies: recompute drops the KV of an evicted job; reactive copies it in the
iteration, which waits; proactive copies it beside iterations, and a job is ready when its copy has arrived.

docs/explanation/fastserve.md describes the profiles, which are roofline models, and the lengths of the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import inf, log, sqrt
from random import Random
from statistics import fmean
from typing import cast

from pandas import read_csv

from benchmarks.common import HERE
from coldstart.lab.plan import generate_gamma_gaps
from coldstart.scheduling.job import Job
from coldstart.scheduling.mlfq import SkipJoinMlfq
from coldstart.scheduling.profile import IterationProfile
from coldstart.scheduling.settings import SchedulerSettings

BANDWIDTH, FLOPS = 1.555e12 * 0.6, 312e12 * 0.5
OVERHEAD_S, LINK, GIB = 2e-3, 20e9, 1 << 30
Sizes = list[tuple[int, int]]
"""Prompt and output tokens of each request."""
LONGEST = 2048
"""Positions of OPT."""


@dataclass(frozen=True, slots=True)
class Model:
    """Table 1: parameters, layers, hidden size; and the GPUs it is served on."""

    name: str
    parameters: float
    layers: int
    hidden: int
    gpus: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Return 4 * l * h bytes, in FP16 (section 4.2)."""
        return 4 * self.layers * self.hidden

    @property
    def kv_tokens(self) -> int:
        """Return the tokens whose KV fits beside the weights and a tenth for activations."""
        return int((0.9 * 40 * GIB * self.gpus - 2 * self.parameters) / self.kv_bytes_per_token)

    def profile(self) -> IterationProfile:
        floor = 2 * self.parameters / (BANDWIDTH * self.gpus) + OVERHEAD_S
        each = 2 * self.parameters / (FLOPS * self.gpus)
        prefill = [(n, max(floor, OVERHEAD_S + n * each)) for n in (1, 64, 128, 256, 512, 1024, 2048, 4096)]
        decode = [(b, max(floor, OVERHEAD_S + b * each) + 2e-5 * b) for b in (1, 8, 32, 128, 256)]
        return IterationProfile.create(prefill, decode)


OPT_2_7B = Model("OPT-2.7B", 2.7e9, 32, 2560, 1)
OPT_13B = Model("OPT-13B", 13e9, 40, 5120, 1)
OPT_66B = Model("OPT-66B", 66e9, 64, 9216, 4)
OPT_175B = Model("OPT-175B", 175e9, 96, 12288, 16)


class Ranked:
    """Live jobs in order of a key; equal keys are in order of arrival."""

    def __init__(self, key: Callable[[Job], float]) -> None:
        self._key = key
        self._jobs: dict[str, Job] = {}

    def add(self, job: Job, now: float) -> None:
        self._jobs[job.id] = job

    def remove(self, job: Job) -> None:
        del self._jobs[job.id]

    def __iter__(self) -> Iterator[Job]:
        return iter(sorted(self._jobs.values(), key=self._key))

    def __len__(self) -> int:
        return len(self._jobs)

    def add_service(self, job: Job, seconds: float, now: float) -> None:
        job.level_service_s += seconds

    def promote_starved_jobs(self, now: float, batch: int) -> None:
        """Do nothing: the order has no clock."""

    def enst(self, now: float, batch: int) -> Callable[[Job], float]:
        """Return the rank of a job over B."""
        ranks = {id(job): rank for rank, job in enumerate(self)}
        return lambda job: ranks[id(job)] / batch


class NaiveMlfq(SkipJoinMlfq):
    """Queues without skip-join: each job joins Q1 and moves down one level at a time."""

    def compute_first_level(self, job: Job) -> int:
        return 0


Policy = Ranked | SkipJoinMlfq
Order = Callable[[IterationProfile], Policy]


def fcfs(profile: IterationProfile) -> Policy:
    return Ranked(lambda job: 0.0)


def fixed_priority(profile: IterationProfile) -> Policy:
    return Ranked(lambda job: profile.prefill(job.prompt_tokens))


def mlfq(alpha_s: float = 0.3, form: str = "paper", kind: type[SkipJoinMlfq] = SkipJoinMlfq) -> Order:
    """Return a maker of queues of the server; "paper" is FastServe's published form."""
    settings = SchedulerSettings(alpha_s=alpha_s, mlfq=form)  # type: ignore[arg-type]
    return lambda profile: kind(profile, settings)


@dataclass(slots=True, eq=False)
class Request(Job):
    """One request of a run, in seconds; `running_s` is the time in iterations, `swapping_s` the wait for a copy.

    Of an evicted request `stored` tokens of KV are on the host; those that are loaded arrive at `loaded_s`.
    """

    output: int = 0
    first_s: float = 0.0
    end_s: float = 0.0
    running_s: float = 0.0
    swapping_s: float = 0.0
    evictions: int = 0
    stored: int = 0
    loaded_s: float = 0.0

    @property
    def latency_s(self) -> float:
        return self.end_s - self.arrival_s

    @property
    def per_token_s(self) -> float:
        """Return end-to-end latency over output length (section 6.1)."""
        return self.latency_s / self.output


@dataclass
class Engine:
    """One run of an engine with a batch of at most `batch` requests.

    `whole`: a batch runs until its last request ends, as FasterTransformer's does. `peak` is the most KV tokens held.
    """

    model: Model
    order: Order
    batch: int
    strategy: str = "proactive"
    kv_tokens: float | None = None
    whole: bool = False

    def __post_init__(self) -> None:
        self.profile = self.model.profile()
        self.policy = self.order(self.profile)
        self.capacity = self.model.kv_tokens if self.kv_tokens is None else self.kv_tokens
        self.copy_s = self.model.kv_bytes_per_token / (LINK * self.model.gpus)
        self.context_s = self.model.kv_bytes_per_token / (BANDWIDTH * self.model.gpus)
        self.held = self.peak = 0
        self._on_device: dict[str, Request] = {}
        self._link_free = self._now = self._blocked_s = 0.0
        self._members: list[Request] = []

    def run(self, requests: Sequence[tuple[float, int, int]]) -> list[Request]:
        """Serve (arrival in seconds, prompt, output) in order of arrival, and return them."""
        served = [
            Request(str(number), arrival_s, prompt, output=output)
            for number, (arrival_s, prompt, output) in enumerate(requests)
        ]
        place = 0
        while place < len(served) or len(self.policy):
            if not len(self.policy):
                self._now = max(self._now, served[place].arrival_s)
            while place < len(served) and served[place].arrival_s <= self._now:
                self.policy.add(served[place], self._now)
                place += 1
            self._step(served[place].arrival_s if place < len(served) else inf)
        return served

    def _step(self, following: float) -> None:
        self.policy.promote_starved_jobs(self._now, self.batch)
        chosen = self._choose()
        self._make_room(chosen)
        ready = [job for job in chosen if job.loaded_s <= self._now]
        if not ready:
            self._now = min([following, *(job.loaded_s for job in chosen)])
            if self._now == inf:
                raise RuntimeError(f"a request needs more than {self.capacity} tokens")
            return
        late = [job for job in chosen if job.loaded_s > self._now]
        prefill = sum(job.pending_tokens for job in ready if job.is_prefilling)
        decoding = sum(not job.is_prefilling for job in ready)
        seconds = self.profile.predict_iteration_s(prefill, decoding)
        seconds += self.context_s * sum(job.computed_tokens for job in ready) + self._blocked_s
        self._now += seconds
        for job in late:
            job.swapping_s += seconds
        for job in ready:
            self._advance(job, seconds)
        self.peak = max(self.peak, self.held)

    def _choose(self) -> list[Request]:
        """Return the first requests of the order whose KV fits together."""
        if self.whole and self._members:
            return self._members
        chosen, left = list[Request](), self.capacity
        for job in cast("Iterable[Request]", self.policy):
            left -= job.context_tokens + 1
            if left < 0 or len(chosen) == self.batch:
                break
            chosen.append(job)
        if self.whole:
            self._members = chosen
        return chosen

    def _make_room(self, chosen: list[Request]) -> None:
        """Evict others for the chosen requests, largest ENST first, and start the copies that they need."""
        self._blocked_s = 0.0
        kept = {job.id for job in chosen}
        need = sum(job.context_tokens + 1 for job in chosen) - sum(job.computed_tokens for job in chosen)
        if self.held + need > self.capacity:
            enst = self.policy.enst(self._now, self.batch)
            victims = sorted((job for job in self._on_device.values() if job.id not in kept), key=enst)
            while self.held + need > self.capacity and victims:
                self._evict(victims.pop())
        for job in chosen:
            if job.id not in self._on_device:
                self._load(job)

    def _evict(self, job: Request) -> None:
        job.evictions += 1
        if self.strategy != "recompute":
            job.stored = job.computed_tokens
        if self.strategy == "reactive":
            self._blocked_s += job.computed_tokens * self.copy_s
        elif self.strategy == "proactive":
            # The copy was made beside earlier iterations: it takes the link, and nobody waits for it.
            self._link_free = max(self._link_free, self._now) + job.computed_tokens * self.copy_s
        self._leave_device(job)
        job.computed_tokens, job.loaded_s = 0, 0.0

    def _load(self, job: Request) -> None:
        self._on_device[job.id] = job
        if not job.stored:
            return
        job.computed_tokens, job.stored = job.stored, 0
        self.held += job.computed_tokens
        if self.strategy == "reactive":
            self._blocked_s += job.computed_tokens * self.copy_s
            job.swapping_s += job.computed_tokens * self.copy_s
        else:
            self._link_free = max(self._link_free, self._now) + job.computed_tokens * self.copy_s
            job.loaded_s = self._link_free

    def _advance(self, job: Request, seconds: float) -> None:
        if job.end_s:
            return
        job.running_s += seconds
        self.held += job.context_tokens - job.computed_tokens
        job.computed_tokens = job.context_tokens
        job.generated_tokens += 1
        if job.generated_tokens == 1:
            job.first_s = self._now
        self.policy.add_service(job, seconds, self._now)
        if job.generated_tokens >= job.output:
            job.end_s = self._now
            self._end(job)

    def _end(self, job: Request) -> None:
        ended = [job]
        if self.whole:
            ended = self._members if all(member.end_s for member in self._members) else []
        for one in ended:
            one.end_s = self._now
            self.policy.remove(one)
            self._leave_device(one)
        if ended:
            self._members = []

    def _leave_device(self, job: Request) -> None:
        del self._on_device[job.id]
        self.held -= job.computed_tokens


def capacity(model: Model, sizes: Sizes, batch: int) -> float:
    """Return the requests per second that a full batch finishes: load 1."""
    profile = model.profile()
    each = (profile.prefill(prompt) + output * profile.decode(batch) / batch for prompt, output in sizes)
    return 1 / fmean(each)


def alpaca(count: int, seed: int = 1) -> Sizes:
    rows = read_csv(HERE / "traces" / "alpaca_lengths.csv")[["prompt", "output"]].to_numpy().tolist()
    return Random(seed).choices([(prompt, output) for prompt, output in rows], k=count)


def sharegpt(count: int, seed: int = 1) -> Sizes:
    random = Random(seed)
    drawn = ((_draw(random, 161.31, 1.7), _draw(random, 337.99, 1.1)) for _ in iter(int, 1))
    return list(islice((one for one in drawn if sum(one) <= LONGEST), count))


def _draw(random: Random, mean: float, cv: float) -> int:
    spread = log(1 + cv**2)
    return max(1, round(random.lognormvariate(log(mean) - spread / 2, sqrt(spread))))


def arrive(sizes: Sizes, rate: float, cv: float = 1.0, seed: int = 1) -> list[tuple[float, int, int]]:
    """Return the requests with arrivals of a gamma process: seconds, prompt, output."""
    times = accumulate(generate_gamma_gaps(rate, cv, Random(seed)))
    return [(time, *size) for time, size in zip(times, sizes, strict=False)]
