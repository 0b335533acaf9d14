"""Time to first token of a model that starts on several servers at once (ParaServe, equations 1, 2 and 5).

TTFT = t_w + max over ranks x of term_x + t_j s + t_p (s - w + w/s) + t_n s.
TPOT = t_d (s - w + w/s) + t_n s.

Of s ranks, w have the memory, and so the compute share, of a full model. term_x is the time until rank x
has loaded its m_x bytes, with b_x bytes/s from the network and p_x to the device:

sequential    t_cc + t_cu + t_l + m_x/b_x + m_x/p_x               (equation 1);
after-import  max(t_cc + t_cu + t_l, m_x/b_x) + m_x/p_x           fetched early, loaded after the imports;
full          max(t_cc + t_cu + max(m_x/p_x, t_l), m_x/b_x)       (equation 5).

t_j, once per rank and start, is not in the paper: the time that ranks take to connect is not part of the cost of a
token. All values are in seconds, bytes and bytes per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from coldstart.host.tables import Seconds


class Overlap(StrEnum):
    """Parts of a cold start that run concurrently with the fetch."""

    SEQUENTIAL = "sequential"
    AFTER_IMPORT = "after-import"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured times of a model in seconds.

    Per rank: container (t_cc), device context (t_cu), libraries (t_l), joining (t_j) and one hop (t_n). On a full
    device: prefill (t_p) and one decode iteration (t_d).
    """

    container_s: Seconds = 0.0
    context_s: Seconds = 0.0
    library_s: Seconds = 0.0
    join_s: Seconds = 0.0
    hop_s: Seconds = 0.0
    prefill_s: Seconds = 0.0
    decode_s: Seconds = 0.0
    overlap: Overlap = Overlap.FULL

    @property
    def runtime_s(self) -> float:
        """Return the time for everything except the weights."""
        return self.container_s + self.context_s + self.library_s


def fetch_s(size: float, rate: float) -> float:
    """Return the seconds to move `size` bytes; infinity at rate 0, 0 for no bytes."""
    return size / rate if rate > 0 else (inf if size else 0.0)


def loaded_s(costs: Costs, size: float, fetch: float, load: float) -> float:
    """Return term_x: seconds from the decision until a rank of `size` bytes is loaded."""
    return loaded_after(costs, size, load, fetched_s=fetch_begin_s(costs) + fetch_s(size, fetch))


def loaded_after(costs: Costs, size: float, load: float, fetched_s: float) -> float:
    """Return term_x if the last byte arrives `fetched_s` after the decision."""
    copy = fetch_s(size, load)
    match costs.overlap:
        case Overlap.SEQUENTIAL:
            return fetched_s + copy
        case Overlap.AFTER_IMPORT:
            return max(costs.runtime_s, fetched_s) + copy
        case Overlap.FULL:
            return max(costs.container_s + costs.context_s + max(copy, costs.library_s), fetched_s)


def fetch_begin_s(costs: Costs) -> float:
    """Return when the fetch begins: at the decision, or after the runtime in a sequential start, where the worker fetches."""
    return costs.runtime_s if costs.overlap is Overlap.SEQUENTIAL else 0.0


def fetch_budget_s(costs: Costs, size: float, load: float, term_s: float) -> float:
    """Return the latest time, in seconds, at which the fetch may end so that the rank is loaded within `term_s`.

    The load time is subtracted unless the load overlaps the fetch.
    """
    return term_s if costs.overlap is Overlap.FULL else term_s - fetch_s(size, load)


def slowdown(ranks: int, full: int) -> float:
    """Return s - w + w/s: a full rank computes its 1/s of the layers at full speed, another one at 1/s of it."""
    return ranks - full + full / ranks


def first_token_s(costs: Costs, ranks: int, full: int) -> float:
    """Return the seconds from the ready group to the first token; `full` ranks have memory for a full model."""
    return costs.prefill_s * slowdown(ranks, full) + costs.hop_s * ranks


def tpot_s(costs: Costs, ranks: int, full: int) -> float:
    """Return the time per output token (equation 2)."""
    return costs.decode_s * slowdown(ranks, full) + costs.hop_s * ranks


def ttft_s(costs: Costs, slowest_s: float, ranks: int, full: int, waited_s: float = 0.0) -> float:
    """Return the time to first token (ParaServe, equations 1 and 5).

    `slowest_s` is the largest term of the start, `full` the number of ranks with the memory of a full model.
    """
    return waited_s + slowest_s + costs.join_s * ranks + first_token_s(costs, ranks, full)
