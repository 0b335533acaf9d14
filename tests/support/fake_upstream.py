"""Servers without a model, and a gateway for them: real HTTP on real sockets in one event loop.

A fake server echoes a POST: `{"prompt": ..., "pieces": n}` returns n pieces with the prompt, as a stream of events or as one
document. It pauses `pause_s` seconds between pieces and breaks the connection after `break_after` pieces.

A request with `max_tokens` returns the tokens of `fake_model`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from aiohttp import web
from support import fake_model

from coldstart.contract import handover
from coldstart.contract.graphs import WORKER_REPORT
from coldstart.host import configuration
from coldstart.host.live.app import Gateway
from coldstart.host.live.driver import Driver
from coldstart.host.live.host_routes import create_host_routes
from coldstart.host.live.http_server import GatewayServer, create_server, format_url, listen
from coldstart.host.live.profiles import MemoryMeter
from coldstart.host.live.server_log import ServerLog
from coldstart.host.live.servers import ReadyServer, StartFailedError
from coldstart.host.live.starter import StartOrder
from coldstart.system.start_progress import StartProgress


class FakeServer:
    """Server that is ready when `gate` is set.

    `asked` lists prompts in order of arrival; `gone` lists those whose client disconnected.
    """

    def __init__(self, servers: FakeServers, order: StartOrder, path: Path) -> None:
        loop, launch = asyncio.get_running_loop(), order.launch
        self.servers, self.order, self.launch, self.socket = servers, order, launch, path
        self.listen = order.listen
        # Copied at the start: a test may release later servers before this one has run.
        self.held = servers.hold
        self.log = ServerLog(path.with_suffix(".log"))
        self.log.path.write_text(f"{launch.name} said so\n")
        self.ready: asyncio.Future[ReadyServer] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self.gate, self.over = asyncio.Event(), asyncio.Event()
        self.asked: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.generating = 0
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.gone: list[Any] = []
        self.pins: list[handover.Pin] = []
        self.was_killed = self.stopped = self.hangs = False
        self.progress: StartProgress | None = None
        self.env, self.rate_limit = dict(order.environment), order.rate_limit
        self.ready.add_done_callback(lambda future: future.cancelled() or future.exception())
        self._task = loop.create_task(self._live())

    async def _live(self) -> None:
        app = web.Application()
        app.router.add_get("/version", self._show_version)
        app.router.add_post("/{path:.*}", self._answer)
        app.router.add_get("/{path:health|metrics}", self._observed)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        try:
            reason = self.servers.failing.get(self.launch.name)
            await self._first(self.gate)
            if reason is not None or self.over.is_set():
                self.ready.set_exception(StartFailedError(reason or "stopped"))
                return
            await runner.setup()
            await self._site(runner).start()
            document = {"phases": {"read tensors": 0.5}, "weights": self.servers.weights}
            self.ready.set_result(ReadyServer(self.servers.mode, 4242, document))
            await self.over.wait()
        finally:
            await runner.cleanup()
            self.socket.unlink(missing_ok=True)
            self.log.remove()
            self.ended.set_result("the server exited with code 9")

    def _site(self, runner: web.AppRunner) -> web.BaseSite:
        if not self.listen:
            return web.UnixSite(runner, str(self.socket), backlog=2048)
        return web.TCPSite(runner, self.listen[1], int(self.listen[3]), backlog=2048)

    async def _observed(self, request: web.Request) -> web.Response:
        if self.hangs or self.launch.name in self.servers.hung:
            await self.over.wait()
        return web.Response(text=self.servers.metrics if request.path == "/metrics" else "")

    async def _first(self, gate: asyncio.Event) -> None:
        if self.held:
            waits = [asyncio.ensure_future(one.wait()) for one in (gate, self.over)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for one in waits:
                one.cancel()

    async def _show_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "fake", "key": request.headers.get("Authorization")})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(request.path_qs)
        key = self.env.get("VLLM_API_KEY")
        if key is not None and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in ("/sleep", "/wake_up", "/collective_rpc"):
            # vLLM has these routes only in its development mode.
            has_routes = self.env.get("VLLM_SERVER_DEV_MODE") == "1" and not self.listen
            method = (await request.json())["method"] if request.path == "/collective_rpc" else ""
            self.paths[-1] += f" {method}" if method else ""
            results = self.servers.reports if method == WORKER_REPORT else [None]
            status = 200 if self.servers.sleeps and has_routes else 404
            return web.json_response({"results": results}, status=status)
        try:
            body = json.loads(await request.read())
        except RecursionError:
            return web.json_response({"error": {"message": "the body cannot be parsed"}}, status=400)
        message = handover.verify_and_decode(
            self.env.get("COLDSTART_HANDOVER_KEY", ""), body.get(handover.PARAMETER)
        )
        if isinstance(message, handover.Pin):
            return web.json_response(self._hold(message))
        if isinstance(message, handover.LoadQuery):
            loaded = handover.LoadResult(not self.servers.loses_kv)
            return web.json_response(
                {handover.PARAMETER: handover.sign(self.env["COLDSTART_HANDOVER_KEY"], loaded)}
            )
        prompt = body["prompt"] if "prompt" in body else body["messages"]
        self.asked.append(prompt)
        self.bodies.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if body.get("max_tokens"):
            return await self._generated(request, body)
        if body.get("status"):
            return web.json_response({"error": {"message": "no"}}, status=body["status"])
        pieces = body.get("pieces", 3)
        if not body.get("stream"):
            with self._noticing(prompt):
                await asyncio.sleep(body.get("pause_s", 0) * pieces)
            return web.json_response(
                {"model": body["model"], "text": [prompt] * pieces}, headers={"x-own": "1"}
            )
        return await self._streamed(request, body, pieces)

    def _hold(self, pin: handover.Pin) -> dict[str, Any]:
        """Return the response to a request that holds KV; a server that does not hold it generates a token."""
        self.pins.append(pin)
        if not self.servers.holds_kv:
            return {"choices": [{"text": "w"}]}
        pull = handover.Pull(f"{len(self.pins)}", "ab" * 32, pin.tokens, "same", (("127.0.0.1", 1),))
        return {handover.PARAMETER: handover.sign(self.env["COLDSTART_HANDOVER_KEY"], pull)}

    async def _streamed(self, request: web.Request, body: dict[str, Any], pieces: int) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        with self._noticing(body["prompt"]):
            for number in range(pieces):
                if number == body.get("break_after"):
                    assert request.transport is not None
                    request.transport.abort()
                    return answer
                said = json.dumps({"prompt": body["prompt"], "number": number})
                await answer.write(f"data: {said}\n\n".encode())
                await asyncio.sleep(body.get("pause_s", 0))
            await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _generated(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        if not body.get("stream"):
            aborts, self.servers.aborts = self.servers.aborts > 0, self.servers.aborts - 1
            if aborts:
                self.stop()
            choice = {"text": "w", "finish_reason": "abort" if aborts else "length"}
            return web.json_response({"choices": [choice]}, status=self.servers.warming)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        self.generating += 1
        events = fake_model.pair_tokens(fake_model.events(body, f"cmpl-{id(self)}"), self.servers.pairs)
        for number, event in enumerate(events):
            await asyncio.sleep(self.servers.pause_s)
            if number == self.servers.break_after:
                assert request.transport is not None
                request.transport.abort()
                return answer
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await asyncio.sleep(self.servers.last_s)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    @contextmanager
    def _noticing(self, prompt: Any) -> Iterator[None]:
        """Note the prompt if its client disconnects in the block."""
        try:
            yield
        except BaseException:
            self.gone.append(prompt)
            raise

    def stop(self) -> None:
        self.over.set()

    def kill(self) -> None:
        self.was_killed = True
        self.over.set()

    def is_stopped(self) -> bool:
        return self.stopped

    def retire(self) -> None:
        self.retired = True


class FakeTemplate(FakeServer):
    """Template that forks nothing and exits when it is retired."""

    def __init__(self, servers: FakeServers, order: StartOrder, path: Path) -> None:
        self.level, self.retired = order.template, False
        super().__init__(servers, order, path)

    async def _live(self) -> None:
        if self.servers.templates_fail:
            self.ready.set_exception(StartFailedError("no template"))
        else:
            await self._first(self.gate)
            if self.over.is_set():
                self.ready.set_exception(StartFailedError("ended"))
            else:
                self.ready.set_result(ReadyServer(f"template-{self.level}", os.getpid(), {}))
            await self.over.wait()
        self.ended.set_result("stopped")

    def retire(self) -> None:
        self.retired = True
        self.over.set()


@dataclass
class FakeServers:
    """Starter of fake servers below `directory`. With `hold` each waits for its gate; `failing` servers do not start.

    `metrics` is the answer of each at /metrics; the models in `hung` do not give it. The first `aborts` completions that do
    not stream are aborted by servers that end.
    """

    directory: Path
    mode: str = "fake"
    hold: bool = False
    sleeps: bool = False
    reports: list[Any] = field(default_factory=lambda: [None])
    full: bool = False
    failing: dict[str, str] = field(default_factory=dict)
    begun: list[FakeServer] = field(default_factory=list)
    templates: list[FakeTemplate] = field(default_factory=list)
    templates_fail: bool = False
    pause_s: float = 0.0
    break_after: int | None = None
    warming: int = 200
    aborts: int = 0
    last_s: float = 0.0
    metrics: str = ""
    hung: set[str] = field(default_factory=set)
    holds_kv: bool = False
    loses_kv: bool = False
    pairs: int = 0
    weights: str = "same"

    def order_start(self, order: StartOrder) -> FakeServer | FakeTemplate:
        if order.template is not None:
            path = self.directory / "nobody.sock"
            self.templates.append(FakeTemplate(self, order, path))
            return self.templates[-1]
        if self.full:
            raise OSError(28, "No space left on device")
        path = self.directory / f"{len(self.begun)}.sock"
        server = FakeServer(self, order, path)
        self.begun.append(server)
        return server

    async def close(self) -> None:
        for server in self.begun:
            await server.ended

    def last(self, name: str) -> FakeServer:
        """Return the last started server of a model."""
        return [server for server in self.begun if server.launch.name == name][-1]

    async def begins(self, count: int) -> None:
        """Wait until `count` servers have started."""
        await wait_until(lambda: len(self.begun) >= count)


async def wait_until(condition: Any) -> None:
    """Run the loop until `condition()` is true; the suite's time limit ends a test that waits too long."""
    while not condition():
        await asyncio.sleep(0.002)


@dataclass
class Stage:
    """Listening gateway with a client."""

    url: str
    driver: Driver
    servers: FakeServers
    client: aiohttp.ClientSession
    server: uvicorn.Server

    def model(self, name: str) -> dict[str, Any]:
        """Return the status of one model."""
        status: Any = self.driver.status()
        return next(dict(model) for model in status["models"] if model["name"] == name)

    def post(self, **body: Any) -> Any:
        """Return a completion request, a context manager of aiohttp."""
        path = body.pop("path", "/v1/completions")
        return self.client.post(self.url + path, json=body)

    async def ask(self, **body: Any) -> tuple[int, Any, Any]:
        """Return status, headers and document of a completion."""
        async with self.post(**body) as answer:
            return answer.status, answer.headers, await answer.json()

    async def send(
        self, path: str, method: str = "POST", body: Any = None, **headers: str
    ) -> tuple[int, Any]:
        """Send a request, which has a document if it is a POST; return the status and the content of its answer."""
        document = (body or {}) if method == "POST" else None
        async with self.client.request(method, self.url + path, json=document, headers=headers) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())

    async def get(self, path: str) -> tuple[int, Any]:
        """Return the status and the content of the answer to a GET."""
        return await self.send(path, "GET")

    async def events(self, **body: Any) -> list[bytes]:
        """Return the non-empty lines of a stream."""
        async with self.post(stream=True, **body) as answer:
            return [line.rstrip() async for line in answer.content if line.strip()]

    def idle(self) -> bool:
        """Return whether no request is left."""
        said: Any = self.driver.status()
        return not said["requests"]["held"] and not said["requests"]["in_flight"] and not self.driver._tickets


async def serve(app: Gateway) -> tuple[GatewayServer, asyncio.Task[None], str]:
    """Serve an application on a free port: the server, its task, and its URL."""
    with listen(replace(app.endpoint, port=0)) as sock:
        server = create_server(app)
        # The server closes its own duplicate of the socket when it ends.
        run_server = asyncio.create_task(server.serve(sockets=[sock.dup()]))
        await wait_until(lambda: server.started)
        return server, run_server, format_url(sock, app.endpoint)


TWO = {"a": {"memory": 10, "start_s": 1.0, "aliases": ["alpha"]}, "b": {"memory": 10, "start_s": 1.0}}


def parsed(models: Any = None, **limits: Any) -> configuration.HostFile:
    """Parse a host file, with two models of 10 bytes in 15 bytes by default."""
    own = {"memory": 15, "policy": "lru", "backoff_s": 0.05, "runtime_template": False}
    return configuration.parse({**own, **limits, "models": models or TWO})


@asynccontextmanager
async def staged(
    directory: Path,
    models: Any = None,
    *,
    gateway: Any = None,
    hold: bool = False,
    template_bytes: int = 0,
    meter: MemoryMeter | None = None,
    **limits: Any,
) -> AsyncIterator[Stage]:
    """Yield a stage of the host file that `parsed` returns, and check afterwards that nothing remains."""
    servers = FakeServers(directory, hold=hold)
    driver = Driver(parsed(models, **limits), servers, meter=meter, template_bytes=template_bytes)
    server, run_server, url = await serve(
        Gateway(driver, routes=create_host_routes(driver), **(gateway or {}))
    )
    driver.begin()
    try:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as client:
            yield Stage(url, driver, servers, client, server)
    finally:
        driver.drain()
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await run_server
        await driver.close()
