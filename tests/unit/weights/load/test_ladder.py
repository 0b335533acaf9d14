"""Fallback from a failing prefetcher to files: each tensor is loaded once and in order."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from safetensors.numpy import save_file

from coldstart.contract.fallback import Fallback
from coldstart.weights import checkpoint
from coldstart.weights import weights_plan as weights
from coldstart.weights.checkpoint import Tensor, UnreadableWeightsError
from coldstart.weights.load import ladder, stage
from coldstart.weights.load.ladder import LoadReport, NoLoaderLeftError, load_tensors
from coldstart.weights.load.tensor_sources import FileSource, PrefetchSource, SourceLostError, TensorSource
from coldstart.weights.prefetch import PrefetchError, PrefetchFailedError, PrefetchLostError


class FakeLease:
    """Fake of the client's WeightsLease for a file; its `fails_at`-th wait fails."""

    def __init__(self, path: Path, fails_at: int, error: PrefetchError) -> None:
        self.data, self.left, self.error = memoryview(bytearray(path.read_bytes())), fails_at, error
        self.closed = False

    def wait_for_bytes(self, file: str, offset: int, size: int) -> None:
        if self.left == 0:
            raise self.error
        self.left -= 1

    def map_file(self, name: str) -> memoryview:
        return self.data

    def query_stats(self) -> dict[str, Any]:
        return {"fetched_bytes": 9}

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "model.safetensors"
    save_file({f"t{n}": np.full(n * 5000, n, dtype=np.uint8) for n in range(1, 8)}, made)
    return made


def _region(attached: FakeLease) -> ladder.Rung:
    return "prefetcher", lambda left: PrefetchSource(cast(Any, attached))


def _files(path: Path) -> ladder.Rung:
    return "files", lambda left: FileSource({path.name: path}, left)


def _refused(left: Sequence[Tensor]) -> TensorSource:
    raise SourceLostError("no room")


def _climb(path: Path, *rungs: ladder.Rung) -> tuple[dict[str, bytes], LoadReport]:
    wanted, report = checkpoint.list_tensors(weights.build_plan(path.parent)), LoadReport()
    found = [(tensor.name, bytes(view)) for tensor, view in load_tensors(wanted, rungs, report)]
    assert [name for name, _ in found] == [tensor.name for tensor in wanted]
    return dict(found), report


def _true(path: Path) -> dict[str, bytes]:
    plan = checkpoint.list_tensors(weights.build_plan(path.parent))
    data = path.read_bytes()
    return {t.name: data[t.offset : t.offset + t.size] for t in plan}


@pytest.mark.parametrize(
    "error", [PrefetchLostError("it was killed"), PrefetchFailedError("model.safetensors, t3 at 9")]
)
@pytest.mark.parametrize("at", [0, 3])
def test_files_continue_where_the_prefetcher_stopped(path: Path, at: int, error: PrefetchError) -> None:
    attached = FakeLease(path, at, error)
    found, report = _climb(path, _region(attached), _files(path))
    assert found == _true(path)
    assert attached.closed and report.way == "files" and report.tensors == 7
    assert [step.reason for step in report.fallbacks] == [
        f"prefetcher failed after {at} of 7 tensors: {error}"
    ]


def test_no_fallback_while_the_prefetcher_delivers(path: Path) -> None:
    found, report = _climb(path, _region(FakeLease(path, 99, PrefetchError())), _files(path))
    assert found == _true(path) and report.way == "prefetcher" and report.fallbacks == []
    assert report.fetch == {"fetched_bytes": 9}


def test_a_refusal_is_named(path: Path) -> None:
    found, report = _climb(path, ("prefetcher", _refused), _files(path))
    assert found == _true(path) and report.fallbacks == [Fallback("load", "prefetcher: no room")]


def test_load_fails_with_the_reasons_without_any_source(path: Path) -> None:
    rungs = [_region(FakeLease(path, 2, PrefetchLostError("killed"))) for _ in range(2)]
    with pytest.raises(NoLoaderLeftError, match="after 4 of 7 tensors: killed") as raised:
        _climb(path, *rungs)
    assert [tensor.name for tensor in raised.value.left] == ["t5", "t6", "t7"]


def test_files_with_other_bytes_than_the_plan_says_are_not_used(path: Path) -> None:
    wanted = checkpoint.list_tensors(weights.build_plan(path.parent))
    changed = bytearray(path.read_bytes())
    changed[wanted[2].offset] ^= 1
    path.write_bytes(changed)
    with pytest.raises(NoLoaderLeftError, match=r"tensor t3 at offset .* does not match its digest"):
        list(load_tensors(wanted, [_files(path)], LoadReport()))


def test_truncated_or_missing_file_causes_a_fallback(path: Path) -> None:
    wanted = checkpoint.list_tensors(weights.build_plan(path.parent))
    os.truncate(path, wanted[-1].offset + 1)
    with pytest.raises(NoLoaderLeftError, match="truncated: it ends before tensor"):
        list(load_tensors(wanted, [_files(path)], LoadReport()))
    path.unlink()
    with pytest.raises(NoLoaderLeftError, match="cannot map"):
        list(load_tensors(wanted, [_files(path)], LoadReport()))


def _leaks(path: Path) -> tuple[int, int, int]:
    mapped = sum(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(list(Path("/proc/self/fd").iterdir())), mapped, threading.active_count()


@pytest.mark.parametrize("take", [7, 2])
def test_load_leaves_no_descriptor_and_no_thread(path: Path, take: int) -> None:
    before = _leaks(path)
    climbing = load_tensors(
        checkpoint.list_tensors(weights.build_plan(path.parent)), [_files(path)], LoadReport()
    )
    for _ in range(take):
        _, view = next(climbing)
        assert len(view)
    climbing.close()
    del view, climbing
    # Threads and connections of earlier tests may end during this test.
    assert all(now <= then for now, then in zip(_leaks(path), before, strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files.append(dict(files[0])), "occurs twice"),
        (
            lambda files: files[0].update(tensors=[], chunks=files[0]["chunks"][:1]),
            "contains no tensors in safetensors format",
        ),
        (lambda files: files[0].pop("tensors"), "required field `tensors`"),
    ],
)
def test_unusable_plan_is_refused_with_the_reason(
    path: Path, change: Callable[[list[dict[str, Any]]], object], said: str
) -> None:
    plan = weights.build_plan(path.parent)
    change(plan["files"])
    with pytest.raises(UnreadableWeightsError, match=said):
        checkpoint.list_tensors(plan)


def test_a_rank_omits_what_vllm_drops() -> None:
    names = ("model.embed_tokens.a", "model.layers.1.b", "model.norm.c", "lm_head.d", "model.layers.0.e")
    for architecture, held in (("Phi3", "bcd"), ("Mixtral", "abcd"), ("Unknown", "abcde")):
        config = {"architectures": [f"{architecture}ForCausalLM"], "num_hidden_layers": 2}
        assert "".join(name[-1] for name in stage.select_tensor_names(names, config, [1], 2)) == held
    with pytest.raises(ValueError, match="does not split 5 layers across 2 ranks"):
        stage.list_stage_layers(5, 0, 2, "1,1")
