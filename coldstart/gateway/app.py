"""The endpoint: OpenAI's paths and vLLM's, routed by `model`, and the host's own.

    POST  PASSED                  to the model's server
    GET   /v1/models, /v1/models/{name}    all that can be asked for, whether it serves now or not
    GET   /health                 200, or 503 once the host is stopping; asks for no key
    GET   /metrics                Prometheus text
    GET   /status                 the document of coldstart.host.status
    GET   /ui                     the same as a page; it holds nothing of the host, and asks for no key
    GET   /running                the models that hold memory, and in what state
    GET   /logs/{name}            the end of the log of that model's server, while it runs
    POST  /unload, /unload/{name}    all models, or that one, finish what they have and stop; the next request starts them again

What changes a server (vLLM's /sleep, /v1/load_lora_adapter and such) is not passed on.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from coldstart.gateway import answers, ui
from coldstart.gateway.answers import Receive, Scope, Send
from coldstart.gateway.driver import Driver
from coldstart.gateway.exchange import Exchange
from coldstart.gateway.front import Front

PASSED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/rerank",
    "/pooling",
    "/classify",
    "/tokenize",
    "/detokenize",
)
OPEN = ("/health", "/ui")
"""Asked for without a key: they say nothing of the models."""

HEARTBEAT_S = 5.0
# Of a server's log, in one answer.
LOG_TAIL = 64 << 10


class Gateway:
    """The ASGI application over one front. `api_key` is asked for everywhere but at OPEN; `more` are further
    routes, which ask for what they want themselves.
    """

    def __init__(
        self,
        driver: Front,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        api_key: str | None = None,
        more: Sequence[Route] = (),
    ) -> None:
        self.driver, self.heartbeat_s = driver, heartbeat_s
        self._key = None if api_key is None else api_key.encode()
        self._passed = frozenset(PASSED)
        self._open = frozenset((*OPEN, *(route.path for route in more)))
        self._made = int(time.time())
        self._own = Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/status", self._status),
                Route("/ui", self._ui),
                *(_HostRoutes(driver).routes() if isinstance(driver, Driver) else ()),
                *more,
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._own(scope, receive, send)
        elif not self._may(scope):
            await answers.send_error(send, 401, "the API key is missing or wrong")
        elif scope["path"] in self._passed:
            # Not by way of the router: this is the path of every token.
            if scope["method"] != "POST":
                await answers.send_error(send, 405, f"{scope['path']} takes POST")
                return
            await Exchange(self.driver, scope, receive, send, self.heartbeat_s).run()
        else:
            await self._other(scope, receive, send)

    def _may(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in self._open:
            return True
        given = dict(scope["headers"])
        # As OpenAI's clients say it, or as Anthropic's do, whose /v1/messages vLLM has.
        said = given.get(b"authorization", b"").removeprefix(b"Bearer ") or given.get(b"x-api-key", b"")
        return hmac.compare_digest(said, self._key)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = any(route.matches(scope)[0].value for route in self._own.routes)
        if known:
            await self._own(scope, receive, send)
        else:
            await answers.send_error(send, 404, f"there is no {scope['path']} here")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._cards()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in self._cards():
            if card["id"] == name:
                return JSONResponse(card)
        return _unknown(f"The model `{name}` does not exist.")

    def _cards(self) -> list[dict[str, Any]]:
        """As vLLM shows them: each name is a model; an alias's `root`, and an adapter's `parent`, is the host's model."""
        cards = []
        for launch in self.driver.catalogue.launches.values():
            if launch.unlisted:
                continue
            seen = set()
            for name, _ in launch.names():
                if name in seen:
                    continue
                seen.add(name)
                card = {"id": name, "object": "model", "created": self._made, "owned_by": "coldstart"}
                parent = launch.name if name in launch.adapters else None
                cards.append({**card, "root": launch.name, "parent": parent, "permission": []})
        return cards

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.driver.facts.stopping else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.driver.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self.driver.status())

    async def _ui(self, request: Request) -> Response:
        return HTMLResponse(ui.page(), headers={"Cache-Control": "no-cache"})


class _HostRoutes:
    """What only a host answers, whose servers are on this machine."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver

    def routes(self) -> list[Route]:
        """Where."""
        return [
            Route("/running", self._running),
            Route("/logs/{name:path}", self._logs),
            Route("/unload", self._unload, methods=["POST"]),
            Route("/unload/{name:path}", self._unload, methods=["POST"]),
        ]

    async def _running(self, request: Request) -> Response:
        residents = self.driver.core.residents
        found = [
            {"model": name, "state": str(model.state), "tier": model.tier.name}
            for name, model in residents.models.items()
            if residents.device.reserved(name)
        ]
        return JSONResponse({"running": found})

    async def _logs(self, request: Request) -> Response:
        residence = self.driver.residences.get(request.path_params["name"])
        if residence is None:
            return _unknown("No server of that model runs.")
        return PlainTextResponse(residence.server.tail(LOG_TAIL))

    async def _unload(self, request: Request) -> Response:
        name = request.path_params.get("name")
        if name is not None and name not in self.driver.core.models:
            return _unknown(f"The model `{name}` does not exist.")
        return JSONResponse({"unloading": self.driver.unload(name)})


def _unknown(reason: str) -> Response:
    return Response(answers.error(404, reason), status_code=404, media_type="application/json")
