"""Sources of weights, which read byte ranges of named files: directory, HTTP server, Hugging Face Hub, S3-compatible store.

Each stream opens its own source, so a source need not be thread-safe. SourceUnavailableError is temporary, and the read
is retried. SourceUnusableError is permanent.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from coldstart.artifacts import files
from coldstart.artifacts.net.origin import parse_origin, redact_url
from coldstart.contract.environment import AWS_ENDPOINT, AWS_ENDPOINT_URL
from coldstart.system import paths

SCHEMES = ("http", "https", "s3", "hf")
Count = Callable[[int], None]


class SourceUnavailableError(Exception):
    """Error for a source that did not respond or closed the connection. A retry may succeed."""


class SourceTooSlowError(SourceUnavailableError):
    """Error for a source that sends fewer bytes per second than the minimum. The read is not retried immediately."""


class SourceUnusableError(Exception):
    """Error for a permanent failure of a source: a missing file, no byte ranges, a different size or no permission."""


class RangeSource(Protocol):
    """Source from which byte ranges of files are read."""

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Fill `buffer` from byte `start` of file `name`.

        Return the number of bytes that arrived before the connection ended.

        Args:
            name: File name.
            size: Size of the file in bytes.
            start: Offset of the first byte.
            buffer: Memory for the bytes.
            count: Called with each number of received bytes.

        Raises:
            SourceUnavailableError: No byte arrived.
            SourceUnusableError: The source cannot provide the range.
        """

    def close(self) -> None:
        """Close the connections."""


def is_local(address: str) -> bool:
    """Return whether the address is a directory on this machine."""
    return address.partition("://")[0] not in SCHEMES


def normalize_address(address: str) -> str:
    """Return the address in the prefetcher's form: an absolute path for a directory, otherwise without a trailing slash."""
    return str(paths.expand_user(address).absolute()) if is_local(address) else address.rstrip("/")


def compute_weights_key(address: str, plan: bytes) -> str:
    """Return the name (32 hexadecimal digits) of the weights of a normalized source and a plan, given as JSON."""
    return hashlib.sha256(address.encode() + b"\n" + plan).hexdigest()[:32]


def redact_address(address: str) -> str:
    """Return the address for use in messages: without user, password and query, which may contain a signature."""
    return address if is_local(address) else redact_url(address)


class LocalSource:
    """Source that reads files of a local directory into the page cache, which is the copy that all clients map."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open: dict[str, int] = {}

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        path = self.directory / name
        try:
            if name not in self._open:
                self._open[name] = files.open_descriptor(path)
            descriptor = self._open[name]
            if (actual := os.fstat(descriptor).st_size) != size:
                raise SourceUnusableError(f"{path} has {actual} bytes, but the weights plan expects {size}")
            # Request the full range from the disk at once: the kernel's readahead would send many short requests.
            os.posix_fadvise(descriptor, start, len(buffer), os.POSIX_FADV_WILLNEED)
            got = os.preadv(descriptor, [buffer], start)
        except OSError as error:
            raise SourceUnusableError(f"cannot read {path}: {error.strerror}") from error
        if not got:
            raise SourceUnusableError(f"{path} was truncated while it was read")
        count(got)
        return got

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class ObjectSource:
    """Source of objects under s3://bucket/prefix. The client's AWS_* variables set the endpoint, region and credentials."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise SourceUnusableError(f"{address} requires obstore: run `coldstart install s3`") from error
        bucket, _, self._prefix = address.partition("://")[2].partition("/")
        config: Any = {key: value for key, value in environment.items() if key.startswith("AWS_")}
        endpoint = AWS_ENDPOINT_URL.read(config) or AWS_ENDPOINT.read(config)
        plain = endpoint.startswith("http://")
        # A signed request does not contain the key, but contains the session token.
        if plain and "AWS_SESSION_TOKEN" in config and not parse_origin(endpoint).can_receive_secrets:
            raise SourceUnusableError(
                f"cannot send AWS_SESSION_TOKEN to {parse_origin(endpoint)} without TLS"
            )
        # The daemon retries, so that a retry does not keep a stream from other requests.
        self._store = S3Store(
            bucket, config=config, client_options={"allow_http": plain}, retry_config={"max_retries": 0}
        )

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        import obstore
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        path = f"{self._prefix}/{name}".lstrip("/")
        try:
            data = memoryview(obstore.get_range(self._store, path, start=start, length=len(buffer)))
        except (FileNotFoundError, PermissionError, PermissionDeniedError, UnauthenticatedError) as error:
            raise SourceUnusableError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
        except Exception as error:  # any other error of obstore: the network or the server
            raise SourceUnavailableError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
        count(len(data))
        if len(data) != len(buffer):
            raise SourceUnusableError(f"{path} ends before byte {start + len(buffer)} of {size}")
        buffer[:] = data
        return len(data)

    def close(self) -> None:
        """Do nothing, because the store closes its connections itself."""
