"""When a model that starts on several servers at once gives its first token (ParaServe, equations 1, 2 and 5).

    TTFT = t_w + max over ranks x of term_x + t_j s + t_p (s - w + w/s) + t_n s
    TPOT = t_d (s - w + w/s) + t_n s

with s ranks, w of them with the memory, and so the compute share, of a whole model. term_x is the time until rank x has its m_x
bytes loaded, with b_x bytes/s from the network and p_x to the device:

    sequential    t_cc + t_cu + t_l + m_x/b_x + m_x/p_x               (equation 1)
    after-import  max(t_cc + t_cu + t_l, m_x/b_x) + m_x/p_x           fetched ahead, loaded once the libraries are there
    full          max(t_cc + t_cu + max(m_x/p_x, t_l), m_x/b_x)       (equation 5)

t_j, once per rank and start, is not in the paper: what it takes ranks to find each other is no part of what each token pays.
Seconds, bytes and bytes per second throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf


class Overlap(StrEnum):
    """What of a cold start runs beside the fetch."""

    SEQUENTIAL = "sequential"
    AFTER_IMPORT = "after-import"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Costs:
    """A model's measured times: container (t_cc), device context (t_cu), libraries (t_l), joining (t_j) and one hop (t_n) for
    each rank, prefill (t_p) and one decode iteration (t_d) on a whole device.
    """

    container_s: float = 0.0
    context_s: float = 0.0
    library_s: float = 0.0
    join_s: float = 0.0
    hop_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    overlap: Overlap = Overlap.FULL

    @property
    def runtime_s(self) -> float:
        """Everything but the weights."""
        return self.container_s + self.context_s + self.library_s


def fetch_s(size: float, rate: float) -> float:
    """Seconds to move `size` bytes; endless at no rate, none for no bytes."""
    return size / rate if rate > 0 else (inf if size else 0.0)


def loaded_s(costs: Costs, size: float, fetch: float, load: float) -> float:
    """term_x: seconds from the decision until a rank of `size` bytes is loaded."""
    return loaded_after(costs, size, load, fetched_s=fetch_begin_s(costs) + fetch_s(size, fetch))


def loaded_after(costs: Costs, size: float, load: float, fetched_s: float) -> float:
    """term_x where the last byte arrives `fetched_s` after the decision."""
    copy = fetch_s(size, load)
    match costs.overlap:
        case Overlap.SEQUENTIAL:
            return fetched_s + copy
        case Overlap.AFTER_IMPORT:
            return max(costs.runtime_s, fetched_s) + copy
        case Overlap.FULL:
            return max(costs.container_s + costs.context_s + max(copy, costs.library_s), fetched_s)


def fetch_begin_s(costs: Costs) -> float:
    """When the fetch begins: with the decision, but in a sequential start, where the worker itself fetches."""
    return costs.runtime_s if costs.overlap is Overlap.SEQUENTIAL else 0.0


def fetch_budget_s(costs: Costs, size: float, load: float, term_s: float) -> float:
    """The latest end of the fetch with which the rank is loaded within `term_s`: less the load where that comes after."""
    return term_s if costs.overlap is Overlap.FULL else term_s - fetch_s(size, load)


def slowdown(ranks: int, full: int) -> float:
    """s - w + w/s: a full rank computes its 1/s of the layers at full speed, another one at 1/s of it."""
    return ranks - full + full / ranks


def first_token_s(costs: Costs, ranks: int, full: int) -> float:
    """From the group ready to the first token."""
    return costs.prefill_s * slowdown(ranks, full) + costs.hop_s * ranks


def tpot_s(costs: Costs, ranks: int, full: int) -> float:
    """Equation 2."""
    return costs.decode_s * slowdown(ranks, full) + costs.hop_s * ranks


def ttft_s(costs: Costs, slowest_s: float, ranks: int, full: int, waited_s: float = 0.0) -> float:
    """Equations 1 and 5, by the overlap with which `slowest_s`, the largest term, was made."""
    return waited_s + slowest_s + costs.join_s * ranks + first_token_s(costs, ranks, full)
