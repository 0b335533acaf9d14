"""Outputs of stock vLLM: its `LLM` class in a process of its own, without coldstart.

As a program this module reads a JSON document on standard input, and its last line is the list of outputs:

    {"args": [...], "prompts": [...], "tokens": n or null}

The outputs are n greedy tokens of each prompt, or its embedding.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

_QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def ask(request: dict[str, Any], caches: Path, log: Path) -> list[list[float]]:
    """Return the outputs of vLLM, whose caches are below `caches`. Its messages are in `log`."""
    places = {"VLLM_CACHE_ROOT": str(caches), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor")}
    with log.open("w") as messages:
        done = subprocess.run(
            [sys.executable, "-P", __file__], env={**os.environ, **_QUIET, **places}, input=json.dumps(request),
            stdout=subprocess.PIPE, stderr=messages, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()[-6000:]
    outputs: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return outputs


def _answer(request: dict[str, Any]) -> list[list[float]]:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(request["args"])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    if request["tokens"] is None:
        return [llm.embed(prompt)[0].outputs.embedding for prompt in request["prompts"]]
    params = SamplingParams(max_tokens=request["tokens"], temperature=0.0, ignore_eos=True)
    found = [llm.generate(prompt, params)[0] for prompt in request["prompts"]]
    return [list(output.outputs[0].token_ids) for output in found]


if __name__ == "__main__":
    print("\n" + json.dumps(_answer(json.load(sys.stdin))))
