"""Access control of a gateway: requests are checked by API key or, if none is required, by their Host and Origin headers.

A web page from another site can make a browser send requests to a gateway, but it cannot choose the Host and Origin
headers. Unless the gateway allows its origin (CORS), the page can send neither JSON nor a header that contains a key.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address

from starlette.middleware.cors import CORSMiddleware

from coldstart.errors import UsageError
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.events import Failure
from coldstart.host.live.log import describe_failure
from coldstart.host.live.messages import Receive, Scope, Send
from coldstart.host.live.request_router import RequestRouter
from coldstart.system.secrets import normalize_scheme

FORWARDED_PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
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
READ_PATHS = ("/load", "/ping", "/tokenizer_info", "/version")
"""Paths of vLLM's server without a model name. A host reads them from its default model, or from its only model."""
HEALTH = "/health"
MODELS = "/v1/models"
OPEN = ("/", HEALTH, "/ui", "/ui/")
"""Paths that require no key, because they reveal nothing about the models."""
KEY_HEADERS = (b"authorization", b"x-api-key", b"x-coldstart-admin-key")
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
JSON = b"application/json"

Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def allow_origins(app: Application, origins: Sequence[str]) -> Application:
    """Wrap `app` so that web pages from these origins can read its responses (CORS)."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=[origin.lower() for origin in origins],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # OpenAI's and Anthropic's clients send headers of their own
        expose_headers=["Retry-After", "Server-Timing", "X-Coldstart-Mode", "X-Request-Id"],
    )


def _show(value: bytes) -> str:
    return repr(value[:200].decode("ascii", errors="replace"))


def _proves_consent(headers: Mapping[bytes, bytes]) -> bool:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return kind == JSON or any(name in headers for name in KEY_HEADERS)


CLIENT = "coldstart.client"
"""Key in an ASGI scope for the client whose API key the request contains."""


class AccessControl:
    """Access control of one gateway. Requests to the paths in `keyed` pass, because their handlers check a separate key."""

    def __init__(self, router: RequestRouter, endpoint: GatewayEndpoint, keyed: frozenset[str]) -> None:
        self.router, self.endpoint, self._keyed = router, endpoint, keyed
        self._key = None if endpoint.api_key is None else endpoint.api_key.encode()
        self._names = {"localhost", endpoint.host.lower(), *(name.lower() for name in endpoint.allow_hosts)}
        self._origins = {origin.lower().encode() for origin in endpoint.allow_origins}

    def find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return the HTTP status and reason for rejecting a request, or None if the request is allowed."""
        path, given = scope["path"], dict(scope["headers"])
        # OpenAI clients send the first header, Anthropic clients (/v1/messages) the second.
        key = normalize_scheme(given.get(b"authorization", b"")).removeprefix(b"Bearer ")
        key = key or given.get(b"x-api-key", b"")
        # A foreign web page does not know a key, so a request with a valid key needs no other check.
        is_own = self._key is not None and hmac.compare_digest(key, self._key)
        if path == HEALTH or path in self._keyed or is_own:
            return None
        keys = self.endpoint.client_keys
        if keys is not None and (client := keys.find(key)) is not None:
            scope[CLIENT] = client
            if (
                client.admin
                or path in (*OPEN, *FORWARDED_PATHS, *READ_PATHS, MODELS)
                or path.startswith(f"{MODELS}/")
            ):
                return None
            return 403, f"client {client.name} has no admin access"
        if self.endpoint.requires_key and path not in OPEN:
            return 401, "the API key is missing or wrong"
        return self._find_violation(scope, given)

    def _find_violation(self, scope: Scope, headers: Mapping[bytes, bytes]) -> tuple[int, str] | None:
        """Return the HTTP status and reason for rejecting a request without a key, or None if the request is allowed."""
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None and not self._accepts_host(host):
            return 421, f"the Host header {_show(host)} is not allowed here (allow it with --allow-host)"
        if origin is not None and origin not in self._origins and origin.partition(b"://")[2] != host:
            return 403, f"web pages of {_show(origin)} may not use this gateway (add --allow-origin)"
        if scope["method"] not in SAFE_METHODS and not _proves_consent(headers):
            return 415, "the request lacks the header Content-Type: application/json"
        return None

    def _accepts_host(self, host: bytes) -> bool:
        """Return whether a Host header names this gateway.

        Any IP address is accepted, because a foreign page can rebind only a name to the gateway's address (DNS rebinding).
        """
        text = host.decode("latin-1").lower()
        bracketed = text.startswith("[")
        name = text[1:].partition("]")[0] if bracketed else text.partition(":")[0].removesuffix(".")
        with suppress(ValueError):
            ip_address(name)
            return True
        return name in self._names or "*" in self._names

    def reload_changed_keys(self) -> None:
        """Reload the client keys if their files have changed."""
        keys = self.endpoint.client_keys
        if keys is not None and keys.have_changed():
            self.reload_keys()

    def reload_keys(self) -> Failure | None:
        """Reload the client keys, if any. Log exposed key files and unknown models.

        Return the failure if a file cannot be used, else None. After a failure, the previous keys remain valid, and the
        log and the status show the error.
        """
        facts, log, keys = self.router.facts, self.router.log, self.endpoint.client_keys
        if keys is None:
            return None
        try:
            keys.reload()
        except UsageError as error:
            failure = describe_failure(error)
            facts.client_keys_error = str(failure)
            log.write("client keys refused", reason=facts.client_keys_error)
            return failure
        facts.client_keys_error = ""
        log.write("client keys read", clients=[client.name for client in keys.clients])
        for note in keys.describe_exposed_files():
            log.write("client key exposed", reason=note)
        for note in keys.describe_unknown_models(self.router.catalogue):
            log.write("client keys name no model", reason=note)
        return None
