"""A FastAPI application with a vLLM server inside: `python examples/fastapi_lifespan.py --port 8080`.

The server starts before the application accepts requests, and stops with the application. POST /complete forwards a
completion request to vLLM. The example needs fastapi, httpx and uvicorn, which are installed with vLLM.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response

from coldstart import api

MODEL = "tiny-llama"
VLLM_ARGS = ("--max-model-len", "512", "--kv-cache-memory-bytes", "134217728")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Start the model server, and stop it with the application."""
    start = partial(api.serve, MODEL, VLLM_ARGS, port=0, on_miss="materialize")
    server = await asyncio.to_thread(start)
    print(f"{server.url}: {server.mode}, ready in {server.ready_s:.2f} s", flush=True)
    try:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            app.state.server, app.state.client = server, client
            yield
    finally:
        await asyncio.to_thread(server.stop)


app = FastAPI(lifespan=lifespan)


@app.get("/mode")
def get_mode(request: Request) -> dict[str, object]:
    """Return the start mode of the model server."""
    server: api.Server = request.app.state.server
    return {"mode": server.mode, "pid": server.pid, "fallbacks": [str(one) for one in server.fallbacks]}


@app.post("/complete")
async def complete(request: Request) -> Response:
    """Forward a completion request to vLLM."""
    headers = {"Content-Type": "application/json"}
    client: httpx.AsyncClient = request.app.state.client
    answer = await client.post("/v1/completions", content=await request.body(), headers=headers)
    return Response(answer.content, answer.status_code, media_type=answer.headers["content-type"])


def main() -> None:
    """Run the application until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080, help="Port of the application (default 8080).")
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port)


if __name__ == "__main__":
    main()
