"""What the simulated engine has: a batch, a token budget, KV blocks on two sides and a link between them."""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("proactive", "reactive", "recompute")


@dataclass(frozen=True, slots=True)
class SimSettings:
    """Sizes in blocks and bytes, times in seconds; None means unlimited.

    `strategy` says what becomes of KV that does not fit: dropped and computed again (recompute), moved on the
    critical path (reactive), or moved ahead of use beside the computation (proactive). `write_through` models
    an engine that copies blocks to the host as they fill, so that moving out costs nothing. `request_s` is what
    a request spends outside the engine, on its way in and out. `context_s` is what one token of context that a
    decoding job reads adds to its iteration, beyond the profile, whose decoding jobs have next to none; `crowd_s` is
    what an iteration takes longer while somebody is left out of it.
    """

    batch: int = 16
    token_budget: int | None = None
    block_tokens: int = 16
    device_blocks: int | None = None
    host_blocks: int | None = None
    block_bytes: int = 1 << 20
    link_bytes_s: float = 20e9
    strategy: str = "proactive"
    write_through: bool = False
    oldest_share: float = 0.0
    reserve_quantile: float = 0.9
    request_s: float = 0.0
    context_s: float = 0.0
    crowd_s: float = 0.0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(f"unknown KV strategy {self.strategy!r}; one of {', '.join(STRATEGIES)}")
        if self.batch < 1 or self.link_bytes_s <= 0:
            raise ValueError("the batch and the link speed must be above zero")
        if min(self.request_s, self.context_s, self.crowd_s) < 0:
            raise ValueError("request_s, context_s and crowd_s must not be negative")

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)
