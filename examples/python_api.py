"""Build a bundle, serve it, ask for one completion, and stop the server: `python examples/python_api.py`.

The first run builds the bundle of tiny-llama, which takes minutes; later runs only start the server.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

from coldstart import api

MODEL = "tiny-llama"
VLLM_ARGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", "134217728")


@contextmanager
def print_stage(stage: str, expected_s: float | None = None) -> Iterator[Any]:
    """Print the name of each stage of the build."""
    print(f"{stage} ...", flush=True)
    yield print


def complete(url: str, prompt: str) -> str:
    """Return the text that follows `prompt`."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0})
    request = Request(f"{url}/v1/completions", body.encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=60) as response:
        return str(json.load(response)["choices"][0]["text"])


def main() -> None:
    """Run the example."""
    bundle = api.materialize(MODEL, VLLM_ARGS, on_progress=print_stage)
    print(f"bundle: {bundle.ref}")
    with api.serve(MODEL, VLLM_ARGS, port=0) as server:
        print(f"url: {server.url}")
        print(f"mode: {server.mode}, ready in {server.ready_s:.2f} s")
        print(f"fallbacks: {', '.join(map(str, server.fallbacks)) or 'none'}")
        print(f"completion: {complete(server.url, 'Once upon a time')!r}")
    print(f"exit code: {server.wait()}")


if __name__ == "__main__":
    main()
