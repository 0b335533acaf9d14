"""Where a server listens, and the records of servers that are up, of which each model has one."""

import signal
import socket
from dataclasses import replace

import pytest
from support.engines import hold_model

from coldstart.contract.arguments import Arguments
from coldstart.errors import UsageError
from coldstart.launch import listening, up_records
from coldstart.models.inspection import BundleLookup


@pytest.mark.parametrize(
    ("host", "port", "given", "listen"),
    [
        (None, None, [], ["--host", "127.0.0.1"]),
        (None, 9, [], ["--host", "127.0.0.1", "--port", "9"]),
        ("0.0.0.0", None, [], ["--host", "0.0.0.0"]),
        (None, None, ["--host", "::"], []),
        (None, None, ["--uds", "/run/s"], []),
        (None, None, ["--headless"], []),
    ],
)
def test_choose_address(host: str | None, port: int | None, given: list[str], listen: list[str]) -> None:
    assert listening.build_address_arguments(host, port, Arguments(given)) == listen


@pytest.mark.parametrize("port", [0, 8000])
def test_require_usable_address_refuses_a_host_that_is_not_of_this_machine(port: int) -> None:
    listen = listening.build_address_arguments("192.0.2.77", port, Arguments([]))
    assert listen == ["--host", "192.0.2.77", "--port", str(port)]
    with pytest.raises(UsageError, match=f"cannot listen at 192.0.2.77:{port}: Cannot assign"):
        listening.require_usable_address(Arguments(), listen)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1"])
def test_require_usable_address_refuses_a_port_in_use(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as sock:
        taken = ["--host", host, "--port", str(sock.getsockname()[1])]
        with pytest.raises(UsageError, match="another process listens there"):
            listening.require_usable_address(Arguments(), taken)
        with pytest.raises(UsageError, match="another process listens there"):
            listening.require_usable_address(Arguments(taken), [])
        listening.require_usable_address(Arguments(["--uds", "/run/s"]), taken)
    listening.require_usable_address(Arguments(), taken)


@pytest.mark.parametrize(
    ("given", "exposed"),
    [
        ([], True),
        (["--host", "::"], True),
        (["--host", "127.0.0.1"], False),
        (["--uds", "/run/s"], False),
        (["--host", "::", "--api-key", "k"], False),
    ],
)
def test_describe_exposure_warns_when_others_need_no_key(given: list[str], exposed: bool) -> None:
    assert (listening.describe_exposure(Arguments(given), {}) is not None) == exposed
    assert listening.describe_exposure(Arguments(given), {"VLLM_API_KEY": "k"}) is None


@pytest.mark.parametrize(
    ("host", "asked", "answers"),
    [
        ("127.0.0.1", "localhost", True),
        ("localhost", "127.0.0.1", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "0.0.0.0", True),
        ("::", "::1", True),
        ("::", "10.0.0.1", True),
        ("0.0.0.0", "::1", False),
        ("127.0.0.1", "0.0.0.0", False),
        ("127.0.0.1", "10.0.0.1", False),
    ],
)
def test_is_listening(host: str, asked: str, answers: bool) -> None:
    assert listening.is_reachable_at(host, asked) == answers


def test_record_is_read_while_the_supervisor_runs(lookup: BundleLookup) -> None:
    directory = up_records.find_directory(lookup)
    with hold_model(lookup) as (process, own):
        assert directory.read() is None
        record = replace(own, url="http://127.0.0.1:1", mode="fresh")
        directory.write(record)
        assert directory.read() == directory.claim(lambda: None) == record
        directory.remove()
        assert directory.read() == record
        up_records.stop_supervisor(record)
        process.wait()
    assert process.returncode == -signal.SIGTERM and directory.read() is None
    assert directory.read_last() == record
    up_records.stop_supervisor(record)  # it has ended
    directory.remove()
    assert directory.read_last() is None


def test_a_process_with_a_reused_pid_is_not_ended(lookup: BundleLookup) -> None:
    with hold_model(lookup) as (process, own):
        up_records.stop_supervisor(replace(own, birth="the boot before:17"))
        assert process.poll() is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff", b"x" * 10_000])
def test_damaged_record_counts_as_none_and_is_removed(lookup: BundleLookup, content: bytes) -> None:
    directory = up_records.find_directory(lookup)
    directory.write(up_records.create_own_record(lookup))
    (record,) = directory.path.iterdir()
    record.write_bytes(content)
    assert directory.read_last() is None
    directory.remove()
    assert up_records.list_directories(lookup.cache) == []
