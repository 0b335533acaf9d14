"""Steady state of servers compared with stock vLLM: one after the other, or two side by side.

Side by side, both servers are alive and get requests in turn, slice by slice. A disturbance of the machine affects
both, and the ratio's interval is that of the servers. This requires memory for two servers, which a GPU does not
have: there each server is measured in its own run, and ratios are by round.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from coldstart.validate.completions import CompletionClient
from coldstart.validate.launch import HOST, Launcher, serving

CONCURRENCY = 8
SINGLE_REQUESTS = 3
SLICES_PER_RUN = 4


@dataclass(frozen=True)
class Steady:
    """Steady state of a server: seconds per answer alone, seconds to one token, tokens per second with 8 requests."""

    latency_s: float
    one_token_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Pair:
    """Measurements of a server and the reference in one slice or round; None without a reference."""

    mine: Steady
    reference: Steady | None


def sample(client: CompletionClient, prompts: Sequence[str], max_tokens: int) -> Steady:
    """Measure a server that has answered before. Raises NoAnswerError."""
    alone = [client.complete(prompts[0], max_tokens).seconds for _ in range(SINGLE_REQUESTS)]
    short = [client.complete(prompts[0], 1).seconds for _ in range(SINGLE_REQUESTS)]
    asked = [prompts[i % len(prompts)] for i in range(2 * CONCURRENCY)]
    return Steady(median(alone), median(short), client.tokens_per_s(asked, max_tokens, CONCURRENCY))


def side_by_side(
    one: CompletionClient,
    reference: CompletionClient | None,
    prompts: Sequence[str],
    max_tokens: int,
    slices: int,
) -> list[Pair]:
    """Return `slices` samples of both servers, which are measured in alternating order. Raises NoAnswerError."""
    pairs = []
    for number in range(-1, slices):
        theirs = sample(reference, prompts, max_tokens) if reference and number % 2 else None
        mine = sample(one, prompts, max_tokens)
        if reference and theirs is None:
            theirs = sample(reference, prompts, max_tokens)
        if number >= 0:  # the first slice warms both servers
            pairs.append(Pair(mine, theirs))
    return pairs


@contextmanager
def answering(
    launcher: Launcher, directory: Path, prompt: str, timeout_s: float
) -> Iterator[CompletionClient]:
    """Run a server that has answered one request; stop it at the end of the block. Raises the errors of `serving`."""
    with serving(launcher, directory) as server:
        client = CompletionClient(HOST, server.files.port, timeout_s)
        client.first_token(prompt, deadline_s=server.launched_s + timeout_s, check=server.check)
        yield client
