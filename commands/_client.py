"""HTTP client of the commands that call a running host or fleet.

The client sends a key only to the origin that the user specified: it follows no redirects, sends no key through a proxy in
clear text, and reads no netrc file. Response sizes and times are bounded.
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
from coldstart.commands._output import Output, format_bytes

from coldstart.errors import CommandFailedError, UsageError

MAX_BYTES = 16 << 20
# A body of MAX_BYTES at the lowest accepted rate takes twice the window.
_WINDOW_S = 15.0


@dataclass(frozen=True, slots=True)
class HttpService:
    """Kind of server that a client calls, with the texts of its hints.

    `hint` is how to start or find a server. `key_option` is the option that supplies the operator's key.
    """

    name: str
    hint: str
    key_option: str


HOST = HttpService("host", "run `coldstart host MODEL...`, or pass --url URL", "--api-key-file FILE")
FLEET = HttpService("fleet", "run `coldstart fleet up --memory 60GiB`", "--admin-key-file FILE")


class ServerClient:
    """HTTP client of one running host or fleet."""

    def __init__(
        self,
        url: str,
        key_headers: Mapping[str, str],
        out: Output,
        *,
        wait_s: float,
        silent_s: float = _WINDOW_S,
        service: HttpService = HOST,
    ) -> None:
        """Create a client, and check the address and the key.

        Args:
            url: Address of the server.
            key_headers: Headers that contain a key; empty if no key is sent.
            out: Receives a warning if the key is sent without TLS.
            wait_s: Maximum time in seconds until the response headers arrive.
            silent_s: Maximum time in seconds until the first bytes of a body arrive, or to read a body of MAX_BYTES.
            service: Kind of server at `url`.

        Raises:
            UsageError: `url` is not http or https, the key is not a valid header value, or a proxy could read it in clear
                text.
        """
        self._url, self._key_headers, self._service = url.rstrip("/"), dict(key_headers), service
        origin = _parse_url(url)
        if key_headers:
            _check_key(origin, key_headers, out)
        bounds = HttpLimits(
            connect_s=10, headers_s=wait_s, stall_s=silent_s, min_bytes_per_s=MAX_BYTES / silent_s
        )
        self._http = HttpClient(bounds)

    def is_responding(self) -> bool:
        """Return whether the server responds to a health check, with any HTTP status."""
        try:
            return bool(self._request_body("GET", "/health")[0])
        except RemoteUnreachableError:
            return False

    def read_body(self, path: str) -> bytes:
        """Send a GET request and return the response body. Raises CommandFailedError unless the status is 200 or 202."""
        with self._explain_unreachable():
            status, body = self._request_body("GET", path)
            self._require_success(status, body)
        return body

    def call(
        self, path: str, payload: object = None, required_fields: Collection[str] = ()
    ) -> dict[str, Any]:
        """Send a GET request, or a POST request with `payload` as JSON, and return the JSON object of the response.

        Args:
            path: Path below the URL of the server.
            payload: JSON document to post; None sends a GET request.
            required_fields: Fields that the response of this kind of server contains.

        Raises:
            CommandFailedError: No server responds in time, a different kind of server responds, or it rejects the request.
        """
        body = None if payload is None else json.dumps(payload).encode()
        with self._explain_unreachable():
            status, content = self._request_body("GET" if body is None else "POST", path, body)
            document = self._require_success(status, content)
        if not document.keys() >= set(required_fields):
            raise self._describe_wrong_server(status)
        return document

    def stream(self, path: str) -> Iterator[bytes]:
        """Send a GET request and yield the chunks of the response as they arrive. Raises the errors of `call`."""
        with self._explain_unreachable(), self._send_request("GET", path, None) as response:
            if response.status != HTTPStatus.OK:
                self._require_success(response.status, response.read_up_to(MAX_BYTES))
            while chunk := response.read(MAX_BYTES):
                yield chunk

    @contextmanager
    def _explain_unreachable(self) -> Iterator[None]:
        try:
            yield
        except RemoteUnreachableError as error:
            raise CommandFailedError(
                f"no {self._service.name} responds at {self._url}: {error.message}",
                hint=self._service.hint,
            ) from error

    def _require_success(self, status: int, body: bytes) -> dict[str, Any]:
        """Return the JSON object of a successful response, or an empty one if the body is not a JSON object."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = {}
        document = document if isinstance(document, dict) else {}
        name, option = self._service.name, self._service.key_option
        if status in (HTTPStatus.OK, HTTPStatus.ACCEPTED):
            return document
        if status == HTTPStatus.UNAUTHORIZED:
            raise CommandFailedError(f"{self._url} requires a valid API key", hint=f"pass {option}")
        error = document.get("error")
        if not isinstance(error, dict) or "message" not in error:
            raise self._describe_wrong_server(status)
        command = f"coldstart {name} status --url {self._url}" + f" {option}" * bool(self._key_headers)
        hint = error.get("hint") or f"run `{command}`"
        # A client key was used. It does not grant access to the status either.
        if status == HTTPStatus.FORBIDDEN and self._service is HOST:
            hint = f"use {option} with the operator's key, or set admin = true for the client"
        raise CommandFailedError(f"the {name} refused the request: {error['message']}", hint=hint)

    def _describe_wrong_server(self, status: int) -> CommandFailedError:
        return CommandFailedError(
            f"{self._url} is not a coldstart {self._service.name} (HTTP status {status})",
            hint=f"pass the address of a coldstart {self._service.name} with --url URL",
        )

    def _request_body(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        response = self._send_request(method, path, body)
        content = response.read_up_to(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            url = redact_url(self._url + path)
            raise CommandFailedError(f"the response of {url} exceeds the limit of {format_bytes(MAX_BYTES)}")
        return response.status, content

    def _send_request(self, method: str, path: str, body: bytes | None) -> HttpResponse:
        url = self._url + path
        headers = self._key_headers
        if body is not None:
            headers = {**headers, "Content-Type": "application/json"}
        response = self._http.request(method, url, headers=headers, body=body, redirects=False)
        if 300 <= response.status < 400:
            response.close()
            target = redact_url(urljoin(url, response.headers.get("Location", "")))
            raise CommandFailedError(
                f"{redact_url(url)} redirects to {target} (status {response.status});"
                " redirects are not followed, because the key is only for the specified server",
                hint="pass an address that does not redirect with --url URL",
            )
        return response


def _parse_url(url: str) -> Origin:
    try:
        return parse_origin(url)
    except ValueError as error:
        raise UsageError(
            f"invalid --url {redact_url(url)}: {error}", hint="use --url http://HOST:PORT"
        ) from error


def _check_key(origin: Origin, key_headers: Mapping[str, str], out: Output) -> None:
    if not all(value.isascii() and value.isprintable() for value in key_headers.values()):
        raise UsageError("cannot send the API key: it contains a character that is not printable ASCII")
    if origin.can_receive_secrets:
        return
    if find_proxy(origin) is not None:
        raise UsageError(
            f"refusing to send the API key to {origin} in clear text through a proxy",
            hint=f"set NO_PROXY={origin.host}, or use an https:// address",
        )
    out.warn(f"the API key is sent to {origin} without TLS")
