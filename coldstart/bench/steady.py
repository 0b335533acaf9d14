"""Steady state of a server: latency and throughput after its start.

Ratios to stock vLLM are by round, in which each mode runs once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from coldstart.validate.completions import CompletionClient

CONCURRENCY = 8
SINGLE_REQUESTS = 3


@dataclass(frozen=True)
class Steady:
    """Steady state of a server: seconds per answer alone, seconds to one token, tokens per second with 8 requests."""

    latency_s: float
    one_token_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Pair:
    """Measurements of a server and the reference in one round; None without a reference."""

    mine: Steady
    reference: Steady | None


def sample(client: CompletionClient, prompts: Sequence[str], max_tokens: int) -> Steady:
    """Measure a server that has answered before. Raises NoAnswerError."""
    alone = [client.complete(prompts[0], max_tokens).seconds for _ in range(SINGLE_REQUESTS)]
    short = [client.complete(prompts[0], 1).seconds for _ in range(SINGLE_REQUESTS)]
    asked = [prompts[i % len(prompts)] for i in range(2 * CONCURRENCY)]
    return Steady(median(alone), median(short), client.tokens_per_s(asked, max_tokens, CONCURRENCY))
