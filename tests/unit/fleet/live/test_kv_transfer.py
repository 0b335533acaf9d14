"""Messages and transfers that move KV: signed, authenticated, verified and bounded."""

import mmap
import os
import signal
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from random import Random

import pytest

from coldstart.contract import handover
from coldstart.contract.handover import HandoverError, Pin, Pull
from coldstart.vllm.handover import staging as staging_module
from coldstart.vllm.handover import wire
from coldstart.vllm.handover.staging import Data, StagedLayer, Staging, StagingError
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


def _fetch_all(address: tuple[str, int], staging: Staging | None = None) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in fetch_layers(address, SECRET, QUERY, _size, staging)}


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
def _answering(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Accept one connection for a function, whose other end may close it at any time."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listener.accept()
        with connection:
            with suppress(OSError, TransferError):
                answer(connection)
            # Closing alone does not end a connection from which another thread still reads.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    with listener:
        yield listener.getsockname()[:2]
        thread.join()


@contextmanager
def _meddling(port: tuple[str, int], change: Callable[[bytes], bytes]) -> Iterator[tuple[str, int]]:
    """Pass a connection on to the port, and change what the port sends after its nonce."""

    def relay(inner: socket.socket) -> None:
        with socket.create_connection(port) as outer:
            threading.Thread(target=copy, args=(inner, outer), daemon=True).start()
            inner.sendall(wire._receive(outer, wire.NONCE))
            while data := outer.recv(1 << 16):
                inner.sendall(change(data))

    def copy(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    with _answering(relay) as address:
        yield address


def _sign_query(nonce: bytes) -> bytes:
    raw = wire.msgspec.json.encode(QUERY)
    return len(raw).to_bytes(4, "big") + raw + wire._mac(SECRET, nonce, raw)


def _ask(address: tuple[str, int], create: Callable[[bytes], bytes]) -> tuple[bytes, bytes, bytes]:
    """Send the query that `create` returns for the port's nonce; return that nonce, the query and the answer."""
    answer = b""
    with socket.create_connection(address) as connection:
        nonce = bytes(wire._receive(connection, wire.NONCE))
        query = create(nonce)
        with suppress(OSError):
            connection.sendall(query)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                answer += data
    return nonce, query, answer


def _mutate(random: Random, message: bytes) -> bytes:
    """Remove, repeat, replace or change a random piece of a message."""
    changed = message
    while changed.startswith(message):
        begin, end = sorted(random.choices(range(len(message) + 1), k=2))
        end = random.choice((begin + 1, end))
        piece = message[begin:end]
        flipped = bytes(byte ^ 1 << random.randrange(8) for byte in piece)
        changed = random.choice((b"", 2 * piece, random.randbytes(len(piece)), flipped))
        changed = message[:begin] + changed + message[end:]
    return changed


@contextmanager
def _limit_memory(size: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


MUTATIONS = pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.nightly)])


@MUTATIONS
def test_no_mutated_message_is_read(count: int) -> None:
    random = Random(1)
    for _ in range(count):
        signed = handover.sign("key", random.choice((PIN, PULL, handover.LoadQuery("p"))))
        name = random.choice(sorted(signed))
        mutated = _mutate(random, signed[name].encode()).decode(errors="replace")
        for value in (mutated, mutated.encode(), 5, "\ud800"):  # JSON can contain half a character
            with pytest.raises(HandoverError):
                handover.verify_and_decode("key", {**signed, name: value})


@MUTATIONS
def test_no_mutated_query_is_answered(count: int) -> None:
    clients, before, threads = 2 * wire.MAX_CONNECTIONS, threading.active_count(), 0

    def mutate(nonce: bytes) -> bytes:
        nonlocal threads
        threads = max(threads, threading.active_count())
        return _mutate(random, _sign_query(nonce))

    def ask(client: int) -> set[bytes]:
        return {_ask(port.address, mutate)[2] for _ in range(client, count, clients)}

    random = Random(1)
    with _port() as port, ThreadPoolExecutor(clients) as pool:
        with _limit_memory(clients * 4 * wire.MAX_HEADER_BYTES):
            assert set().union(*pool.map(ask, range(clients))) == {b""}
        assert threads <= before + 1 + clients + wire.MAX_CONNECTIONS
        assert _fetch_all(port.address) == LAYERS


@MUTATIONS
def test_no_mutated_layer_is_accepted(count: int) -> None:
    """A layer that does not arrive is found by its name, because the end mark has no MAC."""
    layers = {"layers.0": b"zero", "layers.1": b"one "}
    random, mutations = Random(1), 0

    def change(data: bytes) -> bytes:
        nonlocal mutations
        if random.randrange(3):
            return data
        mutations += 1
        return _mutate(random, data)

    with _port(layers) as port, _limit_memory(8 * wire.MAX_HEADER_BYTES):
        while mutations < count:
            with _meddling(port.address, change) as address, suppress(TransferError):
                for name, data in fetch_layers(address, SECRET, QUERY, lambda name: len(layers[name])):
                    assert data == layers[name], mutations


def test_a_recorded_transfer_is_useless() -> None:
    with _port() as port:
        nonce, query, answer = _ask(port.address, _sign_query)
        assert len(answer) > sum(map(len, LAYERS.values()))
        assert _ask(port.address, lambda nonce: query)[2] == b""

    def replay(connection: socket.socket) -> None:
        connection.sendall(nonce + answer)
        while connection.recv(1 << 16):
            pass

    with _answering(replay) as address, pytest.raises(TransferError, match="MAC"):
        list(fetch_layers(address, SECRET, QUERY, _size))


def test_a_query_must_arrive_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client without a secret must not keep a connection by sending slowly."""
    monkeypatch.setattr(wire, "QUERY_S", 0.2)
    with (
        _port() as port,
        socket.create_connection(port.address) as slow,
        pytest.raises(OSError, match=r"pipe|reset"),
    ):
        for byte in wire.MAX_HEADER_BYTES.to_bytes(4, "big") + bytes(1000):
            slow.sendall(bytes([byte]))
            time.sleep(0.01)


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

    def write(self, data: Data) -> StagedLayer | None:
        changed = bytes(data[:-1]) + bytes([data[-1] ^ self.wrong])
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


def test_layers_arrive_over_nixl_when_both_servers_use_it(staging: Staging) -> None:
    with _source(Staging) as address:
        for transfers in (1, 2):
            assert _fetch_all(address, staging) == LAYERS
            assert (staging.reads, staging.failures) == (transfers * len(LAYERS), 0)
    # The next source is another process.
    with _source(Staging) as address:
        assert _fetch_all(address, staging) == LAYERS
        assert (staging.reads, staging.failures) == (3 * len(LAYERS), 0)


@pytest.mark.parametrize(
    ("source", "size", "asks"),
    [(None, 1 << 16, True), (Staging, 1 << 16, False), (Staging, mmap.PAGESIZE // 2, True)],
    ids=["no NIXL at the source", "no NIXL at the target", "larger than the staging memory"],
)
def test_layers_arrive_over_tcp(
    staging: Staging, source: type[Staging] | None, size: int, asks: bool
) -> None:
    with _source(source, size) as address:
        assert _fetch_all(address, staging if asks else None) == LAYERS
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


def test_a_changed_header_of_a_staged_layer_is_refused_before_nixl_reads_it(staging: Staging) -> None:
    def change(data: bytes) -> bytes:
        # The header's length may arrive before it. The byte belongs to NIXL's metadata in both cases.
        return data[:64] + bytes([data[64] ^ 1]) + data[65:] if len(data) > 64 else data

    with (
        _source(Staging) as address,
        _meddling(address, change) as meddler,
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
