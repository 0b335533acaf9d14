"""The OPT models of the FastServe paper as roofline profiles, and the request lengths of its figures.

Profiles are roofline models, not measurements: an iteration reads the weights once and computes two FLOPs
per parameter and token, t = max(weights / bandwidth, 2 P tokens / flops), devices in tensor parallel.
They are set so that OPT-13B on one A100-40GB takes about 30 ms to decode, the paper's SLO (0.3 s) over ten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import log
from random import Random
from statistics import fmean, pstdev
from typing import Any

from benchmarks.traces import azure_conversation
from coldstart.lab.scheduling import Outcome, SimSettings
from coldstart.lab.traces import TraceRequest
from coldstart.lab.traces.arrivals import rearrive
from coldstart.scheduling import IterationProfile

BANDWIDTH, FLOPS = 1.555e12 * 0.6, 312e12 * 0.5
OVERHEAD_S = 2e-3
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Model:
    """Table 1: parameters, layers, hidden size; and the GPUs it is served on."""

    name: str
    parameters: float
    layers: int
    hidden: int
    gpus: int
    link_bytes_s: float = 20e9
    memory: int = 40 * GIB

    @property
    def kv_bytes_per_token(self) -> int:
        """4 * l * h bytes in FP16 (section 4.2)."""
        return 4 * self.layers * self.hidden

    @property
    def kv_tokens(self) -> int:
        """Return the KV tokens that fit beside the weights and a tenth of memory for activations."""
        return int((0.9 * self.memory * self.gpus - 2 * self.parameters) / self.kv_bytes_per_token)

    @property
    def context_s(self) -> float:
        """Seconds to read one token's KV."""
        return self.kv_bytes_per_token / (BANDWIDTH * self.gpus)

    def engine(self, block_tokens: int = 16, **settings: Any) -> SimSettings:
        """Return the simulated engine with this model's memory; `settings` replaces single ones.

        FastServe bounds the batch, but not the preempted requests that retain KV: there are more slots than requests.
        """
        known: dict[str, Any] = {
            "slots": 4096,
            "block_tokens": block_tokens,
            "device_blocks": self.kv_tokens // block_tokens,
            "block_bytes": self.kv_bytes_per_token * block_tokens // self.gpus,
            "link_bytes_s": self.link_bytes_s,
            "context_s": self.context_s,
            "depth": 1,
        }
        return SimSettings(**known | settings)

    def profile(self) -> IterationProfile:
        floor = 2 * self.parameters / (BANDWIDTH * self.gpus) + OVERHEAD_S
        per_token = 2 * self.parameters / (FLOPS * self.gpus)
        prefill = [
            (n, max(floor, OVERHEAD_S + n * per_token)) for n in (1, 64, 128, 256, 512, 1024, 2048, 4096)
        ]
        decode = [(b, max(floor, OVERHEAD_S + b * per_token) + 2e-5 * b) for b in (1, 8, 32, 128, 256)]
        return IterationProfile.create(prefill, decode)


OPT_2_7B = Model("OPT-2.7B", 2.7e9, 32, 2560, 1)
OPT_13B = Model("OPT-13B", 13e9, 40, 5120, 1)
OPT_66B = Model("OPT-66B", 66e9, 64, 9216, 4)
OPT_175B = Model("OPT-175B", 175e9, 96, 12288, 16)


def lengths(count: int, longest: int = 2048) -> list[TraceRequest]:
    """Rows of the Azure conversation trace (2023) whose context fits OPT's 2,048 positions."""
    rows = (row for row in azure_conversation() if row.prompt_tokens + row.output_tokens <= longest)
    return list(islice(rows, count))


def poisson(rows: list[TraceRequest], rate: float, seed: int, cv: float = 1.0) -> Iterator[TraceRequest]:
    return rearrive(rows, rate, cv, seed)


def per_token(outcome: Outcome) -> float:
    """Mean over jobs of end-to-end latency over output length, in seconds (section 6.1)."""
    done = [job for job in outcome.jobs if job.finished_s]
    return fmean((job.finished_s - job.job.arrival_s) / job.output for job in done)


def capacity(profile: IterationProfile, rows: list[TraceRequest], batch: int) -> float:
    """Jobs per second that a full batch finishes: load 1."""
    each = (profile.prefill(r.prompt_tokens) + r.output_tokens * profile.decode(batch) / batch for r in rows)
    return 1 / fmean(each)


def skewed(count: int, seed: int = 5, longest: int = 2048) -> list[TraceRequest]:
    """Log-normal lengths with a long tail (sigma 1.4), clipped: the skew that ShareGPT stands for."""
    random = Random(seed)

    def draw(median: float) -> int:
        return max(1, min(longest // 2, round(random.lognormvariate(log(median), 1.4))))

    return [TraceRequest(0.0, draw(100), draw(60)) for _ in range(count)]


def cv(values: list[int]) -> float:
    """Coefficient of variation."""
    return pstdev(values) / fmean(values)
