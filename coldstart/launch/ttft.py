"""Predicted time to first token of a cold start (ParaServe, section 5.2, equation 5).

TTFT = t_w + max_i( t_cc + t_cu + max((M/s)/p_i, t_l), (M/s)/b_i ) + t_p (s - w + w/s) + t_n s.
Of s pipeline workers, w hold the full model. Fetching overlaps all other work of the runtime, and the slowest
worker determines the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StartCosts:
    """Parts of a start that do not depend on bandwidth, in seconds, in the order of the paper's symbols.

    `waiting` t_w (longest wait of a request before), `creation` t_cc (container or process), `context` t_cu (device and
    engine), `libraries` t_l, `prefill` t_p, `transfer` t_n (one hop between workers).
    """

    waiting: float = 0.0
    creation: float = 0.0
    context: float = 0.0
    libraries: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0

    def document(self) -> dict[str, float]:
        """Return the costs as plain data, in seconds."""
        return {f"{name}_s": value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Worker:
    """Bandwidths of a worker in bytes per second: `device` p_i (copy into the engine), `network` b_i (None without a fetch)."""

    device: float
    network: float | None = None


def ttft(
    costs: StartCosts,
    size: float,
    workers: Sequence[Worker],
    full: int = 1,
    *,
    loads_while_importing: bool = True,
) -> float:
    """Return the time to first token by equation 5, in seconds.

    Args:
        costs: Bandwidth-independent costs in seconds.
        size: Size of the weights in bytes.
        workers: Pipeline workers.
        full: Number of workers that hold the full model.
        loads_while_importing: Whether loading overlaps the imports, as with the paper's parameter manager.

    Raises:
        ValueError: There are no workers, more full workers than workers, or a bandwidth is not positive.
    """
    count = len(workers)
    if not 0 <= full <= count or count == 0:
        raise ValueError(f"{full} of {count} workers cannot be full")
    if any(worker.device <= 0 or (worker.network is not None and worker.network <= 0) for worker in workers):
        raise ValueError("a bandwidth must be positive")
    share = size / count
    slowest = max(_worker(costs, share, worker, loads_while_importing) for worker in workers)
    prefill = costs.prefill * (count - full + full / count)
    return costs.waiting + slowest + prefill + costs.transfer * count


def _worker(costs: StartCosts, share: float, worker: Worker, loads_while_importing: bool) -> float:
    load = share / worker.device
    ready = max(load, costs.libraries) if loads_while_importing else load + costs.libraries
    fetched = 0.0 if worker.network is None else share / worker.network
    return max(costs.creation + costs.context + ready, fetched)
