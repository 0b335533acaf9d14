"""Exit codes in words, the kernel's count of processes killed because of missing memory, and the memory of a control group."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.processes import has_ended, wait_until

from coldstart.system.proc import exits, processes


@pytest.mark.parametrize(
    ("line", "file", "text"),
    [
        ("0::/job", "sys/fs/cgroup/job/memory.events", "low 0\noom 9\noom_kill 4\n"),
        ("0::/", "proc/vmstat", "nr_free_pages 7\noom_kill 4\n"),
    ],
)
def test_memory_kills_are_counted_by_the_control_group_or_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, file: str, text: str
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{line}\n")
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(exits, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert exits.count_oom_kills() == 4


def test_cached_files_of_a_control_group_count_as_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 400\ninactive_file 500"}
    contents = {f"sys/fs/cgroup/job/{name}": text for name, text in contents.items()}
    contents |= {"proc/self/cgroup": "0::/job", "proc/meminfo": "MemAvailable: 99 kB"}
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    monkeypatch.setattr(processes, "Path", lambda path: tmp_path / path.lstrip("/"))
    assert processes.read_available_memory() == 600


ROOT_CAUSE = "ValueError: Load format `strange` is not supported"
LAST = "RuntimeError: Engine core initialization failed. See root cause above."


def test_the_root_cause_comes_before_the_end_and_noise_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "\n".join(
            [
                "INFO loading",
                "WARNING Found ulimit of 20000. This can cause errors like `OSError: [Errno 24] Too many open files`.",
                f"(EngineCore pid=7) ERROR 11-21 [core.py:1] {ROOT_CAUSE}",
                *(f'  File "frame {number}"' for number in range(40)),
                ROOT_CAUSE,
                *(f'  File "later frame {number}"' for number in range(20)),
                LAST,
                "nanobind: leaked 513 functions!",
                *(f' - leaked function "{number}"' for number in range(30)),
                " - ... skipped remainder",
                "See https://nanobind.readthedocs.io/en/latest/refleaks.html",
            ]
        )
    )
    shown = exits.read_log_tail(log).splitlines()
    assert shown[0] == ROOT_CAUSE and shown[-1] == LAST and len(shown) == 16


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            "ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, No architecture ['X'] here. [type=value_error, input_value=ArgsKwargs()]\nIt ends.",
            "No architecture ['X'] here.",
        ),
        (
            "KeyError: 'first'\nDuring handling of the above:\nRuntimeError: and last\nleaked",
            "RuntimeError: and last",
        ),
        ("Killed", None),
        (
            "Found ulimit of 20000. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
            None,
        ),
        (
            "WARNING 11-25 [utils.py:7] OSError: [Errno 24] Too many open files\n"
            "ValueError: User-specified max_model_len (99999) is greater than the derived max_model_len\n"
            "INFO 11-25 [api.py:9] retried after OSError: [Errno 24] Too many open files\n"
            "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n",
            "ValueError: User-specified max_model_len (99999) is greater than the derived max_model_len",
        ),
        (
            "OSError: [Errno 24] Too many open files\n"
            "pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, User-specified max_model_len (99999) is too great. [type=value_error]\n",
            "User-specified max_model_len (99999) is too great.",
        ),
    ],
)
def test_last_error_is_one_line(tmp_path: Path, said: str, expected: str | None) -> None:
    (tmp_path / "log").write_text(said)
    assert exits.find_last_error(tmp_path / "log") == expected


def _started(script: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["/bin/sh", "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    return process


PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
time.sleep(60)
"""
GROUP = """
import os, signal, subprocess, sys, time
from coldstart.system.proc.lifeline import die_as_a_group
die_as_a_group()
reader, writer = os.pipe()
forked = os.fork()
if not forked:
    os.write(writer, b".")
else:
    os.read(reader, 1)  # Python drops the signals of a forked process until it runs
    asked = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(os.getpid(), forked, asked.pid, flush=True)
for _ in range(600):
    time.sleep(0.1)  # a signal just before one long sleep would wait for its end
"""


def test_children_end_with_the_process() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, GROUP], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    family = [*map(int, parent.stdout.readline().split())]
    parent.kill()
    parent.communicate(timeout=30)
    assert len(family) == 3
    wait_until(lambda: all(map(has_ended, family)))


def test_forked_child_ends_alone() -> None:
    first = subprocess.Popen(
        [sys.executable, "-c", GROUP], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert first.stdout is not None
    _, forked, asked = map(int, first.stdout.readline().split())
    psutil.Process(forked).send_signal(signal.SIGTERM)
    wait_until(lambda: has_ended(forked))
    assert first.poll() is None and not has_ended(asked)
    first.terminate()
    first.communicate(timeout=30)
    assert first.returncode == -signal.SIGKILL
    wait_until(lambda: has_ended(asked))
