"""Choose the address on which a server listens, and check that the port is free before vLLM is imported."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress

from coldstart.contract import environment
from coldstart.contract.arguments import Arguments
from coldstart.system.ipc import addresses

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000
_EVERY_ADDRESS = ("", "0.0.0.0", "::")


def build_address_arguments(host: str | None, port: int | None, vllm_args: Arguments) -> list[str]:
    """Return the vLLM arguments for the listening address: loopback, unless the user or `vllm_args` specify another address.

    Port 0 is replaced with a free port, so that the port is known before the server starts.
    """
    if host is None and not any(map(vllm_args.contains_flag, ("host", "uds", "headless"))):
        host = DEFAULT_HOST
    asked = port if port is not None else vllm_args.get_integer("port", DEFAULT_PORT)
    if asked == 0 and not vllm_args.contains_flag("uds"):
        with suppress(OSError):  # `require_usable_address` reports an address that this machine does not have
            port = addresses.find_free_port(host or str(vllm_args.get_value("host") or ""))
    return [*(["--host", host] if host else []), *(["--port", str(port)] if port is not None else [])]


def find_url(vllm_args: Arguments) -> str:
    """Return the URL of a server that has these arguments."""
    if uds := vllm_args.get_value("uds"):
        return f"unix:{uds}"
    host = str(vllm_args.get_value("host") or DEFAULT_HOST)
    scheme = "https" if vllm_args.get_value("ssl_certfile") else "http"
    return addresses.build_local_url(host, vllm_args.get_value("port", DEFAULT_PORT), scheme)


def require_usable_address(vllm_args: Arguments, listen: Sequence[str]) -> None:
    """Raise UsageError if the server cannot listen at its address, for example because another process listens there."""
    given = vllm_args.append(*listen)
    port = given.get_integer("port", DEFAULT_PORT)
    if given.contains_flag("uds") or given.contains_flag("headless") or not 0 <= port < 65536:
        return
    host = str(given.get_value("host") or "")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise addresses.explain_unusable_address(host or "0.0.0.0", port, error) from error


def is_reachable_at(host: str, asked: str) -> bool:
    """Return whether a server listening on `host` accepts connections to the address `asked`. Names are not resolved."""
    if host == "::" or (host in _EVERY_ADDRESS and ":" not in asked):
        return True
    host, asked = (DEFAULT_HOST if one == "localhost" else one for one in (host, asked))
    return host == asked


def requires_api_key(vllm_args: Arguments, environ: Mapping[str, str]) -> bool:
    """Return whether a vLLM server with these arguments and environment requires an API key."""
    return vllm_args.contains_flag("api_key") or bool(environment.VLLM_API_KEY.read(environ))


def listens_at_every_address(vllm_args: Arguments) -> bool:
    """Return whether a server with these arguments listens on all addresses of this machine."""
    if vllm_args.contains_flag("uds") or vllm_args.contains_flag("headless"):
        return False
    return str(vllm_args.get_value("host") or "") in _EVERY_ADDRESS


def describe_exposure(vllm_args: Arguments, environ: Mapping[str, str]) -> str | None:
    """Return a warning if other machines can use the server without an API key, or None if they cannot."""
    host = str(vllm_args.get_value("host") or "")
    if requires_api_key(vllm_args, environ) or not listens_at_every_address(vllm_args):
        return None
    return (
        f"other machines can use this server without an API key: it listens at {host or '0.0.0.0'};"
        " set VLLM_API_KEY to require one"
    )
