"""Sources that need an optional library: S3-compatible stores (obstore) and the Hugging Face Hub (huggingface_hub)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coldstart.artifacts.net import origin
from coldstart.contract.environment import AWS_ENDPOINT, AWS_ENDPOINT_URL, HF_ENDPOINT, HF_TOKEN
from coldstart.weights.prefetch.http_source import HttpSource
from coldstart.weights.prefetch.range_source import (
    Count,
    RangeSource,
    SourceUnavailableError,
    SourceUnusableError,
)

# The client sends its AWS variables: this process has another environment.
_PREFIX = "AWS_"
_HUB = "https://huggingface.co"


class ObjectSource:
    """Objects below s3://bucket/prefix; the client's AWS variables set endpoint, region and credentials."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise SourceUnusableError(f"{address} needs obstore: coldstart install s3") from error
        bucket, _, self._prefix = address.partition("://")[2].partition("/")
        config: Any = {key: value for key, value in environment.items() if key.startswith(_PREFIX)}
        endpoint = AWS_ENDPOINT_URL.read(config) or AWS_ENDPOINT.read(config)
        plain = endpoint.startswith("http://")
        # A signed request does not contain the key, but contains the session token.
        if plain and "AWS_SESSION_TOKEN" in config and not origin.parse_origin(endpoint).may_hear_secrets:
            raise SourceUnusableError(
                f"cannot send AWS_SESSION_TOKEN to {origin.parse_origin(endpoint)} without TLS"
            )
        # The daemon retries, so that a retry does not keep a stream from other models.
        self._store = S3Store(
            bucket, config=config, client_options={"allow_http": plain}, retry_config={"max_retries": 0}
        )

    def read(self, name: str, size: int, start: int, buffer: memoryview, count: Count) -> int:
        """Implement RangeSource."""
        import obstore
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        path = f"{self._prefix}/{name}".lstrip("/")
        try:
            data = memoryview(obstore.get_range(self._store, path, start=start, length=len(buffer)))
        except (FileNotFoundError, PermissionError, PermissionDeniedError, UnauthenticatedError) as error:
            raise SourceUnusableError(f"{path}: {str(error).splitlines()[0]}") from error
        except Exception as error:  # any other error of obstore: the network or the server
            raise SourceUnavailableError(f"{path}: {str(error).splitlines()[0]}") from error
        count(len(data))
        if len(data) != len(buffer):
            raise SourceUnusableError(f"{path} ends before byte {start + len(buffer)} of {size}")
        buffer[:] = data
        return len(data)

    def close(self) -> None:
        """Implement RangeSource; the store closes its connections itself."""


def hub_source(address: str, environment: Mapping[str, str]) -> RangeSource:
    """Open hf://owner/name@revision with HTTP ranges. Raises SourceUnusableError without huggingface_hub."""
    try:
        from huggingface_hub import get_token, hf_hub_url
    except ImportError as error:
        raise SourceUnusableError(f"{address} needs huggingface_hub, which is not installed") from error
    repository, _, revision = address.partition("://")[2].partition("@")
    token = HF_TOKEN.read(environment) or get_token()
    given = {"Authorization": f"Bearer {token}"} if token else {}
    endpoint = HF_ENDPOINT.read(environment) or None
    return HttpSource(
        address,
        given if origin.parse_origin(endpoint or _HUB).may_hear_secrets else {},
        lambda name: hf_hub_url(repository, name, revision=revision or None, endpoint=endpoint),
    )
