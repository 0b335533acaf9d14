"""Readers of untrusted bytes, as functions of one input: `make fuzz` searches inputs that break them.

A target returns for input that it accepts or refuses with a named error. Every other exception is a finding.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import uvicorn
import zstandard
from coldstart.artifacts import manifest, oci, trees
from coldstart.artifacts.errors import BundleError

from coldstart.errors import UsageError
from coldstart.host.endpoint import GatewayLimits
from coldstart.host.live import messages
from coldstart.host.live.bounded_protocol import BoundedProtocol
from coldstart.host.live.messages import ClientGoneError
from coldstart.host.live.request_router import AdmissionRefusedError
from coldstart.weights import checkpoint, weights_plan

SEPARATOR = b"\0"
"""Separates the image manifest from the config in an input of `read_manifest`."""
_ANSWER_S = 5.0
_STATUS = re.compile(rb"^HTTP/1\.1 (\d+) ", re.M)
_ANSWERS = {100, 200, 400, 408, 413, 429, 431, 503}


def read_manifest(data: bytes) -> None:
    """Parse an image manifest and a config. What is accepted must be written as the same manifest."""
    image, _, config = data.partition(SEPARATOR)
    try:
        found = manifest.parse_manifest(config, oci.parse_manifest(image))
        written = found.serialize_config()
    except BundleError:
        return
    assert manifest.parse_manifest(written, found.build_image_manifest()) == found


def read_tar(data: bytes) -> None:
    """Unpack a tar archive. What is accepted must be packed and read as the same members."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        try:
            members = trees.read_tar(io.BytesIO(data), 1 << 24, Path(directory))
        except BundleError:
            return
        packed = io.BytesIO()
        trees.pack_tree(Path(directory), packed)
    again = zstandard.ZstdDecompressor().stream_reader(packed.getvalue())
    assert trees.read_tar(again, 1 << 25) == sorted(members)


def read_safetensors(data: bytes) -> None:
    """Read the header of a weight file. The plan of what is accepted must be a valid plan."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        path = Path(directory, "model.safetensors")
        path.write_bytes(data)
        try:
            plan = weights_plan.build_plan_from_headers([path])
        except UsageError:
            return
    weights_plan.compute_digest(plan)
    checkpoint.parse(plan)


def read_weights_plan(data: bytes) -> None:
    """Parse a weights plan. What is accepted must be written as the same plan."""
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        return
    try:
        plan = checkpoint.parse(document)
    except checkpoint.InvalidWeightsPlanError:
        return
    assert checkpoint.parse(plan.document()) == plan


def read_request(data: bytes) -> None:
    """Send bytes to a connection of a gateway. It answers with a known status and releases all that it counted."""
    asyncio.run(_connect(data))


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "manifest": read_manifest,
    "tar": read_tar,
    "safetensors": read_safetensors,
    "weights-plan": read_weights_plan,
    "request": read_request,
}


class _Transport(asyncio.Transport):
    """Transport that keeps what the server writes; its socket is not connected."""

    def __init__(self, client: socket.socket) -> None:
        super().__init__({"socket": client, "peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written, self.closed = b"", asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def close(self) -> None:
        self.closed.set()

    def pause_reading(self) -> None:
        """Do nothing: all bytes have arrived."""

    abort, resume_reading = close, pause_reading


async def _connect(data: bytes) -> None:
    limits, errors = GatewayLimits(), list[Any]()
    memory = messages.BodyMemory(limits)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        status, content = 400, b""
        try:
            content = await memory.read(receive)
            messages.parse_routing(content)
            messages.parse_routing(messages.replace_model(content, "other"))
            messages.parse_body(json.loads, content)
            status = 200
        except ClientGoneError:
            return
        except AdmissionRefusedError:
            pass
        finally:
            memory.release(len(content))
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    config.load()
    with socket.socket() as client:
        transport = _Transport(client)
        state = uvicorn.server.ServerState()
        protocol = BoundedProtocol(limits, 1, Counter(), config=config, server_state=state, app_state={})
        protocol.connection_made(transport)
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            protocol.data_received(part)
            await asyncio.sleep(0)
        protocol.eof_received()
        protocol.connection_lost(None)
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.gather(*state.tasks)
    assert not errors, errors
    assert not state.connections and not memory.used
    assert {int(status) for status in _STATUS.findall(transport.written)} <= _ANSWERS, transport.written[:200]
