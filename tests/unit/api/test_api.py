"""The names of `coldstart` and `coldstart.api`, and the cost of importing them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import coldstart
from coldstart import api

HEAVY = ("torch", "vllm", "pandas", "typer", "transformers", "numpy", "huggingface_hub", "ray")
# The fastest of several imports counts, because other processes on this machine add noise.
IMPORT_LIMIT_S, TRIES = 0.1, 5
PROBE = """
import json, sys, time
began = time.perf_counter()
import {module}
seconds = time.perf_counter() - began
print(json.dumps([seconds, [name for name in {heavy!r} if name in sys.modules]]))
"""


def _import(module: str) -> tuple[float, list[str]]:
    script = PROBE.format(module=module, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    seconds, heavy = json.loads(done.stdout)
    return seconds, heavy


def test_import_coldstart_is_fast_and_light() -> None:
    probes = [_import("coldstart") for _ in range(TRIES)]
    assert min(seconds for seconds, _ in probes) < IMPORT_LIMIT_S
    assert [heavy for _, heavy in probes] == [[]] * TRIES


def test_import_api_is_light() -> None:
    assert _import("coldstart.api")[1] == []


@pytest.mark.parametrize("name", coldstart.__all__)
def test_package_reexports_the_names_of_the_api(name: str) -> None:
    assert getattr(coldstart, name) is getattr(api, name)


def test_modules_of_every_start_import_neither_torch_nor_a_driver() -> None:
    parts = (
        "launch.ladder, materialize.graphs, validate.start, graphs.prove, graphs.restore, vllm.graphs.plugin"
    )
    code = f"import sys, {', '.join(f'coldstart.{part}' for part in parts.split(', '))}\n"
    code += "from coldstart.vllm.graphs import entry\nentry.register()\n"
    code += "print({name.partition('.')[0] for name in sys.modules} & {'torch', 'vllm', 'cuda'})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
