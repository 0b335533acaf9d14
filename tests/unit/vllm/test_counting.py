"""The steps of vLLM's workers are reported as stages of the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from support.progress_pipe import pipe

from coldstart.system.start_progress import KEY, LineReader, StartProgress
from coldstart.vllm import counting

__all__ = ["pipe"]

STEPS = counting.STEPS["vllm.v1.worker.gpu_worker", "Worker"]


def read(pipe: int) -> list[str]:
    return [StartProgress.parse(line[KEY]).describe() for line in LineReader(pipe).read() or ()]


def test_steps_of_the_first_rank_are_reported(pipe: int) -> None:
    class Worker:
        rank = 0

        def load_model(self) -> str:
            return "loaded"

    module: Any = SimpleNamespace(Worker=Worker)
    counting._name_steps("Worker", STEPS, module)
    assert Worker().load_model() == "loaded" and read(pipe) == ["load the model"]
    second = Worker()
    second.rank = 1
    assert second.load_model() == "loaded" and read(pipe) == []
