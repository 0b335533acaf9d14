"""Requests of the command line to a running host or fleet.

A key goes to the origin that the user named: no redirect is followed, no proxy receives a key in clear text, and
no netrc is read. Bodies and times are bounded. This module does not interpret answers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urljoin

from coldstart.artifacts.net.http_client import Answer, Bounds, HttpClient, find_proxy
from coldstart.artifacts.net.origin import Origin, parse_origin, redact_url
from coldstart.commands._output import Output, human_bytes

from coldstart.errors import CommandFailedError, UsageError

MAX_BYTES = 16 << 20
# A body of MAX_BYTES at the lowest accepted rate takes twice the window.
_WINDOW_S = 15.0


@dataclass(frozen=True, slots=True)
class Reply:
    """Status and complete body of one response."""

    status: int
    body: bytes


class ServerClient:
    """Client of one server. `key` holds the headers that carry a key; they go to the origin of `url` alone."""

    def __init__(
        self,
        url: str,
        key: Mapping[str, str],
        out: Output,
        *,
        wait_s: float,
        silent_s: float = _WINDOW_S,
    ) -> None:
        """Check the address and the key.

        Args:
            url: Address of the server.
            key: Headers that carry a key, empty for none.
            out: Receives a warning where the key is not encrypted on the way.
            wait_s: Time until the status and headers of a response, in seconds.
            silent_s: Time in seconds that a body may take at its start, and MAX_BYTES take at most.

        Raises:
            UsageError: `url` is not http or https, the key cannot be a header, or a proxy would read it.
        """
        self._url = url.rstrip("/")
        self._key = dict(key)
        origin = _parse(url)
        if key:
            _check_key(origin, key, out)
        bounds = Bounds(connect_s=10, head_s=wait_s, window_s=silent_s, floor=MAX_BYTES / silent_s)
        self._http = HttpClient(bounds)

    @property
    def has_key(self) -> bool:
        """Return whether requests carry a key."""
        return bool(self._key)

    def get(self, path: str) -> Reply:
        """Return the response to a GET. Raises the errors of `post`."""
        return self._request("GET", path, None)

    def post(self, path: str, body: bytes = b"") -> Reply:
        """Return the response to a POST.

        Raises:
            RemoteUnreachableError: no response, or a broken or slow one.
            CommandFailedError: the response is a redirect or too large.
        """
        return self._request("POST", path, body)

    def follow(self, path: str) -> Iterator[Reply]:
        """Yield the chunks of a streamed response to a GET as they arrive, or one complete error.

        Raises the errors of `post`.
        """
        with self._ask("GET", path, None) as answer:
            if answer.status != HTTPStatus.OK:
                yield Reply(answer.status, answer.read_up_to(MAX_BYTES))
                return
            while part := answer.read(MAX_BYTES):
                yield Reply(answer.status, part)

    def _request(self, method: str, path: str, body: bytes | None) -> Reply:
        answer = self._ask(method, path, body)
        content = answer.read_up_to(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            url = redact_url(self._url + path)
            raise CommandFailedError(f"{url} sends more than {human_bytes(MAX_BYTES)}")
        return Reply(answer.status, content)

    def _ask(self, method: str, path: str, body: bytes | None) -> Answer:
        url = self._url + path
        headers = self._key if body is None else {**self._key, "Content-Type": "application/json"}
        answer = self._http.ask(method, url, headers=headers, body=body, redirects=False)
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
    if origin.may_hear_secrets:
        return
    if find_proxy(origin) is not None:
        raise UsageError(
            f"the key would go to {origin} in clear text through a proxy",
            hint=f"NO_PROXY={origin.host}, or an https:// address",
        )
    out.warn(f"the key goes to {origin} without TLS")
