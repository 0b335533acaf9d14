"""Authenticated requests to a registry: Basic or Bearer, with the credentials of `docker login`.

Only a challenge of the registry itself is accepted, not one after a redirect. The token realm must be the registry's
host, its parent domain, or a host in COLDSTART_TOKEN_REALMS (comma-separated).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from urllib.parse import urlencode, urlsplit

from coldstart.artifacts import canonical, credentials
from coldstart.artifacts.credentials import Login
from coldstart.artifacts.errors import BundleError, RemoteDeniedError, RemoteFailedError
from coldstart.artifacts.net import origin
from coldstart.artifacts.net.http_client import HttpClient, HttpResponse, Secret

REALMS_VARIABLE = "COLDSTART_TOKEN_REALMS"
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_TOKEN = re.compile(r"[\x21-\x7e]{1,32768}")
_TOKEN_CAP = 128 << 10
_READS = frozenset({"GET", "HEAD"})


class RegistrySession:
    """HTTP session for one repository. It requests a pull or push token when the registry sends a challenge."""

    def __init__(self, host: str, name: str) -> None:
        self._host, self._name, self._client = host, name, HttpClient()
        # Plain HTTP is used only on this machine.
        scheme = "http" if origin.parse_origin(f"http://{host}").is_loopback else "https"
        self.base = f"{scheme}://{'registry-1.docker.io' if host == 'docker.io' else host}"
        self._origin = origin.parse_origin(self.base)
        self._secret: Secret | None = None

    def request(
        self, method: str, url: str, *, headers: Mapping[str, str] | None = None, body: object = None
    ) -> HttpResponse:
        """Send a request and return the response. If the registry itself sends a challenge, repeat it once with credentials.

        Raises RemoteDeniedError, RemoteFailedError.
        """
        answer = self._send(method, url, headers, body)
        if (
            answer.status == 401
            and not answer.was_redirected
            and origin.parse_origin(answer.url) == self._origin
        ):
            answer.close()
            self._secret = Secret(self._origin, {"Authorization": self._authorize(answer, method)})
            answer = self._send(method, url, headers, body)
        if answer.status in (401, 403):
            answer.close()
            where = f", to which {self._host} redirects," if answer.was_redirected else ""
            raise RemoteDeniedError(
                f"{origin.parse_origin(answer.url).host}{where} denies {method} on {self._name}"
            )
        return answer

    def _send(self, method: str, url: str, headers: Mapping[str, str] | None, body: object) -> HttpResponse:
        try:
            return self._client.request(method, url, headers=headers, secret=self._secret, body=body)
        except RemoteFailedError as error:
            raise RemoteFailedError(f"{self._host} cannot be reached: {error.message}") from error

    def _authorize(self, answer: HttpResponse, method: str) -> str:
        scheme, _, rest = answer.headers.get("WWW-Authenticate", "").partition(" ")
        login = credentials.find_login(self._host)
        if scheme.lower() == "basic" and login and login.basic_authorization:
            return login.basic_authorization
        if scheme.lower() == "bearer":
            actions = "pull" if method in _READS else "pull,push"
            return f"Bearer {self._fetch_token(dict(_PARAMETER.findall(rest)), login, actions)}"
        raise RemoteDeniedError(f"{self._host} requires credentials, but none are stored")

    def _fetch_token(self, challenge: Mapping[str, str], login: Login | None, actions: str) -> str:
        address = challenge.get("realm", "")
        realm = self._parse_realm(address)
        scope = {"service": challenge.get("service", ""), "scope": f"repository:{self._name}:{actions}"}
        try:
            if login and login.identity_token:
                form = {"grant_type": "refresh_token", "client_id": "coldstart"}
                form |= {"refresh_token": login.identity_token} | scope
                headers = {"Content-Type": "application/x-www-form-urlencoded"}
                body = urlencode(form).encode()
                answer = self._client.request("POST", address, headers=headers, body=body)
            else:
                secret = None
                if login and login.basic_authorization:
                    secret = Secret(realm, {"Authorization": login.basic_authorization})
                address += f"{'&' if '?' in address else '?'}{urlencode(scope)}"
                answer = self._client.request("GET", address, secret=secret, redirects=False)
            status, data = answer.status, answer.read_up_to(_TOKEN_CAP + 1)
        except RemoteFailedError as error:
            raise RemoteDeniedError(f"{realm} returned no token for {self._name}: {error.message}") from error
        if status != 200:
            raise RemoteDeniedError(f"{realm} returned no token for {self._name}: HTTP status {status}")
        return _extract_token(data, str(realm))

    def _parse_realm(self, address: str) -> origin.Origin:
        allowed = [name.strip() for name in os.environ.get(REALMS_VARIABLE, "").split(",")]
        hint = f"set {REALMS_VARIABLE}={urlsplit(address).hostname or 'HOST'}, or run `docker login {self._host}`"
        try:
            realm = origin.parse_origin(address)
        except ValueError as error:
            raise RemoteDeniedError(f"the token realm of {self._host} is not a valid URL") from error
        if not realm.can_receive_secrets:
            raise RemoteDeniedError(f"the token realm of {self._host} does not use https")
        if not origin.may_receive_credentials(realm, self._origin, allowed):
            raise RemoteDeniedError(
                f"the token realm {realm} is on another host than {self._host}", hint=hint
            )
        return realm


def _extract_token(data: bytes, realm: str) -> str:
    try:
        document = canonical.decode(data, object, max_bytes=_TOKEN_CAP, source="token")
    except BundleError as error:
        raise RemoteDeniedError(f"{realm} returned a token response that is not JSON") from error
    members = document if isinstance(document, dict) else {}
    token = members.get("token") or members.get("access_token")
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise RemoteDeniedError(f"{realm} returned a token response without a valid token")
    return token
