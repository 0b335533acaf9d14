"""A live host with its client, shared by the host benchmarks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import aiohttp

from coldstart.system import paths
from coldstart.validate.launchers import console

ARGS = ["--max-model-len", "512", "--kv-cache-memory-bytes", "134217728"]
MODEL = "tiny-llama"
PROMPT = "Once upon a time there was a server that nobody asked for anything"


def table(models: Mapping[str, Mapping[str, Any]], **limits: Any) -> str:
    """Return the text of a host file."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in limits.items()]
    for name, members in models.items():
        lines += [f"[models.{name}]", *(f"{key} = {json.dumps(value)}" for key, value in members.items())]
    return "\n".join(lines) + "\n"


class Live:
    """A running host with a client."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def status(self) -> dict[str, Any]:
        async with self.client.get(self.url + "/status") as answer:
            return dict(await answer.json())

    async def wait_until_ready(self) -> None:
        """Wait for the model to serve."""
        deadline = time.monotonic() + 120
        while (status := await self.status())["models"][0]["state"] != "ready":
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.05)

    async def ask(self, request: str) -> tuple[int, Any]:
        """Return status and answer of a request for a few tokens."""
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        async with self.client.post(
            self.url + "/v1/completions", json=body, headers={"X-Request-Id": request}
        ) as answer:
            return answer.status, await answer.json()

    def server_socket(self) -> Path:
        """Return the Unix socket of the only running server."""
        (found,) = own_directory().glob("host-*/*.sock")
        return found


def own_directory() -> Path:
    return paths.runtime_dir()


@asynccontextmanager
async def hosting(text: str) -> AsyncIterator[Live]:
    """Run a host with that file and wait for its end afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        file, log = Path(directory) / "host.toml", Path(directory) / "log"
        file.write_text(text)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [*console(), "host", "--host-file", str(file), "--port", "0"],
                stdout=subprocess.PIPE,
                stderr=sink,
            )
        assert process.stdout is not None
        line = await asyncio.to_thread(process.stdout.readline)
        assert line, log.read_text()
        live = Live(process, line.split()[0].decode())
        try:
            yield live
        finally:
            await live.client.close()
            process.terminate()
            code = await asyncio.to_thread(process.wait, 60)
            assert code == 143, log.read_text()[-3000:]


async def stream(client: aiohttp.ClientSession, url: str, tokens: int) -> float:
    """Return the seconds to the first piece of a stream; fail if the stream is incomplete."""
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}
    began, first, whole = time.perf_counter(), 0.0, False
    async with client.post(url + "/v1/completions", json={**body, "max_tokens": tokens}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter() - began
                assert not line.startswith(b'data: {"error"'), line
            whole = whole or line.startswith(b"data: [DONE]")
    assert whole
    return first


def spread(values: Sequence[float]) -> dict[str, float]:
    low, _, high = quantiles(values, n=4)
    return {
        "n": len(values),
        "p50": median(values),
        "p25": low,
        "p75": high,
        "min": min(values),
        "max": max(values),
    }


def build_bundle() -> None:
    """Build the bundle of the model if it is missing."""
    subprocess.run([*console(), "materialize", MODEL, "-q", "--", *ARGS], check=True)


def start_template() -> None:
    """Build the bundle of the model, and start its engine template if none runs."""
    build_bundle()
    command = [*console(), "template", "status", "--format", "json"]
    status = subprocess.run(command, check=True, capture_output=True).stdout
    if not any(
        one["model"] == MODEL and one["level"] == "engine" and one["ready"]
        for one in json.loads(status)["templates"]
    ):
        subprocess.run([*console(), "template", "start", MODEL, "--level", "engine", "--", *ARGS], check=True)
