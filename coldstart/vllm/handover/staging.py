"""NIXL transport of KV layers between the staging memory of two servers. wire.py authenticates and verifies the transfers.

The source copies one layer at a time into its staging memory, and the target reads it from there into its own.

Invariants: NIXL knows the address of staging memory only, so it cannot write into KV blocks. Staging memory is never freed or
deregistered, so a late READ by another server finds valid memory, and the MAC of what it reads does not match. A READ that
did not complete can still write into the staging memory of this server, which then never uses NIXL again.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from coldstart.contract import environment
from coldstart.system.ipc.peers import await_readable

log = logging.getLogger("vllm.coldstart.handover")

Data = bytes | bytearray | memoryview
# A larger layer is sent over TCP.
STAGING_BYTES = 1 << 26
# Maximum time of one layer, which leaves time for TCP within the lease of the pin.
READ_S = 5.0
# NIXL reports the end of a READ only when it is asked.
POLL_S = 0.0002


class StagingError(Exception):
    """Error for a NIXL transfer that did not complete, or whose bytes do not match their MAC."""


class StagedLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Address of a layer in the staging memory of the source, and the NIXL metadata of that server."""

    agent: bytes
    address: int


class Staging:
    """Staging memory that is registered with NIXL, for one transfer at a time.

    `reads` counts the layers read from other servers, and `failures` the transfers that continued over TCP. The constructor
    raises ImportError if NIXL is not installed, and an exception of NIXL if UCX has no usable transport.
    """

    def __init__(self) -> None:
        # UCX over TCP writes to any address that a client sends, without authentication.
        os.environ.setdefault(environment.UCX_TLS, "^tcp")
        from nixl._api import nixl_agent, nixl_agent_config

        # The thread that NIXL can start for progress is never idle: it uses a core of the engine.
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._agent = nixl_agent(secrets.token_hex(16), config)
        self._memory = mmap.mmap(-1, STAGING_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._registered = self._agent.register_memory([(self._address, STAGING_BYTES, 0, "")], "DRAM")
        self._metadata: bytes = self._agent.get_agent_metadata()
        self.reserved = threading.Lock()
        self._source: str | None = None
        self.unfinished: object | None = None
        self.reads = self.failures = 0

    def release(self) -> None:
        """Disconnect from the source, and end the reservation of the staging memory."""
        if self._source is not None and self.unfinished is None:
            with suppress(Exception):
                self._agent.remove_remote_agent(self._source)
        self._source = None
        self.reserved.release()

    def write(self, data: Data) -> StagedLayer | None:
        """Copy a layer into the staging memory, or return None if it is too large."""
        if len(data) > STAGING_BYTES:
            return None
        self._memory[: len(data)] = data
        return StagedLayer(self._metadata, self._address)

    def wait_for_target(self, connection: socket.socket) -> None:
        """Let the target read until it sends something or disconnects. Raises StagingError after 5 seconds or if NIXL fails."""
        deadline = time.monotonic() + READ_S
        with _translate_errors():
            while not await_readable(connection, timeout_s=POLL_S):
                # NIXL connects the two servers, and serves a READ without RDMA, only during calls.
                self._agent.get_new_notifs()
                if time.monotonic() > deadline:
                    raise StagingError("the target server did not read the layer in time")

    def read(self, layer: StagedLayer, size: int, connection: socket.socket) -> bytearray:
        """Return a copy of the `size` bytes of a layer, read with NIXL from the server at the other end of `connection`.

        Raises StagingError if the READ fails or takes more than 5 seconds, or the source disconnects.
        """
        deadline = time.monotonic() + READ_S
        with _translate_errors():
            if self._source is None:
                self._source = self._agent.add_remote_agent(layer.agent)
            local = self._agent.get_xfer_descs([(self._address, size, 0)], "DRAM")
            remote = self._agent.get_xfer_descs([(layer.address, size, 0)], "DRAM")
            transfer = self._agent.initialize_xfer("READ", local, remote, self._source)
            # Releasing a READ would not stop it. While it is referenced, nothing else uses its memory.
            self.unfinished = transfer
            state = self._agent.transfer(transfer)
            while state == "PROC" and time.monotonic() < deadline:
                if await_readable(connection, timeout_s=POLL_S):  # the source has left
                    break
                state = self._agent.check_xfer_state(transfer)
            if state != "DONE":
                raise StagingError(
                    f"a NIXL read did not complete ({state}), so this server uses TCP from now on"
                )
            self.unfinished = None
            self.reads += 1
            return bytearray(memoryview(self._memory)[:size])


@contextmanager
def reserve(staging: Staging | None) -> Iterator[Staging | None]:
    """Reserve staging memory for one transfer. Yield None if there is none, it is in use, or a READ did not complete."""
    if staging is None or not staging.reserved.acquire(blocking=False):
        yield None
        return
    try:
        yield staging if staging.unfinished is None else None
    finally:
        staging.release()


def create_staging() -> Staging | None:
    """Return staging memory if the user has enabled NIXL and it is usable. Log the reason if it is not usable."""
    if not environment.NIXL.read():
        return None
    try:
        return Staging()
    except Exception as error:  # noqa: BLE001  NIXL has an exception for each of its errors
        reason = f"{error} (UCX_TLS={environment.UCX_TLS.read()})"
        log.warning("KV moves over TCP: cannot use NIXL: %s. hint: run `coldstart install nixl`", reason)
        return None


@contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except StagingError:
        raise
    except Exception as error:
        raise StagingError(f"{type(error).__name__}: {error}") from error
