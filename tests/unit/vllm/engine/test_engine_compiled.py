"""What torch cannot serialise is said, not raised at a materialization."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from coldstart.vllm.engine import compiled


class Function:
    """A compiled forward as torch has it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def save_compiled_function(self, path: str) -> None:
        if self.error is not None:
            raise self.error
        Path(path).write_text("code")


class Model:
    """Two parts that vLLM compiles and one that it does not."""

    def __init__(self, *functions: Any) -> None:
        self.parts = [("", self), *((f"layer{i}", Part(one)) for i, one in enumerate(functions))]

    def named_modules(self) -> list[tuple[str, Any]]:
        return self.parts


class Part:
    do_not_compile = False

    def __init__(self, function: Any) -> None:
        self.aot_compiled_fn = function


def test_every_compiled_part_is_saved_under_its_name(tmp_path: Path) -> None:
    assert compiled.save(Model(Function(), Function()), tmp_path) == ["layer0", "layer1"]
    assert {file.name for file in tmp_path.iterdir()} == {"0.aot", "1.aot", compiled.INDEX}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (None, r"Part \(layer1\) has no ahead-of-time"),
        (Function(pickle.PicklingError("Can't pickle f:\nmore")), "PicklingError: Can't pickle f:$"),
    ],
)
def test_a_part_that_cannot_be_saved_is_named_with_the_reason(
    function: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(compiled.NotSaved, match=reason):
        compiled.save(Model(Function(), function), tmp_path)
