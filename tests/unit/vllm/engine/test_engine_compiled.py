"""Code that torch cannot serialize is reported and does not fail a materialization."""

import functools
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coldstart.vllm.engine import compiled


class Function:
    """Fake of torch's compiled forward."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def save_compiled_function(self, path: str) -> None:
        if self.error is not None:
            raise self.error
        Path(path).write_text("code")


class Model:
    """Model with two parts that vLLM compiles and one that it does not."""

    def __init__(self, *functions: Any) -> None:
        self.parts = [("", self), *((f"layer{i}", Part(one)) for i, one in enumerate(functions))]

    def named_modules(self) -> list[tuple[str, Any]]:
        return self.parts


class Part:
    do_not_compile = False

    def __init__(self, function: Any) -> None:
        self.aot_compiled_fn = function


def test_every_compiled_part_is_saved_under_its_name(tmp_path: Path) -> None:
    assert compiled.save_forwards(Model(Function(), Function()), tmp_path) == ["layer0", "layer1"]
    assert {file.name for file in tmp_path.iterdir()} == {"0.aot", "1.aot", compiled.INDEX}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (None, r"Part \(layer1\) has no ahead-of-time"),
        (Function(pickle.PicklingError("Can't pickle f:\nmore")), "PicklingError: Can't pickle f:$"),
    ],
)
def test_part_that_cannot_be_saved_is_named_with_reason(function: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(compiled.NotSavedError, match=reason):
        compiled.save_forwards(Model(Function(), function), tmp_path)


def test_a_model_that_vllm_does_not_compile_has_no_code(tmp_path: Path) -> None:
    with pytest.raises(compiled.NotSavedError, match="vLLM compiles no part"):
        compiled.save_forwards(Model(), tmp_path)


def doubled(function: Callable[[int], int]) -> Callable[[int], int]:
    """Hide the function below another name, like decorators of transformers."""

    @functools.wraps(function)
    def wrapper(number: int) -> int:
        return 2 * function(number)

    return wrapper


class Hidden:
    """`forward` is the outer of two wrappers; the inner one is compiled."""

    @doubled
    @doubled
    def forward(number: int) -> int:  # type: ignore[misc]
        return number + 1


def test_a_function_that_a_decorator_hides_is_serialised_by_its_content() -> None:
    from torch._dynamo.aot_compile import AOTCompilePickler, AOTCompileUnpickler

    inner = Hidden.forward.__wrapped__  # type: ignore[attr-defined]
    before, written = AOTCompilePickler.reducer_override, io.BytesIO()
    with pytest.raises(pickle.PicklingError):
        AOTCompilePickler({}, io.BytesIO()).dump(inner)
    with compiled.pickle_functions_by_code():
        AOTCompilePickler({}, written).dump([inner, doubled])
    assert AOTCompilePickler.reducer_override is before
    written.seek(0)
    again, named = AOTCompileUnpickler({}, written).load()
    assert again(3) == inner(3) == 8 and again is not inner
    assert named is doubled


pytest.importorskip("torch")
COMMAND = "g++ -O3 -I{0}/python3.11 -I{0}/torch/include -ltorch -L{0}/torch/lib "


@pytest.fixture
def codecache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(codecache, "write", codecache.write)
    return codecache


def test_name_differs_when_source_or_flags_differ(codecache: Any) -> None:
    compiled.use_portable_kernel_names()
    compiled.use_portable_kernel_names()
    names = [
        codecache.write(source, "main.cpp", extra=f"{optimized} {COMMAND.format(place)}{flags}")[0]
        for source, optimized, place, flags in (
            ("a", None, "/one", ""),
            ("a", None, "/two", ""),
            ("b", None, "/one", ""),
            ("a", None, "/one", "-mavx2"),
            ("a", "x -INFINITY", "/one", ""),
            ("a", "x -INT_MAX", "/one", ""),
        )
    ]
    assert names[0] == names[1]
    assert len({*names}) == 5
