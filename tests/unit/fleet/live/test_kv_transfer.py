"""Messages and transfers that move KV: signed, authenticated, verified and bounded."""

import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coldstart.contract import handover
from coldstart.contract.handover import HandoverError, Pin, Pull
from coldstart.vllm.handover import wire
from coldstart.vllm.handover.wire import BlockQuery, DataPort, Layers, TransferError, fetch_layers

PIN = Pin("request", 3, handover.digest_tokens([1, 2, 3]))
PULL = Pull("p", "ab" * 32, 3, "shape", (("127.0.0.1", 1), ("::1", 2)))
LAYERS = {"layers.0": b"zero" * 1000, "layers.1": b"one " * 1000}
QUERY = BlockQuery("p", 0, 4, tuple(LAYERS))
SECRET = "ab" * 32


@pytest.mark.parametrize("message", [PIN, PULL])
def test_a_message_is_read_with_its_key_only(message: Pin | Pull) -> None:
    signed = handover.sign("key", message)
    assert handover.read("key", signed) == message
    for key in ("other", ""):
        with pytest.raises(HandoverError, match="not signed"):
            handover.read(key, signed)


def test_other_parameters_of_vllm_contain_no_message() -> None:
    assert handover.read("key", None) is None
    assert handover.read("key", {"do_remote_prefill": True}) is None


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
        handover.read("key", {**signed, name: changed})


@contextmanager
def _port(layers: dict[str, bytes] = LAYERS, secret: str = SECRET) -> Iterator[DataPort]:
    def read(query: BlockQuery) -> Layers:
        yield from ((name, data) for name, data in layers.items() if name in query.layers)

    port = DataPort("127.0.0.1", lambda pin: secret if pin == "p" else None, read)
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
def _meddling(port: DataPort, position: int | None, flip: int = 0) -> Iterator[tuple[str, int]]:
    """Pass connections on to the port; change the byte at `position`, or end the connection there if `flip` is 0."""
    listener = socket.create_server(("127.0.0.1", 0))

    def relay() -> None:
        inner, _ = listener.accept()
        # The reader closes its connection as soon as it finds the change.
        with inner, socket.create_connection(port.address) as outer, suppress(OSError):
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
                with _meddling(port, position, flip) as address:
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
