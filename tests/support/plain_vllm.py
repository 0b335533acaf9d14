"""Outputs of stock vLLM: its `LLM` class in one process per model, without coldstart.

The processes are forks of one that has imported vLLM, because the import takes most of the time. As a program this module
reads requests as JSON lines:

    {"args": [...], "prompts": [...], "tokens": n or null, "to": file, "log": file}

It writes n greedy tokens of each prompt, or its embedding, to the file. If vLLM refuses, the log has the reason, and the file
is not written.
"""

import contextlib
import json
import os
import subprocess
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_QUIET = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class PlainVllm:
    """Process that forks, started at the first request; `caches` is a cache directory that only it uses."""

    caches: Path
    process: subprocess.Popen[str] | None = field(default=None)

    def answers(self, request: dict[str, Any], log: Path) -> list[list[float]] | None:
        """Return the outputs of vLLM, or None if it refuses; `log` has the reason."""
        output = log.with_suffix(".json")
        if self.process is None:
            places = {
                "VLLM_CACHE_ROOT": str(self.caches),
                "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"),
            }
            self.process = subprocess.Popen(
                [sys.executable, "-P", __file__], env={**os.environ, **_QUIET, **places}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request | {"to": str(output), "log": str(log)}) + "\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        return json.loads(output.read_text()) if output.exists() else None

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.communicate()


def _answer(request: dict[str, Any]) -> list[list[float]]:
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # Arguments of vLLM's HTTP server (--lora-modules) are unknown to its engine.
    args, _ = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_known_args(request["args"])
    llm = LLM.from_engine_args(EngineArgs.from_cli_args(args))
    if request["tokens"] is None:
        return [llm.embed(prompt)[0].outputs.embedding for prompt in request["prompts"]]
    params = SamplingParams(max_tokens=request["tokens"], temperature=0.0, ignore_eos=True)
    found = [llm.generate(prompt, params)[0] for prompt in request["prompts"]]
    return [list(output.outputs[0].token_ids) for output in found]


def _in_a_fork(request: dict[str, Any]) -> None:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    try:
        with Path(request["log"]).open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        try:
            Path(request["to"]).write_text(json.dumps(_answer(request)))
        except Exception:  # noqa: BLE001 - any error of vLLM belongs in the log
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def main() -> None:
    """Answer the requests on standard input, one at a time."""
    replies = os.fdopen(os.dup(1), "w")
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    import vllm.entrypoints.llm
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401 - imported once, before the forks

    for line in sys.stdin:
        _in_a_fork(json.loads(line))
        with contextlib.suppress(BrokenPipeError):
            replies.write("\n")
            replies.flush()


if __name__ == "__main__":
    main()
