"""HTTP application of a gateway, which serves API paths of OpenAI and vLLM and routes requests by their `model` field.

POST  FORWARDED_PATHS         forwarded to the model's server
GET   /v1/models, /v1/models/{name}    all models and aliases, whether they are ready or not
GET   /health                 200, or 503 once the gateway is stopping; requires no key
GET   /metrics                Prometheus text
GET   /status                 the status document of the host or the fleet
GET   /ui                     the status as a web page; requires no key

Invariant: the web page contains no data about the host. It reads all data from /status, with an API key that the user
enters if the host requires one. Its content security policy allows no other connections and only its own scripts.

A host adds the routes in `host_routes`, and a fleet those in `fleet.live.admin`. vLLM routes that change a server (/sleep,
/v1/load_lora_adapter and similar) are not forwarded.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from coldstart.host.endpoint import ClientKey, GatewayEndpoint
from coldstart.host.live import messages
from coldstart.host.live.access_control import CLIENT, FORWARDED_PATHS, AccessControl, allow_origins
from coldstart.host.live.exchange import Exchange
from coldstart.host.live.messages import BodyMemory, Receive, Scope, Send
from coldstart.host.live.request_router import RequestRouter


@cache
def read_status_page() -> tuple[bytes, dict[str, str]]:
    """Return the status page as one HTML document, and response headers that forbid embedding it in other pages."""
    text = files(__package__).joinpath("ui.html").read_text(encoding="utf-8")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = (
        f"default-src 'none'; connect-src 'self'; script-src {allowed}; style-src 'unsafe-inline';"
        " base-uri 'none'; form-action 'none'"
    )
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return text.replace("<!--policy-->", escape(policy, quote=False), 1).encode(), headers


HEARTBEAT_S = 5.0


class Gateway:
    """ASGI application of a gateway. `router` admits its requests to a host or a fleet.

    If the endpoint has an API key, it is required for all paths except OPEN and the routes in `more`, which check
    separate keys. A client's key grants access to the model paths, and to all other paths if the client has admin access.
    `routes` are additional routes that require a key and replace routes with the same path. Requests without a key are
    checked by their Host and Origin headers.
    """

    def __init__(
        self,
        router: RequestRouter,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        endpoint: GatewayEndpoint | None = None,
        routes: Sequence[Route] = (),
        more: Sequence[Route] = (),
    ) -> None:
        self.router, self.heartbeat_s = router, heartbeat_s
        self.endpoint = endpoint or GatewayEndpoint()
        self._memory = BodyMemory(self.endpoint.limits)
        self.access = AccessControl(router, self.endpoint, frozenset(route.path for route in more))
        self._entry = allow_origins(self._handle, self.endpoint.allow_origins)
        self._passed = frozenset(FORWARDED_PATHS)
        self._created = int(time.time())
        self._own = Starlette(
            routes=[
                *routes,
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/status", self._status),
                Route("/", self._root),
                Route("/ui", self._ui),
                Route("/ui/", self._move_to_ui),
                *more,
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._own(scope, receive, send)
        elif (refusal := self.access.find_refusal(scope)) is not None:
            self.router.facts.refused[refusal[0]] += 1
            await messages.build_error_response(*refusal)(scope, receive, send)
        elif scope["path"] in self._passed:
            # Bypass the router: every request for tokens takes this path.
            if scope["method"] == "POST":
                await Exchange(self.router, scope, receive, send, self._memory, self.heartbeat_s).run()
            else:
                refused = messages.build_error_response(
                    405, f"{scope['path']} requires POST", headers={"allow": "POST"}
                )
                await refused(scope, receive, send)
        elif any(route.matches(scope)[0].value for route in self._own.routes):
            await self._own(scope, receive, send)
        else:
            await messages.build_error_response(404, f"unknown path {scope['path']}")(scope, receive, send)

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._cards(request)})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in self._cards(request):
            if card["id"] == name:
                return JSONResponse(card)
        return messages.build_error_response(404, f"The model `{name}` does not exist.")

    def _cards(self, request: Request) -> list[dict[str, Any]]:
        """Return model cards in vLLM's format, one for each model name that the client may use.

        The `root` of each card is the host's model, which is also the `parent` of an adapter. A length that vLLM derives from
        the model is not known here.
        """
        client: ClientKey | None = request.scope.get(CLIENT)
        cards = []
        for launch in self.router.catalogue.launches.values():
            if launch.unlisted or (client and not client.may_use(launch.name, self.router.catalogue)):
                continue
            for name in dict(launch.names()):
                card = {"id": name, "object": "model", "created": self._created, "owned_by": "coldstart"}
                if length := launch.args.get_integer("max_model_len", 0):
                    card |= {"max_model_len": length}
                parent = launch.name if name in launch.adapters else None
                cards.append({**card, "root": launch.name, "parent": parent, "permission": []})
        return cards

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.router.facts.stopping else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(
            self.router.metrics.format_text(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self.router.status())

    async def _root(self, request: Request) -> Response:
        return RedirectResponse("ui")

    async def _move_to_ui(self, request: Request) -> Response:
        query = request.url.query
        return RedirectResponse("../ui" + (f"?{query}" if query else ""))

    async def _ui(self, request: Request) -> Response:
        page, headers = read_status_page()
        return Response(page, media_type="text/html", headers=headers)
