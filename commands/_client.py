"""Requests of the command line to a running host or fleet.

A key goes to the origin that the user named: no redirect is followed, no proxy receives a key in clear text, and
no netrc is read. Bodies and times are bounded.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urljoin

from coldstart.artifacts.net.http_client import (
    HttpClient,
    HttpLimits,
    HttpResponse,
    RemoteUnreachableError,
    find_proxy,
)
from coldstart.artifacts.net.origin import Origin, parse_origin, redact_url
from coldstart.commands._output import Output, human_bytes

from coldstart.errors import CommandFailedError, UsageError

MAX_BYTES = 16 << 20
# A body of MAX_BYTES at the lowest accepted rate takes twice the window.
_WINDOW_S = 15.0


@dataclass(frozen=True, slots=True)
class Service:
    """What a client calls: its name, the command that starts it, and the option with the key of its operator."""

    name: str
    start: str
    key_option: str


HOST = Service("host", "coldstart host MODEL..., or --url URL", "--api-key-file FILE")
FLEET = Service("fleet", "coldstart fleet up --memory 60GiB", "--admin-key-file FILE")


class ServerClient:
    """Client of one host or fleet. `key` holds the headers that carry a key; they go to the origin of `url` alone."""

    def __init__(
        self,
        url: str,
        key: Mapping[str, str],
        out: Output,
        *,
        wait_s: float,
        silent_s: float = _WINDOW_S,
        service: Service = HOST,
    ) -> None:
        """Check the address and the key.

        Args:
            url: Address of the server.
            key: Headers that carry a key, empty for none.
            out: Receives a warning where the key is not encrypted on the way.
            wait_s: Time until the status and headers of a response, in seconds.
            silent_s: Time in seconds that a body may take at its start, and MAX_BYTES take at most.
            service: What answers at the address.

        Raises:
            UsageError: `url` is not http or https, the key cannot be a header, or a proxy would read it.
        """
        self._url, self._key, self._service = url.rstrip("/"), dict(key), service
        origin = _parse(url)
        if key:
            _check_key(origin, key, out)
        bounds = HttpLimits(
            connect_s=10, headers_s=wait_s, stall_s=silent_s, min_bytes_per_s=MAX_BYTES / silent_s
        )
        self._http = HttpClient(bounds)

    def responds(self) -> bool:
        """Return whether the server responds at all."""
        try:
            return bool(self._complete("GET", "/health")[0])
        except RemoteUnreachableError:
            return False

    def read(self, path: str) -> bytes:
        """Return the body of a successful response to a GET. Raises CommandFailedError for any other."""
        with self._explaining():
            status, body = self._complete("GET", path)
            self._require_success(status, body)
        return body

    def call(self, path: str, order: object = None, members: Collection[str] = ()) -> dict[str, Any]:
        """Return the document of a successful response to a GET, or to a POST of `order`, which has these members.

        Raises:
            CommandFailedError: No server responds in time, another one does, or it refuses, with its reason and hint.
        """
        body = None if order is None else json.dumps(order).encode()
        with self._explaining():
            status, answer = self._complete("GET" if body is None else "POST", path, body)
            found = self._require_success(status, answer)
        if not found.keys() >= set(members):
            raise self._find_other(status)
        return found

    def follow(self, path: str) -> Iterator[bytes]:
        """Yield the chunks of a streamed response to a GET as they arrive. Raises the errors of `call`."""
        with self._explaining(), self._ask("GET", path, None) as answer:
            if answer.status != HTTPStatus.OK:
                self._require_success(answer.status, answer.read_up_to(MAX_BYTES))
            while part := answer.read(MAX_BYTES):
                yield part

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except RemoteUnreachableError as error:
            raise CommandFailedError(
                f"no {self._service.name} responds at {self._url}: {error.message}", hint=self._service.start
            ) from error

    def _require_success(self, status: int, body: bytes) -> dict[str, Any]:
        """Return the document of a successful response; empty if it is not a JSON object."""
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = {}
        found = found if isinstance(found, dict) else {}
        name, option = self._service.name, self._service.key_option
        if status in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
            return found
        if status == HTTPStatus.UNAUTHORIZED:
            raise CommandFailedError(f"{self._url} refused the key, or requires one", hint=option)
        error = found.get("error")
        if not isinstance(error, dict) or "message" not in error:
            raise self._find_other(status)
        hint = error.get("hint") or f"coldstart {name} status --url {self._url}" + f" {option}" * bool(
            self._key
        )
        # The key is that of a client, and the status would be refused, too.
        if status == HTTPStatus.FORBIDDEN and self._service is HOST:
            hint = f"{option} with the operator's key, or set admin = true for the client"
        raise CommandFailedError(f"the {name} refused the request: {error['message']}", hint=hint)

    def _find_other(self, status: int) -> CommandFailedError:
        return CommandFailedError(
            f"{self._url} is not a {self._service.name} (HTTP status {status})", hint="--url URL"
        )

    def _complete(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        answer = self._ask(method, path, body)
        content = answer.read_up_to(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            url = redact_url(self._url + path)
            raise CommandFailedError(f"{url} sends more than {human_bytes(MAX_BYTES)}")
        return answer.status, content

    def _ask(self, method: str, path: str, body: bytes | None) -> HttpResponse:
        url = self._url + path
        headers = self._key if body is None else {**self._key, "Content-Type": "application/json"}
        answer = self._http.request(method, url, headers=headers, body=body, redirects=False)
        if 300 <= answer.status < 400:
            answer.close()
            target = redact_url(urljoin(url, answer.headers.get("Location", "")))
            raise CommandFailedError(
                f"{redact_url(url)} redirects to {target} (status {answer.status});"
                " redirects are not followed, because a key goes to the named server alone",
                hint="use the address that does not redirect: --url URL",
            )
        return answer


def _parse(url: str) -> Origin:
    try:
        return parse_origin(url)
    except ValueError as error:
        raise UsageError(
            f"invalid --url {redact_url(url)}: {error}", hint="--url http://HOST:PORT"
        ) from error


def _check_key(origin: Origin, key: Mapping[str, str], out: Output) -> None:
    if not all(value.isascii() and value.isprintable() for value in key.values()):
        raise UsageError("the key contains a character that is not printable ASCII")
    if origin.can_receive_secrets:
        return
    if find_proxy(origin) is not None:
        raise UsageError(
            f"the key would go to {origin} in clear text through a proxy",
            hint=f"NO_PROXY={origin.host}, or an https:// address",
        )
    out.warn(f"the key goes to {origin} without TLS")
