"""Share weights between a pipeline rank and the full worker that replaces it on the same machine (ParaServe, section 6).

The rank offers its loaded weights as one sealed memory file at a socket. The full worker maps the file over each of its
own tensors that has the same bytes, including packed weights, so that both processes use one copy. Only vLLM's CPU engines
share weights, because their weights do not change after loading and packing.

The full worker packs each layer as soon as its tensors are loaded, so at most one layer has two copies at a time.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select
from threading import Thread
from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from coldstart.contract import environment
from coldstart.system.ipc import peers
from coldstart.system.ipc.json_lines import Channel, is_sealed
from coldstart.system.ipc.peers import PeerError
from coldstart.system.proc import shared_pages
from coldstart.system.proc.mappings import Region, find_complete_pages
from coldstart.system.proc.shared_pages import SEPARATE, Places

log = logging.getLogger("vllm.coldstart")

PATIENCE_S = 120.0
"""Maximum time, in seconds, to wait until a rank has copied its weights to shared memory."""
_LAYER = re.compile(r"(.*?\blayers\.\d+)\.")


class OfferedRankWeights:
    """Weights of a rank, which a thread offers at the socket `path` until the process ends. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._listener, self._regions = peers.Listener(path), list[Region]()

    def add_regions(self, regions: Iterable[Region]) -> None:
        """Add memory regions that contain only weights that no longer change."""
        self._regions += regions

    def complete_load(self) -> None:
        """Start offering the regions."""
        Thread(target=self._serve, name="shared weights", daemon=True).start()

    def _serve(self) -> None:
        published: tuple[int, Places] | None = None
        while select([self._listener], [], []):
            if (connection := self._listener.accept()) is None:
                continue
            with Channel(connection) as channel, suppress(OSError):
                published = published or shared_pages.move_to_memory_file(self._regions)
                channel.send({"places": published[1]}, published[:1])


class ReceivedRankWeights:
    """Weights of the full worker, which shares the weights of the rank at the socket `path`.

    Raises:
        PeerError, OSError: No rank offers weights at the socket.
    """

    def __init__(self, path: Path) -> None:
        self.weight_bytes = self.shared_bytes = 0
        self._left: Counter[str] | None = None
        connection = peers.connect(path)
        connection.settimeout(PATIENCE_S)
        with Channel(connection) as channel:
            message = next(channel.iterate_replies(), None)
            if message is None:
                raise PeerError(f"the rank at {path} does not share its weights")
            self._file = channel.take_descriptor()
        self._places: Places = {name: Region(*place) for name, place in message["places"].items()}
        if not is_sealed(self._file):
            raise PeerError(f"cannot map the weights of the rank at {path}: their memory file is not sealed")

    def add_regions(self, regions: Iterable[Region]) -> None:
        """Map the rank's memory over each region whose bytes the rank also has."""
        for region in regions:
            self.weight_bytes += region.size
            with suppress(OSError, ValueError):  # this region stays unshared
                self.shared_bytes += region.size * shared_pages.map_if_equal(region, self._file, self._places)

    def record_loaded(self, model: torch.nn.Module, name: str, names: Iterable[str]) -> None:
        """Record that the tensor `name`, one of all `names`, is loaded. Pack its layer once the layer is complete.

        vLLM later skips packed layers.
        """
        if self._left is None:
            self._left = Counter(match[1] for one in names if (match := _LAYER.match(one)))
        if (match := _LAYER.match(name)) is None:
            return
        self._left[match[1]] -= 1
        if self._left[match[1]]:
            return
        with suppress(AttributeError):  # the model uses other layer names
            for module in model.get_submodule(match[1]).modules():
                if isinstance(method := getattr(module, "quant_method", None), UnquantizedLinearMethod):
                    method.process_weights_after_loading(module)

    def complete_load(self) -> None:
        """Log how many bytes are shared."""
        os.close(self._file)
        log.info(
            "coldstart: shares %d of %d bytes of weights with a pipeline rank",
            self.shared_bytes,
            self.weight_bytes,
        )


_active: list[OfferedRankWeights | ReceivedRankWeights] = []


def get_loading_worker() -> ReceivedRankWeights | None:
    """Return the full worker that is loading shared weights in this process, or None."""
    return next((one for one in _active if isinstance(one, ReceivedRankWeights)), None)


@contextmanager
def share_weights(runner: Any, *, is_rank: bool) -> Iterator[None]:
    """Share the weights that `runner` loads in this block: a rank offers them at WEIGHTS_SOCKET, the full worker maps them.

    Raises:
        PeerError, OSError: No rank offers weights at the socket, or the rank cannot listen on it. No weights are loaded then.
    """
    path = Path(environment.WEIGHTS_SOCKET.read())
    sharer = OfferedRankWeights(path) if is_rank else ReceivedRankWeights(path)
    _active.append(sharer)
    try:
        with shared_pages.allocate_on_own_pages(), _watch_packing(sharer):
            yield
        tensors = {one.data_ptr(): one for one in (*runner.model.parameters(), *runner.model.buffers())}
        pages = (find_complete_pages(address, one.nbytes) for address, one in tensors.items())
        sharer.add_regions([region for region in pages if region.size >= SEPARATE])
        sharer.complete_load()
    finally:
        _active.clear()


@contextmanager
def _watch_packing(sharer: OfferedRankWeights | ReceivedRankWeights) -> Iterator[None]:
    """Give the sharer the memory into which vLLM packs the weights of each linear layer.

    oneDNN owns that memory and does not report its address, so this finds it as newly allocated memory of the process.
    """
    original = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight, before = layer.weight, shared_pages.list_anonymous()
        size = weight.nbytes
        original(layer, remove_weight)
        added = shared_pages.subtract_regions(shared_pages.list_anonymous(), before)
        if size >= SEPARATE and (packed := shared_pages.find_allocation(added, size)) is not None:
            sharer.add_regions([packed])
        if layer.weight is not weight:
            weight.data = torch.empty(0)  # the model's loader may still refer to it

    utils.dispatch_cpu_unquantized_gemm = dispatch
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original
