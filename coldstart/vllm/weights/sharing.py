"""Share weights between a pipeline rank and the full worker that replaces it on the same machine (ParaServe, section 6).

On the CPU, the rank offers its loaded weights as one sealed memory file at a socket. The full worker maps the file over
each of its own tensors that has the same bytes, including packed weights, so that both processes use one copy. It packs each
layer as soon as its tensors are loaded, so at most one layer has two copies at a time.

On a GPU, the rank moves each large parameter to memory of its own, and sends the full worker a descriptor of it. The full
worker allocates the parameters of a layer when it loads the first of its tensors, and replaces those whose bytes the rank
also has. Only weights that vLLM does not change after loading are shared. This has not run on a GPU yet.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from coldstart.contract import environment
from coldstart.graphs.errors import DriverError
from coldstart.system.ipc import peers
from coldstart.system.ipc.json_lines import Channel, is_sealed
from coldstart.system.ipc.peers import PeerError, await_readable
from coldstart.system.proc import shared_pages
from coldstart.system.proc.mappings import Region, find_complete_pages
from coldstart.system.proc.shared_pages import SEPARATE, Places
from coldstart.vllm import compat, late

if TYPE_CHECKING:
    from coldstart.vllm.sleep.device import ExportableMemory

log = logging.getLogger("vllm.coldstart")

PATIENCE_S = 120.0
"""Maximum time, in seconds, to wait until a rank has copied its weights to shared memory."""
SHAREABLE_BYTES = 10 << 20
"""Size from which parameters on a GPU are shared. PyTorch gives these, too, memory of their own in units of 2 MiB."""
_COMPARED_BYTES = 64 << 20
Loaded = tuple[str, torch.Tensor]
NamedParameter = tuple[str, torch.nn.Parameter]
_LAYER = re.compile(r"(.*?\blayers\.\d+)\.")


class OfferedRankWeights:
    """Weights of a rank, which a thread offers at the socket `path` until the process ends. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._listener, self._regions = peers.Listener(path), list[Region]()
        self._published: tuple[int, Places] | None = None

    def add_regions(self, regions: Iterable[Region]) -> None:
        """Add memory regions that contain only weights that no longer change."""
        self._regions += regions

    def complete_load(self) -> None:
        """Start offering the regions."""
        Thread(target=self._serve, name="shared weights", daemon=True).start()

    def _serve(self) -> None:
        while await_readable(self._listener):
            if (connection := self._listener.accept()) is None:
                continue
            with Channel(connection) as channel, suppress(OSError, DriverError):
                self._send(channel)

    def _send(self, channel: Channel) -> None:
        self._published = self._published or shared_pages.move_to_memory_file(self._regions)
        channel.send({"places": self._published[1]}, self._published[:1])


class OfferedGpuWeights(OfferedRankWeights):
    """Large parameters of a rank on a GPU, which this moves to memory that another process can map.

    Raises:
        OSError, DriverError: The weights are not offered. The model can still be used.
    """

    def __init__(self, path: Path, model: torch.nn.Module, memory: ExportableMemory) -> None:
        super().__init__(path)
        self._memory, self._offers = memory, list[tuple[dict[str, Any], Any]]()
        for name, parameter in model.named_parameters():
            if _is_shareable(model.get_submodule(name.rpartition(".")[0]), parameter):
                region, handle = memory.allocate(parameter.nbytes)
                parameter.data = _view(region, parameter).copy_(parameter.data)
                torch.cuda.empty_cache()  # else PyTorch keeps the memory that the parameter had
                self._offers.append((_describe(name, parameter) | {"size": region.size}, handle))
        memory.synchronize()

    def _send(self, channel: Channel) -> None:
        for description, handle in self._offers:
            descriptor = self._memory.export(handle)
            try:
                channel.send(description, (descriptor,))
            finally:
                os.close(descriptor)


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

    def watch(
        self, model: torch.nn.Module, names: Iterable[str], tensors: Iterable[Loaded]
    ) -> Iterator[Loaded]:
        """Yield each of `tensors`, which have the `names`, and record after it that it is loaded."""
        for name, tensor in tensors:
            yield name, tensor
            self.record_loaded(model, name, names)

    def complete_load(self) -> None:
        """Log how many bytes are shared."""
        os.close(self._file)
        log.info(
            "coldstart: shares %d of %d bytes of weights with a pipeline rank",
            self.shared_bytes,
            self.weight_bytes,
        )


class ReceivedGpuWeights:
    """Weights of the full worker on a GPU, which shares those of the rank at the socket `path`.

    Raises:
        PeerError, OSError, DriverError: The rank offers no weights, or this process cannot map them.
    """

    def __init__(self, path: Path, memory: ExportableMemory) -> None:
        self._memory, self._offers = memory, dict[str, tuple[dict[str, Any], Region]]()
        self.shared_bytes = self.offered_bytes = 0
        connection = peers.connect(path)
        connection.settimeout(PATIENCE_S)
        with Channel(connection) as channel, ExitStack() as undo:
            undo.callback(self._unmap_offers)
            for message in channel.iterate_replies():
                descriptor = channel.take_descriptor()
                try:
                    region = memory.map_descriptor(descriptor, message.pop("size"))
                finally:
                    os.close(descriptor)
                self._offers[message["name"]] = message, region
                self.offered_bytes += message["bytes"]
            undo.pop_all()
        if not self._offers:
            raise PeerError(f"the rank at {path} does not share its weights")

    @contextmanager
    def defer_allocation(self) -> Iterator[None]:
        """Free the memory of each parameter that is created in this block and could be shared. Its shape remains."""
        original = torch.nn.Module.register_parameter

        def register(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
            original(module, name, parameter)
            if parameter is not None and _is_shareable(module, parameter):
                parameter.data = parameter.data.new_empty(1).expand(parameter.shape)

        with late.replace_attribute(torch.nn.Module, "register_parameter", register):
            yield

    def watch(
        self, model: torch.nn.Module, names: Iterable[str], tensors: Iterable[Loaded]
    ) -> Iterator[Loaded]:
        """Yield each of `tensors`, which have the `names`. Allocate its layer before, and share the layer after its last."""
        layers = dict[str, list[NamedParameter]]()
        for name, parameter in model.named_parameters():
            layers.setdefault(_get_layer(name), []).append((name, parameter))
        left = Counter(map(_get_layer, names))
        for other in layers.keys() - left.keys():
            self._allocate(layers[other])
        for name, tensor in tensors:
            layer = _get_layer(name)
            self._allocate(layers.get(layer, ()))
            yield name, tensor
            left[layer] -= 1
            if not left[layer]:
                self._share(layers.get(layer, ()))

    def complete_load(self, model: torch.nn.Module) -> None:
        """Allocate and share all parameters that are left. Unmap what is not shared, and report how much is."""
        self._allocate(model.named_parameters())
        self._share(model.named_parameters())  # a model may copy tensors later than it reads them
        self._unmap_offers()
        torch.cuda.empty_cache()
        log.info("coldstart: shares %d of %d offered bytes of weights", self.shared_bytes, self.offered_bytes)
        if self._offers:
            compat.record_fallback("sharing", f"the rank has different bytes in {', '.join(self._offers)}")
        _active.clear()

    def _unmap_offers(self) -> None:
        for _, region in self._offers.values():
            self._memory.unmap(region)

    @staticmethod
    def _allocate(parameters: Iterable[NamedParameter]) -> None:
        for _, parameter in parameters:
            if parameter.untyped_storage().nbytes() < parameter.nbytes:
                parameter.data = parameter.data.new_empty(parameter.shape)

    def _share(self, parameters: Iterable[NamedParameter]) -> None:
        for name, parameter in parameters:
            description, region = self._offers.get(name, (None, None))
            if region is None or description != _describe(name, parameter):
                continue
            shared = _view(region, parameter)
            pairs = (
                one.view(-1).view(torch.uint8).split(_COMPARED_BYTES) for one in (shared, parameter.data)
            )
            if all(map(torch.equal, *pairs)):
                parameter.data = shared
                self.shared_bytes += parameter.nbytes
                del self._offers[name]


def _get_layer(name: str) -> str:
    """Return the name of a tensor's layer, or "" if it belongs to no layer."""
    return match[1] if (match := _LAYER.match(name)) else ""


def _is_shareable(module: torch.nn.Module, parameter: torch.nn.Parameter) -> bool:
    """Return whether a large parameter of `module` has memory of its own that vLLM does not change after loading."""
    method = type(getattr(module, "quant_method", None))
    size = parameter.untyped_storage().nbytes()
    is_large = parameter.is_contiguous() and size == parameter.nbytes >= SHAREABLE_BYTES
    return is_large and method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def _describe(name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
    kind, shape = str(parameter.dtype), list(parameter.shape)
    return {"name": name, "dtype": kind, "shape": shape, "bytes": parameter.nbytes}


def _view(region: Region, like: torch.nn.Parameter) -> torch.Tensor:
    """Return a contiguous tensor at the start of `region` with the type, shape and device of a parameter."""
    storage = torch._C._construct_storage_from_data_pointer(region.address, like.device, like.nbytes)
    return torch.empty(0, dtype=like.dtype, device=like.device).set_(storage, 0, like.shape)


def share_gpu_weights(rank_model: torch.nn.Module | None = None) -> None:
    """Offer the weights of a rank's model at WEIGHTS_SOCKET, or map those of the rank for the model that is loaded next.

    Raises:
        PeerError, OSError, DriverError: The weights are not shared.
    """
    from coldstart.vllm.sleep.device import ExportableMemory

    path, memory = Path(environment.WEIGHTS_SOCKET.read()), ExportableMemory(torch.cuda.current_device())
    if rank_model is None:
        _active.append(ReceivedGpuWeights(path, memory))
    else:
        OfferedGpuWeights(path, rank_model, memory).complete_load()


_active: list[OfferedRankWeights | ReceivedRankWeights | ReceivedGpuWeights] = []


def get_loading_worker() -> ReceivedRankWeights | ReceivedGpuWeights | None:
    """Return the full worker that is loading shared weights in this process, or None."""
    return next((one for one in _active if not isinstance(one, OfferedRankWeights)), None)


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

    with late.replace_attribute(utils, "dispatch_cpu_unquantized_gemm", dispatch):
        yield
