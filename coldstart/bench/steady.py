"""Servers past their start, against plain vLLM's: one after the other, or two side by side.

Side by side both servers are alive and asked in turn, slice by slice, so that whatever disturbs the machine disturbs
both, and the ratio's interval is that of the servers. It takes the memory of two servers, which a GPU does not have:
there each server is asked in its own run, and ratios are by round.
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
    """A server past its start: seconds per answer alone, seconds to one token, tokens per second at 8."""

    latency_s: float
    one_token_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Pair:
    """What a server did beside the reference, in one slice or one round; None where there is no reference."""

    mine: Steady
    reference: Steady | None


def sample(client: CompletionClient, prompts: Sequence[str], max_tokens: int) -> Steady:
    """A server that has answered before. Raises NoAnswerError."""
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
    """`slices` samples of both, the one that is asked first changing from slice to slice. Raises NoAnswerError."""
    pairs = []
    for number in range(-1, slices):
        theirs = sample(reference, prompts, max_tokens) if reference and number % 2 else None
        mine = sample(one, prompts, max_tokens)
        if reference and theirs is None:
            theirs = sample(reference, prompts, max_tokens)
        if number >= 0:  # the first warms both
            pairs.append(Pair(mine, theirs))
    return pairs


@contextmanager
def answering(
    launcher: Launcher, directory: Path, prompt: str, timeout_s: float
) -> Iterator[CompletionClient]:
    """A server that has answered, stopped at the end of the block. Raises as `serving`."""
    with serving(launcher, directory) as server:
        client = CompletionClient(HOST, server.files.port, timeout_s)
        client.first_token(prompt, deadline_s=server.launched_s + timeout_s, check=server.check)
        yield client
