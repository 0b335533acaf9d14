"""HTTP with a registry's authentication: Basic or a Bearer token, from the credentials that docker login
stored.

Plain HTTP is used for the local machine only; credentials go only to the registry and the token realm it
names.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import requests
from coldstart.artifacts import fields
from coldstart.artifacts.errors import BundleError, RemoteDenied, RemoteFailed

_LOCAL = re.compile(r"(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
_PARAMETER = re.compile(r'(\w+)="([^"]*)"')
_TIMEOUT = (10, 120)


class Session:
    """Requests to one repository; asks for a token once and keeps it."""

    def __init__(self, host: str, name: str) -> None:
        self._host, self._name = host, name
        self._http = requests.Session()
        self._authorization: str | None = None

    def base(self, host: str) -> str:
        """Scheme and host."""
        return f"{'http' if _LOCAL.fullmatch(host) else 'https'}://{host}"

    def ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        data: object = None,
        stream: bool = False,
    ) -> requests.Response:
        """One request, repeated once with credentials if the registry asks.

        Raises RemoteDenied, RemoteFailed.
        """
        answer = self._send(method, url, headers, data, stream)
        if answer.status_code == 401 and self._authorization is None:
            self._authorization = self._authorize(answer)
            answer = self._send(method, url, headers, data, stream)
        if answer.status_code in (401, 403):
            raise RemoteDenied(f"{self._host} denies {method} on {self._name}")
        return answer

    def _send(
        self, method: str, url: str, headers: Mapping[str, str] | None, data: object, stream: bool
    ) -> requests.Response:
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if self._authorization and url.startswith(f"{self.base(self._host)}/"):
            sent["Authorization"] = self._authorization
        try:
            return self._http.request(
                method,
                url,
                headers=sent,
                data=data,  # type: ignore[arg-type]
                stream=stream,
                timeout=_TIMEOUT,
            )
        except requests.RequestException as error:
            if isinstance(error.__context__, BundleError):
                raise error.__context__ from error
            raise RemoteFailed(f"{self._host} cannot be reached: {type(error).__name__}") from error

    def _authorize(self, answer: requests.Response) -> str:
        challenge = answer.headers.get("WWW-Authenticate", "")
        scheme, _, rest = challenge.partition(" ")
        known = _credentials(self._host)
        if scheme.lower() == "basic" and known:
            return f"Basic {known}"
        if scheme.lower() == "bearer":
            return f"Bearer {self._token(dict(_PARAMETER.findall(rest)), known)}"
        raise RemoteDenied(f"{self._host} wants credentials and none are stored")

    def _token(self, challenge: Mapping[str, str], known: str | None) -> str:
        realm = challenge.get("realm", "")
        where = urlsplit(realm)
        if where.scheme != "https" and not (where.scheme == "http" and _LOCAL.fullmatch(where.netloc)):
            raise RemoteDenied(f"{self._host} names a token realm that is not https")
        query = {"service": challenge.get("service", ""), "scope": f"repository:{self._name}:pull,push"}
        headers = {"Authorization": f"Basic {known}"} if known else None
        answer = self._send("GET", f"{realm}?{urlencode(query)}", headers, None, False)
        if answer.status_code != 200:
            raise RemoteDenied(f"{self._host} gives no token for {self._name}")
        try:
            body = fields.mapping(answer.json(), "token")
        except ValueError as error:
            raise RemoteDenied(f"{self._host} answers with a token that is not JSON") from error
        return str(body.get("token") or body.get("access_token") or "")


def _credentials(host: str) -> str | None:
    directory = os.environ.get("DOCKER_CONFIG")
    path = (Path(directory) if directory else Path.home() / ".docker") / "config.json"
    try:
        found = json.loads(path.read_text())["auths"][host]["auth"]
        base64.b64decode(found, validate=True)
    except (OSError, KeyError, TypeError, ValueError):
        return None  # No stored login; the registry decides whether it serves anonymous readers.
    return str(found)
