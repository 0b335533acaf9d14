"""What the simulated engine has: slots, a token budget, KV blocks on two sides, a link between them, and its times."""

from __future__ import annotations

from dataclasses import dataclass

COPIES = ("written-through", "beside", "blocking")
CONTEXT_SHARE = 1e-5
"""Of a one-request iteration, per token of context: 131 kB of KV per token against 16 GB of weights, as in a bfloat16 model
of 8e9 parameters whose attention heads share keys by four; an iteration reads both at the same bandwidth."""


@dataclass(frozen=True, slots=True)
class SimSettings:
    """Sizes in blocks and bytes, times in seconds; None means unlimited.

    `slots` are the model runner's, `token_budget` the tokens of one iteration: longer prompts are computed in chunks.
    `depth` iterations are in flight: 2 is asynchronous scheduling, which decides an iteration while the one before runs and
    learns of an end one decision later. `copies` says how evicted KV gets to the host: written-through (as blocks fill, as
    in vLLM: what was not stored yet is lost, evicting costs nothing), beside the computation, or blocking it, both ways.
    `request_s` is what a request spends outside the engine, on its way in and out. `context_s` is what one token of context
    that a decoding job reads adds to its iteration, beyond the profile, whose decoding jobs have next to none (None: by
    CONTEXT_SHARE); `crowd_s` is what an iteration takes longer while somebody is left out of it.
    """

    slots: int = 256
    token_budget: int = 2048
    block_tokens: int = 16
    device_blocks: int | None = None
    host_blocks: int | None = None
    block_bytes: int = 1 << 20
    link_bytes_s: float = 20e9
    copies: str = "written-through"
    depth: int = 2
    request_s: float = 0.0
    context_s: float | None = None
    crowd_s: float = 0.0

    def __post_init__(self) -> None:
        if self.copies not in COPIES:
            raise ValueError(f"unknown way to copy KV {self.copies!r}; one of {', '.join(COPIES)}")
        if min(self.slots, self.token_budget, self.depth, self.block_tokens) < 1 or self.link_bytes_s <= 0:
            raise ValueError("slots, token budget, depth, block size and link speed must be above zero")
        if min(self.request_s, self.context_s or 0.0, self.crowd_s) < 0:
            raise ValueError("request_s, context_s and crowd_s must not be negative")

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def copy_s(self, blocks: int) -> float:
        return blocks * self.block_bytes / self.link_bytes_s
