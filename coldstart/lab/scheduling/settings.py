"""Resources of the simulated engine: slots, token budget, KV blocks on device and host, the link, and its times."""

from __future__ import annotations

from dataclasses import dataclass

COPIES = ("written-through", "beside", "blocking")
CONTEXT_SHARE = 1e-5
"""Share of a one-request iteration per token of context.

It corresponds to 131 kB of KV per token and 16 GB of weights, as in a bfloat16 model of 8e9 parameters with
grouped-query attention (groups of four); an iteration reads both at the same bandwidth.
"""


@dataclass(frozen=True, slots=True)
class SimSettings:
    """Settings of the simulated engine: sizes in blocks and bytes, times in seconds; None means unlimited.

    `slots` are those of the model runner; `token_budget` is the maximum number of tokens of one iteration: longer
    prompts are computed in chunks. `depth` iterations are in flight: 2 is asynchronous scheduling, which decides an
    iteration while the one before runs and learns of an end one decision later.

    `copies` defines how evicted KV is copied to the host: written-through (as blocks fill, as in vLLM: blocks that
    were not stored yet are lost, and eviction costs nothing), beside the computation, or blocking it, in both
    directions.

    `request_s` is the time of a request outside the engine, before and after. `context_s` is the time that one token
    of context of a decoding job adds to its iteration, beyond the profile, which was measured with almost no context
    (None: by CONTEXT_SHARE). `crowd_s` is added to an iteration that does not contain all live jobs.
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
            raise ValueError(f"unknown KV copy mode {self.copies!r}; use one of: {', '.join(COPIES)}")
        if min(self.slots, self.token_budget, self.depth, self.block_tokens) < 1 or self.link_bytes_s <= 0:
            raise ValueError("slots, token budget, depth, block size and link speed must be above zero")
        if min(self.request_s, self.context_s or 0.0, self.crowd_s) < 0:
            raise ValueError("request_s, context_s and crowd_s must not be negative")

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def copy_s(self, blocks: int) -> float:
        return blocks * self.block_bytes / self.link_bytes_s
