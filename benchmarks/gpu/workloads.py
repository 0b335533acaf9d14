"""Things to capture: a Llama-style decoder with two attention paths, and one case for each awkward feature.

Each has static inputs, a forward that writes static outputs, and names for all memory that it owns.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

SIZES = (1, 2, 4, *range(8, 257, 8))
BLOCK, LENGTH = 16, 64
PADDING, STEP = 8, 1 << 26
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU only the mathematics can be rehearsed


@dataclass(frozen=True)
class Shape:
    """Llama2-7B by default."""

    layers: int = 32
    width: int = 4096
    heads: int = 32
    inner: int = 11008
    vocabulary: int = 32000


class Workload:
    """Base: seeded inputs, capture into one private pool with kept graphs, hash of outputs and KV cache."""

    has_eager = True
    sizes = SIZES
    seeded: tuple[str, ...] = ()

    def __init__(self, seed: int) -> None:
        self.padding = scatter(seed)
        self.pool = torch.cuda.graph_pool_handle() if DEVICE == "cuda" else (0, 0)
        self.static: dict[str, torch.Tensor] = {}
        self.generator = torch.Generator(device=DEVICE)

    def keys(self) -> dict[str, int]:
        return {f"decode:{size}": size for size in self.sizes}

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self.static)

    def forward(self, size: int) -> None:
        raise NotImplementedError

    def eager(self, key: str) -> None:
        with torch.no_grad():
            self.forward(self.keys()[key])

    def first_layer(self, size: int) -> None:
        """The least work that launches every kernel of this size (section 5.2 of the paper)."""
        self.forward(size)

    def capture(self, key: str, *, whole: bool = True) -> Any:
        """A CUDAGraph whose raw graph is kept. A first layer has its own pool, because its graph is not kept."""
        run = self.forward if whole else self.first_layer
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.no_grad(), torch.cuda.graph(graph, pool=self.pool if whole else None):
            run(self.keys()[key])
        return graph

    def prepare(self, key: str, seed: int) -> None:
        """Write all that `observe` reads, so that the order of the graphs does not matter."""
        self.generator.manual_seed(seed)
        for name in self.seeded:
            fill(self.static[name], self.generator)
        self.static["static:out"].zero_()

    def observe(self, key: str, *, restored: bool = False) -> bytes:
        watched = [self.static[n] for n in sorted(self.static) if n.startswith(("static:out", "kv:"))]
        return torch.stack([checksum(t) for t in watched]).cpu().numpy().tobytes()


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum of all words with random odd weights by row and column: any one changed bit changes it."""
    words = tensor.view(-1).view(torch.int64)
    columns = 1 << 14 if words.numel() % (1 << 14) == 0 else words.numel()
    table = words.view(-1, columns)
    source = torch.Generator(device=DEVICE).manual_seed(3)
    rows, across = (
        torch.randint(-(1 << 62), 1 << 62, (n,), generator=source, device=DEVICE) * 2 + 1 for n in table.shape
    )
    return ((table * across).sum(1) * rows).sum()


def scatter(seed: int) -> list[torch.Tensor]:
    """Allocate equally many blocks for every seed, of other sizes and another sum: ordinals agree, addresses differ."""
    rng = random.Random(seed)
    sizes = [seed * STEP + STEP, *(rng.randrange(1 << 21, 1 << 26) for _ in range(PADDING))]
    return [torch.empty(size, dtype=torch.uint8, device=DEVICE) for size in sizes]


def fill(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Normal numbers of unit size."""
    tensor.copy_(torch.randn(tensor.shape, generator=generator, device=DEVICE, dtype=torch.float32))


class Llama(Workload):
    """Decoding with a paged KV cache; `path` is sdpa or matmul."""

    seeded = ("static:noise",)

    def __init__(self, seed: int, shape: Shape | None = None, path: str = "sdpa") -> None:
        super().__init__(seed)
        # cuDNN's attention kernels keep state in globals, so they cannot be restored; vLLM does not use them.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self.shape, self.path = shape or Shape(), path
        s, most = self.shape, max(self.sizes)
        self.weights: dict[str, torch.Tensor] = {}
        source = torch.Generator(device=DEVICE).manual_seed(1)
        self._weight("embed", (s.vocabulary, s.width), source)
        self._weight("head", (s.width, s.vocabulary), source)
        for i in range(s.layers):
            wide = {
                "qkv": (s.width, 3 * s.width),
                "o": (s.width, s.width),
                "up": (s.width, 2 * s.inner),
                "down": (s.inner, s.width),
            }
            for name, shape_ in wide.items():
                self._weight(f"{i}.{name}", shape_, source)
        self._weight("norm", (s.width,), source)
        blocks = most * LENGTH // BLOCK
        for i in range(s.layers):
            self.static[f"kv:{i}"] = self._zeros(2, blocks * BLOCK, s.heads, s.width // s.heads)
        self.static["static:out"] = self._zeros(most, s.vocabulary)
        self.static["static:noise"] = self._zeros(most, s.width)
        for name in ("ids", "positions", "slots", "lengths"):
            self.static[f"static:{name}"] = torch.zeros(most, dtype=torch.int64, device=DEVICE)
        self.static["static:table"] = torch.arange(blocks, device=DEVICE).view(most, -1)
        self.static["static:angles"] = torch.outer(
            torch.arange(LENGTH, device=DEVICE),
            1e4 ** -torch.linspace(0, 1, s.width // s.heads, device=DEVICE),
        ).bfloat16()

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)

    def _weight(self, name: str, shape: tuple[int, ...], source: torch.Generator) -> None:
        value = torch.randn(shape, generator=source, device=DEVICE, dtype=torch.bfloat16)
        self.weights[name] = value.mul_(shape[0] ** -0.5)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"param:{name}": t for name, t in self.weights.items()} | dict(self.static)

    def prepare(self, key: str, seed: int) -> None:
        super().prepare(key, seed)
        n, most = self.keys()[key], max(self.sizes)
        g = self.generator
        self.static["static:ids"].copy_(
            torch.randint(self.shape.vocabulary, (most,), generator=g, device=DEVICE)
        )
        lengths = torch.randint(1, LENGTH + 1, (most,), generator=g, device=DEVICE)
        self.static["static:lengths"].copy_(lengths)
        self.static["static:positions"].copy_(lengths - 1)
        self.static["static:slots"].copy_(torch.arange(most, device=DEVICE) * LENGTH + lengths - 1)
        for i in range(self.shape.layers):
            cache = self.static[f"kv:{i}"].view(2, most, LENGTH, -1)
            cache[:, :n].normal_(generator=g)
            cache[:, n:].zero_()

    def first_layer(self, size: int) -> None:
        self.forward(size, 1)

    def forward(self, size: int, layers: int | None = None) -> None:
        x = (
            F.embedding(self.static["static:ids"][:size], self.weights["embed"])
            + self.static["static:noise"][:size]
        )
        for i in range(self.shape.layers if layers is None else layers):
            x = x + self._attention(i, self._norm(x), size)
            gate, up = (self._norm(x) @ self.weights[f"{i}.up"]).chunk(2, -1)
            x = x + (F.silu(gate) * up) @ self.weights[f"{i}.down"]
        self.static["static:out"][:size] = self._norm(x) @ self.weights["head"]

    def _norm(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (self.shape.width,), self.weights["norm"], 1e-5)

    def _attention(self, i: int, x: torch.Tensor, n: int) -> torch.Tensor:
        heads = self.shape.heads
        q, k, v = (x @ self.weights[f"{i}.qkv"]).view(n, 3, heads, -1).unbind(1)
        angle = self.static["static:angles"][self.static["static:positions"][:n]][:, None]
        q, k = (t * angle.cos() + t.roll(1, -1) * angle.sin() for t in (q, k))
        cache, slots = self.static[f"kv:{i}"], self.static["static:slots"][:n]
        cache[0].index_copy_(0, slots, k)
        cache[1].index_copy_(0, slots, v)
        pages = cache.view(2, -1, BLOCK, heads, q.shape[-1])[:, self.static["static:table"][:n]]
        keys, values = pages.reshape(2, n, LENGTH, heads, -1).transpose(2, 3)
        mask = torch.arange(LENGTH, device=DEVICE) < self.static["static:lengths"][:n, None]
        mixed = self._mix(q[:, :, None], keys, values, mask[:, None, None])
        return mixed.reshape(n, -1) @ self.weights[f"{i}.o"]

    def _mix(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.path == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v


class Small(Workload):
    """One matrix and a vector, at three sizes; subclasses say what is done with them."""

    sizes = (1, 8, 64)
    seeded = ("static:x",)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        source = torch.Generator(device=DEVICE).manual_seed(2)
        self.weight = torch.randn((256, 256), generator=source, device=DEVICE).bfloat16()
        self.static |= {
            n: torch.zeros((64, 256), dtype=torch.bfloat16, device=DEVICE) for n in ("static:x", "static:out")
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"param:weight": self.weight} | dict(self.static)

    def forward(self, size: int) -> None:
        self.static["static:out"][:size] = self.compute(self.static["static:x"][:size])

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class Inductor(Small):
    """torch.compile in front of the capture (triton kernels)."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.compiled = torch.compile(lambda x, w: F.silu(F.rms_norm(x @ w, (256,))) * x, dynamic=False)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(x, self.weight)


class Fp8(Small):
    """_scaled_mm on float8."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.narrow = self.weight.to(torch.float8_e4m3fn).t().contiguous().t()
        self.one = torch.ones((), device=DEVICE)
        self.static |= {"static:one": self.one}

    def tensors(self) -> dict[str, torch.Tensor]:
        return super().tensors() | {"param:narrow": self.narrow}

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        rows = F.pad(x, (0, 0, 0, -x.shape[0] % 16)).to(torch.float8_e4m3fn)
        wide = torch._scaled_mm(rows, self.narrow, self.one, self.one, out_dtype=torch.bfloat16)
        return wide[: x.shape[0]]


class Streams(Small):
    """Two streams that fork and join inside the capture."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.side = torch.cuda.Stream()

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            left = (x + 1) @ self.weight
        right = (x - 1) @ self.weight
        torch.cuda.current_stream().wait_stream(self.side)
        return left * right


class Random(Small):
    """Dropout: must be refused."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x @ self.weight, 0.5)


CASES: dict[str, type[Workload]] = {
    "llama": Llama, "inductor": Inductor, "fp8": Fp8, "streams": Streams, "random": Random,
}  # fmt: skip
