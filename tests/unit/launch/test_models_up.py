"""Records of servers that are up: only a supervisor that runs is trusted, and each model has one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import anyone
from support.engines import Publish
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.launch import up_records
from coldstart.launch.up_records import UpRecord
from coldstart.models.inspection import Lookup
from coldstart.system import paths
from coldstart.system.proc import processes

STUBBORN = (
    "import signal, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(flush=True)\nsignal.pause()"
)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends at SIGTERM."""
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as one:
        yield one
        one.kill()


def read_record(lookup: Lookup, pid: int) -> UpRecord:
    return replace(up_records.describe_own(lookup), pid=pid, birth=processes.birth(pid))


def test_record_is_read_while_the_supervisor_runs(lookup: Lookup, process: subprocess.Popen[bytes]) -> None:
    directory = up_records.find_directory(lookup)
    assert directory.read() is None
    record = replace(read_record(lookup, process.pid), url="http://127.0.0.1:1", mode="fresh")
    directory.write(record)
    assert directory.read() == record
    up_records.stop(record)
    process.wait()
    assert process.returncode == -signal.SIGTERM and directory.read() is None
    up_records.stop(record)  # it has ended


def test_record_of_a_reused_pid_is_not_trusted(lookup: Lookup, process: subprocess.Popen[bytes]) -> None:
    directory = up_records.find_directory(lookup)
    stale = replace(read_record(lookup, process.pid), birth="the boot before:17")
    directory.write(stale)
    assert directory.read() is None
    up_records.stop(stale)
    assert process.poll() is None


def test_end_retains_the_record_of_another_supervisor(
    lookup: Lookup, process: subprocess.Popen[bytes]
) -> None:
    directory = up_records.find_directory(lookup)
    directory.write(record := read_record(lookup, process.pid))
    directory.end()
    assert directory.read() == record
    process.kill()
    process.wait()
    directory.end()
    assert directory.read_last() is None


def test_find_others_lists_servers_of_the_same_model_alone(
    lookup: Lookup, tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    larger = replace(lookup, key=key(max_model_len=64), vllm_args=Arguments(("--api-key", "k")))
    up_records.find_directory(larger).write(record := read_record(larger, process.pid))
    assert record.vllm_args == ("--api-key", "***")
    assert up_records.find_others(lookup) == [record]
    assert up_records.find_others(larger) == []
    elsewhere = replace(lookup, model=replace(lookup.model, path=tmp_path / "other"))
    assert up_records.find_others(elsewhere) == []
    process.kill()
    process.wait()
    assert up_records.find_others(lookup) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}', b"\xff", b"x" * 10_000])
def test_damaged_record_counts_as_none_and_is_removed(lookup: Lookup, content: bytes) -> None:
    directory = up_records.find_directory(lookup)
    directory.write(up_records.describe_own(lookup))
    (record,) = directory.path.iterdir()
    record.write_bytes(content)
    assert directory.read() is None
    directory.remove()
    assert up_records.list_directories(lookup.cache) == []


def test_stop_kills_a_supervisor_that_ignores_sigterm(lookup: Lookup) -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        up_records.stop(read_record(lookup, process.pid), timeout_s=0.1)
    assert process.returncode == -signal.SIGKILL


def test_remove_retains_the_files_of_a_start_in_progress(lookup: Lookup) -> None:
    directory = up_records.find_directory(lookup)
    directory.write(up_records.describe_own(lookup))
    directory.remove()  # it runs
    assert directory.read() is not None
    directory.end()
    with ExitStack() as lock:
        directory.lock(lock, lambda: None)
        directory.remove()
        assert directory.path.is_dir()
    directory.remove()
    assert up_records.list_directories(lookup.cache) == []


def test_list_names_covers_alias_repository_and_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert up_records.list_names("./mine") == {str(tmp_path / "mine")}
    assert "llama2-7b" in up_records.list_names("meta-llama/Llama-2-7b-hf")
    assert "llama2-7b" in up_records.list_names("Llama2-7B")
    assert up_records.list_names("org/other") == {"org/other"}
    assert (
        up_records.list_names("tiny-llama:v2")
        == up_records.list_names("tiny-llama@sha256:12ab")
        == {"tiny-llama"}
    )


def test_untrusted_bundle_of_a_server_is_a_setting_and_the_permission_alone_is_none(
    lookup: Lookup, publish: Publish, tmp_path: Path
) -> None:
    foreign = publish(signer=sign.host_key(tmp_path / "other"))
    untrusted = up_records.digest_settings(replace(lookup, bundle=foreign, accepts=anyone), {})
    trusted = up_records.digest_settings(replace(lookup, accepts=anyone), {})
    assert up_records.list_differences(untrusted, trusted) == ["--untrusted"]
    assert up_records.list_differences(trusted, untrusted) == []


def test_key_of_the_digests_is_private_and_made_once(lookup: Lookup) -> None:
    given = replace(lookup, vllm_args=Arguments(("--api-key", "k")))
    first = up_records.digest_settings(given, {})
    key = paths.runtime_dir() / "up.key"
    assert key.stat().st_mode & 0o777 == 0o600 and up_records.digest_settings(given, {}) == first
    key.unlink()
    assert up_records.digest_settings(given, {})[up_records.API_KEY] != first[up_records.API_KEY]
