"""Messages and transfers that move KV: signed, authenticated, verified and bounded."""

import mmap
import os
import secrets
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.contract import handover
from coldstart.contract.handover import HandoverError, Pin, Pull
from coldstart.vllm.handover import staging as staging_module
from coldstart.vllm.handover import wire
from coldstart.vllm.handover.staging import StagedLayer, Staging, StagingError
from coldstart.vllm.handover.wire import BlockQuery, DataPort, Layers, TransferError, fetch_layers

PIN = Pin("request", 3, handover.digest_tokens([1, 2, 3]))
PULL = Pull("p", "ab" * 32, 3, "shape", (("127.0.0.1", 1), ("::1", 2)))
LAYERS = {"layers.0": b"zero" * 1000, "layers.1": b"one " * 1000}
QUERY = BlockQuery("p", 0, 4, tuple(LAYERS))
SECRET = "ab" * 32


@pytest.mark.parametrize("message", [PIN, PULL])
def test_a_message_is_read_with_its_key_only(message: Pin | Pull) -> None:
    signed = handover.sign("key", message)
    assert handover.verify_and_decode("key", signed) == message
    for key in ("other", ""):
        with pytest.raises(HandoverError, match="not signed"):
            handover.verify_and_decode(key, signed)


def test_other_parameters_of_vllm_contain_no_message() -> None:
    assert handover.verify_and_decode("key", None) is None
    assert handover.verify_and_decode("key", {"do_remote_prefill": True}) is None


@given(st.data())
def test_a_changed_message_is_refused(data: st.DataObject) -> None:
    signed = handover.sign("key", PULL)
    name = data.draw(st.sampled_from(sorted(signed)))
    changed = data.draw(
        st.one_of(st.text(), st.none(), st.integers(), st.binary()).filter(lambda v: v != signed[name])
    )
    if name == "coldstart" and changed is None:
        return
    with pytest.raises(HandoverError):
        handover.verify_and_decode("key", {**signed, name: changed})


@contextmanager
def _port(
    layers: dict[str, bytes] = LAYERS, secret: str = SECRET, staging: Staging | None = None
) -> Iterator[DataPort]:
    def read(query: BlockQuery) -> Layers:
        yield from ((name, data) for name, data in layers.items() if name in query.layers)

    port = DataPort("127.0.0.1", lambda pin: secret if pin == "p" else None, read, staging)
    try:
        yield port
    finally:
        port.close()


def _size(name: str) -> int:
    return len(LAYERS[name])


def test_all_layers_arrive() -> None:
    with _port() as port:
        assert {
            name: bytes(data) for name, data in fetch_layers(port.address, SECRET, QUERY, _size)
        } == LAYERS


@pytest.mark.parametrize(
    ("secret", "query"),
    [
        ("cd" * 32, QUERY),
        (SECRET, BlockQuery("unknown", 0, 4, QUERY.layers)),
        (SECRET, BlockQuery("p", 0, 4, ("x" * 70_000,))),
    ],
    ids=["wrong secret", "unknown pin", "long query"],
)
def test_a_query_without_the_right_to_the_pin_gets_nothing(secret: str, query: BlockQuery) -> None:
    with _port() as port, pytest.raises(TransferError, match=r"disconnected|reset|pipe"):
        list(fetch_layers(port.address, secret, query, _size))


@pytest.mark.parametrize("layers", [{"layers.0": b"short"}, {"layers.9": b"x"}])
def test_other_layers_are_refused(layers: dict[str, bytes]) -> None:
    with _port(layers) as port, pytest.raises(TransferError, match="layer"):
        list(fetch_layers(port.address, SECRET, BlockQuery("p", 0, 4, (*LAYERS, "layers.9")), _size))


@contextmanager
def _meddling(port: tuple[str, int], position: int | None, flip: int = 0) -> Iterator[tuple[str, int]]:
    """Pass connections on to the port; change the byte at `position`, or end the connection there if `flip` is 0."""
    listener = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        inner, _ = listener.accept()
        # The reader closes its connection as soon as it finds the change.
        with inner, socket.create_connection(port) as outer, suppress(OSError):
            threading.Thread(target=_copy, args=(inner, outer), daemon=True).start()
            seen = 0
            while data := outer.recv(1 << 16):
                if position is not None and seen <= position < seen + len(data):
                    if not flip:
                        inner.sendall(data[: position - seen])
                        return
                    changed = bytearray(data)
                    changed[position - seen] ^= flip
                    data = bytes(changed)
                seen += len(data)
                inner.sendall(data)

    def _copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    thread = threading.Thread(target=relay, daemon=True)
    thread.start()
    with listener:
        yield listener.getsockname()[:2]
        thread.join()


def _expected() -> int:
    """Return the bytes that a port sends for QUERY."""
    with _port() as port, socket.create_connection(port.address) as connection:
        total, nonce = b"", bytes(wire._receive(connection, wire.NONCE))
        raw = wire.msgspec.json.encode(QUERY)
        connection.sendall(len(raw).to_bytes(4, "big") + raw + wire._mac(SECRET, nonce, raw))
        while data := connection.recv(1 << 16):
            total += data
        return len(nonce) + len(total)


def test_no_changed_byte_is_accepted_and_no_cut_is_taken_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position would take minutes: the nonce, each header, each MAC and a sample of the rest."""
    # A changed length makes the target wait for bytes that do not come.
    monkeypatch.setattr(wire, "IDLE_S", 0.5)
    size = _expected()
    positions = {0, 15, 16, 19, 20, 40, size - 1, size - 4, *(secrets.randbelow(size) for _ in range(20))}
    with _port() as port:
        for position in sorted(positions):
            for flip in (0, 1 << secrets.randbelow(8)):
                with _meddling(port.address, position, flip) as address:
                    read = {}
                    try:
                        for name, data in fetch_layers(address, SECRET, QUERY, _size):
                            read[name] = bytes(data)
                    except TransferError:
                        pass
                    else:
                        # The end mark has no MAC: a layer that is missing is found by its name.
                        assert len(read) < len(LAYERS) or flip == 0 or position >= size - 4, (position, flip)
                    assert all(LAYERS[name] == data for name, data in read.items()), (position, flip)


def test_connections_beyond_the_limit_wait_and_are_served() -> None:
    with _port() as port:
        silent = [socket.create_connection(port.address) for _ in range(wire.MAX_CONNECTIONS)]
        threading.Timer(0.2, lambda: [one.close() for one in silent]).start()
        assert dict(fetch_layers(port.address, SECRET, QUERY, _size)).keys() == LAYERS.keys()


# UCX uses TCP in these tests, which every machine has. Without it, NIXL needs a device for RDMA.
UCX_TLS = "tcp"
# The machine can be busy.
BUSY_READ_S = 60.0


class _WrongStaging(Staging):
    """Staging memory whose first layer differs from the layer that the MAC is for."""

    wrong = True

    def write(self, data: bytes | bytearray) -> StagedLayer | None:
        changed = data[:-1] + bytes([data[-1] ^ self.wrong])
        self.wrong = False
        return super().write(changed)


class _KilledStaging(Staging):
    """Staging memory of a source that is killed while the target connects to it."""

    layers = 1

    def wait_for_target(self, connection: socket.socket) -> None:
        self.layers -= 1
        if self.layers == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        super().wait_for_target(connection)


class _LaterKilledStaging(_KilledStaging):
    """Staging memory of a source that is killed while the target reads the second layer."""

    layers = 2


class _StalledStaging(Staging):
    """Staging memory of a source that makes no progress until the target disconnects."""

    def wait_for_target(self, connection: socket.socket) -> None:
        connection.recv(1)
        raise StagingError("the target has disconnected")


def _run_source(pipe: Connection, staging: type[Staging] | None, size: int) -> None:
    """Serve LAYERS from another process until the pipe is closed."""
    os.environ["UCX_TLS"] = UCX_TLS
    staging_module.STAGING_BYTES, staging_module.READ_S = size, BUSY_READ_S
    with _port(staging=None if staging is None else staging()) as port, suppress(EOFError):
        pipe.send(port.address)
        pipe.recv()


@contextmanager
def _source(staging: type[Staging] | None, size: int = 1 << 16) -> Iterator[tuple[str, int]]:
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_run_source, args=(theirs, staging, size), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours.recv()
    finally:
        ours.close()
        process.join()


@pytest.fixture
def staging(monkeypatch: pytest.MonkeyPatch) -> Staging:
    pytest.importorskip("nixl._api", reason="NIXL is not installed", exc_type=ImportError)
    monkeypatch.setenv("UCX_TLS", UCX_TLS)
    monkeypatch.setattr(staging_module, "READ_S", BUSY_READ_S)
    return Staging()


def _fetch_all(address: tuple[str, int], staging: Staging | None) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in fetch_layers(address, SECRET, QUERY, _size, staging)}


def test_layers_arrive_over_nixl_when_both_servers_use_it(staging: Staging) -> None:
    with _source(Staging) as address:
        for transfers in (1, 2):
            assert _fetch_all(address, staging) == LAYERS
            assert (staging.reads, staging.failures) == (transfers * len(LAYERS), 0)
    # The next source is another process.
    with _source(Staging) as address:
        assert _fetch_all(address, staging) == LAYERS
        assert (staging.reads, staging.failures) == (3 * len(LAYERS), 0)


@pytest.mark.parametrize("source", [None, Staging])
def test_layers_arrive_over_tcp_when_one_server_does_not_use_nixl(
    staging: Staging, source: type[Staging] | None
) -> None:
    with _source(source) as address:
        assert _fetch_all(address, staging if source is None else None) == LAYERS
    assert (staging.reads, staging.failures) == (0, 0)


def test_layers_arrive_over_tcp_when_they_are_larger_than_the_staging_memory(
    staging: Staging,
) -> None:
    with _source(Staging, size=mmap.PAGESIZE // 2) as address:
        assert _fetch_all(address, staging) == LAYERS
    assert (staging.reads, staging.failures) == (0, 0)


def test_a_transfer_uses_tcp_while_another_has_the_staging_memory(staging: Staging) -> None:
    with _source(Staging) as address:
        with staging_module.reserve(staging):
            assert _fetch_all(address, staging) == LAYERS
        assert staging.reads == 0
        assert _fetch_all(address, staging) == LAYERS
        assert staging.reads == len(LAYERS)


def test_a_staged_layer_with_a_wrong_mac_is_fetched_over_tcp(staging: Staging) -> None:
    with _source(_WrongStaging) as address:
        assert _fetch_all(address, staging) == LAYERS
        assert (staging.reads, staging.failures) == (1, 1)
        # Every READ has completed, so NIXL remains usable.
        assert _fetch_all(address, staging) == LAYERS
        assert (staging.reads, staging.failures) == (1 + len(LAYERS), 1)


def test_a_changed_header_of_a_staged_layer_is_refused_before_nixl_reads_it(
    staging: Staging,
) -> None:
    # The header follows the nonce and its own length. The 60th byte belongs to NIXL's metadata.
    with (
        _source(Staging) as address,
        _meddling(address, wire.NONCE + 4 + 60, flip=1) as meddler,
        pytest.raises(TransferError, match="header"),
    ):
        _fetch_all(meddler, staging)
    assert (staging.reads, staging.failures) == (0, 0)


def test_nixl_is_not_used_again_when_a_read_has_not_completed(
    staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The READ of the stalled source can still write into the staging memory."""
    monkeypatch.setattr(staging_module, "READ_S", 0.5)
    with _source(_StalledStaging) as address:
        assert _fetch_all(address, staging) == LAYERS
    assert (staging.reads, staging.failures) == (0, 1)
    with _source(Staging) as address:
        assert _fetch_all(address, staging) == LAYERS
    assert (staging.reads, staging.failures) == (0, 1)


@pytest.mark.parametrize("source", [_KilledStaging, _LaterKilledStaging])
def test_a_transfer_fails_before_its_time_limit_when_its_source_is_killed(
    staging: Staging, source: type[_KilledStaging], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "READ_S", 3600.0)
    with _source(source) as address, pytest.raises(TransferError, match="cannot fetch KV"):
        _fetch_all(address, staging)
    assert (staging.reads, staging.failures) == (source.layers - 1, 1)


@pytest.mark.parametrize(("enabled", "warnings"), [("", 0), ("1", 1)])
def test_kv_moves_over_tcp_when_nixl_is_unusable(
    enabled: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COLDSTART_NIXL", enabled)
    monkeypatch.setenv("UCX_TLS", "self")
    assert staging_module.create_staging() is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings
