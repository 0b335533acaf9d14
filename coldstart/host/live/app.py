"""HTTP endpoint: OpenAI's and vLLM's paths, routed by `model`.

POST  PASSED                  to the model's server
GET   /v1/models, /v1/models/{name}    all models and aliases, whether they are ready or not
GET   /health                 200, or 503 once the gateway is stopping; needs no key
GET   /metrics                Prometheus text
GET   /status                 the status document of the host or the fleet
POST  /upstream/NAME/PATH      to NAME's server, whatever model the body names; PATH is one of PASSED
GET   /ui                     the status as a page; the page contains no host data and needs no key

A host adds the routes of `host_routes`, a fleet those of its operators. vLLM routes that change a server (/sleep,
/v1/load_lora_adapter and similar) are not forwarded.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from coldstart.errors import UsageError
from coldstart.host.client_keys import ClientKey
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live import answers, ui
from coldstart.host.live.answers import Receive, Scope, Send
from coldstart.host.live.body import BodyMemory
from coldstart.host.live.exchange import Exchange
from coldstart.host.live.front import Front
from coldstart.host.live.site_policy import SitePolicy, allow_origins

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
READS = ("/load", "/ping", "/tokenizer_info", "/version")
"""Routes of vLLM without a model's name, which a host reads from its only or its default model."""
HEALTH = "/health"
MODELS = "/v1/models"
CLIENT = "coldstart.client"
"""Member of a scope: the client whose key the request has."""
OPEN = ("/", HEALTH, "/ui")
"""Paths that need no key: they reveal nothing about the models."""

HEARTBEAT_S = 5.0
UPSTREAM = "/upstream/"


def split_target(path: str, known: Iterable[str]) -> tuple[str, str] | None:
    """Return the model and the server's path in UPSTREAM + MODEL + PATH; None unless the path is one of `known`.

    A model's name may contain slashes, so the longest known path at the end is taken.
    """
    named = path.removeprefix(UPSTREAM)
    found = max((one for one in known if named.endswith(one)), key=len, default=None)
    return None if found is None or found == named else (named.removesuffix(found), found)


class Gateway:
    """ASGI application over one front.

    A key of `endpoint` is required everywhere except at OPEN and at the routes `more`, which have other keys. A
    client's own key opens the routes of models, and the others if the client is an admin. `routes` are additional routes
    that require a key; they replace routes with the same path. Requests without a key are checked by `SitePolicy`.
    """

    def __init__(
        self,
        front: Front,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        endpoint: GatewayEndpoint | None = None,
        routes: Sequence[Route] = (),
        more: Sequence[Route] = (),
    ) -> None:
        self.front, self.heartbeat_s = front, heartbeat_s
        self.endpoint = endpoint or GatewayEndpoint()
        self._key = None if self.endpoint.api_key is None else self.endpoint.api_key.encode()
        self._memory = BodyMemory(self.endpoint.limits)
        self._policy = SitePolicy(self.endpoint)
        self._entry = allow_origins(self._handle, self.endpoint.allow_origins)
        self._passed = frozenset(PASSED)
        self._keyed = frozenset(route.path for route in more)
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
                *more,
            ]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI scope."""
        await self._entry(scope, receive, send)

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._own(scope, receive, send)
        elif (refusal := self._find_refusal(scope)) is not None:
            await answers.send_error(send, *refusal)
        elif scope["path"] in self._passed:
            # Bypass the router: every request for tokens takes this path.
            if scope["method"] != "POST":
                allow = [(b"allow", b"POST")]
                await answers.send_error(send, 405, f"{scope['path']} takes POST", headers=allow)
                return
            await self._pass(scope, receive, send, None)
        elif (target := self._find_target(scope)) is not None:
            model, path = target
            await self._pass({**scope, "path": path, "raw_path": path.encode()}, receive, send, model)
        else:
            await self._other(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send, model: str | None) -> None:
        client: ClientKey | None = scope.get(CLIENT)
        keys = self.endpoint.client_keys
        # The rate comes before the body, which names the model: a client above its rate takes no memory for bodies.
        if client is not None and keys is not None and (wait_s := keys.admit(client)):
            self.front.metrics.count_client(client.name, "rate_limited")
            reason = f"the client {client.name} may send {client.requests_per_minute} requests per minute"
            await answers.send_error(send, 429, reason, retry_after_s=wait_s)
            return
        exchange = Exchange(
            self.front,
            scope,
            receive,
            send,
            memory=self._memory.create_body(scope),
            heartbeat_s=self.heartbeat_s,
            model=model,
            client=client,
            keys=keys,
        )
        await exchange.run()

    def _find_target(self, scope: Scope) -> tuple[str, str] | None:
        """Return model and path of a POST to UPSTREAM; None for any other request."""
        if scope["method"] != "POST" or not scope["path"].startswith(UPSTREAM):
            return None
        return split_target(scope["path"], PASSED)

    def _find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason for a request that the client may not send; None for any other."""
        path, given = scope["path"], dict(scope["headers"])
        key = _find_key(given)
        # A foreign page does not know a key, so a request with a key needs no other check.
        if path == HEALTH or path in self._keyed or self._is_own_key(key):
            return None
        if (client := self._find_client(key)) is not None:
            if client.admin or path in OPEN or self._is_for_models(scope):
                scope[CLIENT] = client
                return None
            return 403, f"the client {client.name} may use models only"
        if self.endpoint.requires_key and path not in OPEN:
            return 401, "the API key is missing or wrong"
        return self._policy.find_violation(scope, given)

    def _is_own_key(self, key: bytes) -> bool:
        return self._key is not None and hmac.compare_digest(key, self._key)

    def _find_client(self, key: bytes) -> ClientKey | None:
        keys = self.endpoint.client_keys
        return None if keys is None else keys.find(key)

    def _is_for_models(self, scope: Scope) -> bool:
        """Return whether a request asks for tokens, for the list of models, or for a read of a model's server."""
        path: str = scope["path"]
        known = path in self._passed or path in (*READS, MODELS) or path.startswith(f"{MODELS}/")
        return known or self._find_target(scope) is not None

    def refresh_keys(self) -> None:
        """Read the clients' keys again if their files have changed; log unknown models, or an error, which changes no key."""
        keys = self.endpoint.client_keys
        if keys is None:
            return
        try:
            changed = keys.refresh()
        except UsageError as error:
            self.front.log.say("client keys refused", reason=error.message)
            return
        for note in keys.describe_unknown_models(self.front.catalogue) if changed else ():
            self.front.log.say("client keys name no model", reason=note)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = any(route.matches(scope)[0].value for route in self._own.routes)
        if known:
            await self._own(scope, receive, send)
        else:
            await answers.send_error(send, 404, f"unknown path {scope['path']}")

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": self._cards(request)})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for card in self._cards(request):
            if card["id"] == name:
                return JSONResponse(card)
        return answers.not_found(f"The model `{name}` does not exist.")

    def _cards(self, request: Request) -> list[dict[str, Any]]:
        """Return model cards in vLLM's format, one for each name that the client may use.

        The host's model is the `root` of an alias and the `parent` of an adapter.
        """
        client: ClientKey | None = request.scope.get(CLIENT)
        cards = []
        for launch in self.front.catalogue.launches.values():
            if launch.unlisted or (client and not client.may_use(launch.name, self.front.catalogue)):
                continue
            seen = set()
            for name, _ in launch.names():
                if name in seen:
                    continue
                seen.add(name)
                card = {"id": name, "object": "model", "created": self._created, "owned_by": "coldstart"}
                parent = launch.name if name in launch.adapters else None
                cards.append({**card, "root": launch.name, "parent": parent, "permission": []})
        return cards

    async def _health(self, request: Request) -> Response:
        return Response(status_code=503 if self.front.facts.stopping else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(self.front.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _status(self, request: Request) -> Response:
        return JSONResponse(self.front.status())

    async def _root(self, request: Request) -> Response:
        return RedirectResponse("ui")

    async def _ui(self, request: Request) -> Response:
        return Response(ui.content(), media_type="text/html", headers=ui.headers())


def _find_key(given: Mapping[bytes, bytes]) -> bytes:
    """Return the key of a request: OpenAI's clients send the first header, Anthropic's (/v1/messages) the second."""
    return given.get(b"authorization", b"").removeprefix(b"Bearer ") or given.get(b"x-api-key", b"")
