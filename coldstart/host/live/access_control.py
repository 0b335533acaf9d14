"""Access to a gateway, by its own key, by a client's key, or without a key as `SitePolicy` permits."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from coldstart.errors import UsageError
from coldstart.host.client_keys import ClientKey
from coldstart.host.endpoint import GatewayEndpoint
from coldstart.host.live.answers import Scope
from coldstart.host.live.explanation import explain
from coldstart.host.live.front import Front
from coldstart.host.live.gateway_paths import HEALTH, MODELS, OPEN, PASSED, READS, find_target
from coldstart.host.live.site_policy import SitePolicy

CLIENT = "coldstart.client"
"""Member of a scope: the client whose key the request has."""


class AccessControl:
    """Access to one gateway. The paths `keyed` have keys of their own, which are not checked here."""

    def __init__(self, front: Front, endpoint: GatewayEndpoint, keyed: frozenset[str]) -> None:
        self.front, self.endpoint, self._keyed = front, endpoint, keyed
        self._key = None if endpoint.api_key is None else endpoint.api_key.encode()
        self._policy = SitePolicy(endpoint)

    def find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        """Return status and reason for a request that the client may not send; None for any other."""
        path, given = scope["path"], dict(scope["headers"])
        key = _find_key(given)
        # A foreign page does not know a key, so a request with a key needs no other check.
        if path == HEALTH or path in self._keyed or self._is_own_key(key):
            return None
        if (client := self._find_client(key)) is not None:
            scope[CLIENT] = client
            if client.admin or path in OPEN or _is_for_models(scope):
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

    def refresh_keys(self) -> None:
        """Read the clients' keys again if their files have changed."""
        keys = self.endpoint.client_keys
        if keys is not None and keys.have_changed():
            self.read_keys()

    def read_keys(self) -> str:
        """Read the clients' keys again, if there are any; log exposed key files and unknown models.

        Return why the files cannot be used, else an empty text. The former keys then remain, and log and status show it.
        """
        facts, log, keys = self.front.facts, self.front.log, self.endpoint.client_keys
        if keys is None:
            return ""
        try:
            found = {kind: names for kind, names in keys.read().items() if names}
        except UsageError as error:
            facts.client_keys_error = explain(error) or error.message
            log.say("client keys refused", reason=facts.client_keys_error)
            return facts.client_keys_error
        facts.client_keys_error = ""
        if found:
            log.say("client keys read", **found)
        for note in keys.describe_exposed_files():
            log.say("client key exposed", reason=note)
        for note in keys.describe_unknown_models(self.front.catalogue):
            log.say("client keys name no model", reason=note)
        return ""


def _is_for_models(scope: Scope) -> bool:
    """Return whether a request asks for tokens, for the list of models, or for a read of a model's server."""
    path: str = scope["path"]
    known = path in (*PASSED, *READS, MODELS) or path.startswith(f"{MODELS}/")
    return known or find_target(scope) is not None


def _find_key(given: Mapping[bytes, bytes]) -> bytes:
    """Return the key of a request: OpenAI's clients send the first header, Anthropic's (/v1/messages) the second."""
    return given.get(b"authorization", b"").removeprefix(b"Bearer ") or given.get(b"x-api-key", b"")
