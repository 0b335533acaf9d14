"""The graph-retaining class on PyTorch's Python class, with a replica of its C++ base class."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from replicas import extension, missing

from coldstart.graphs.torch_framework import define_kept_class

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return torch.cuda.CUDAGraph with a replaced base class."""
    from torch.cuda import graphs

    base = extension("cuda_graph", tmp_path_factory.mktemp("replica"))._CUDAGraph
    namespace = {**vars(graphs), "_CUDAGraph": base}
    exec(inspect.getsource(graphs.CUDAGraph), namespace)
    return namespace["CUDAGraph"]


def captured(kind: Any, **keywords: Any) -> Any:
    graph = kind(**keywords)
    graph.capture_begin()
    graph.capture_end()
    return graph


def test_the_replica_keeps_no_graph_by_default(plain: Any) -> None:
    with pytest.raises(RuntimeError, match="keep_graph=true"):
        captured(plain).raw_cuda_graph()
    assert captured(plain, keep_graph=True).raw_cuda_graph()


@pytest.mark.parametrize("keywords", [{}, {"keep_graph": False}, {"keep_graph": True}])
def test_a_kept_graph_can_be_read_however_it_is_made(plain: Any, keywords: dict[str, bool]) -> None:
    graph = captured(define_kept_class(plain), **keywords)
    assert graph.raw_cuda_graph()
    graph.replay()
    assert isinstance(graph, plain)
