"""coldstart trace-replay: both targets, the reports it writes, and its exit codes."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import pages
from support.processes import wait_until
from tools.command_line import Run
from tools.openai_server import FakeServer, running

# A simulated engine runs vLLM's scheduler, whose import takes seconds.
SIMULATES = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
PROFILE = {"prefill": [[1, 0.01], [512, 0.05]], "decode": [[1, 0.01], [16, 0.012]]}


@pytest.fixture
def trace(home: Path) -> Path:
    path = home / "trace.jsonl"
    rows = [
        {"timestamp": i * 20, "input_length": 9 + i, "output_length": 3, "hash_ids": [i]} for i in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    (home / "profile.json").write_text(json.dumps(PROFILE))
    return path


METRICS = ("ttft_mean_s", "ttft_p95_s", "tpot_mean_s", "normalized_mean_s", "attainment", "goodput_per_s")


@pytest.mark.slow
@SIMULATES
def test_simulated_schedulers_are_compared_at_each_rate_in_every_report(
    run: Run, trace: Path, home: Path
) -> None:
    given = ["--simulate", "--profile=profile.json", "--sweep=2,50", "--slo=ttft=1", "--export=json"]
    # vLLM takes a second for all blocks of a device, in each of the six replays.
    given += ["--alpha=1", "--kv-blocks=64"]
    policies = ["fcfs", "deadline", "skip-join-mlfq"]
    reports = [f"--export={form}=out.{form}" for form in ("csv", "html", "markdown")]
    done = run("trace-replay", str(trace), *given, *reports, *(f"--scheduler={one}" for one in policies))
    found = json.loads(done.stdout)
    rows = found["compared"]
    assert [(row["rate"], row["name"]) for row in rows] == [
        (rate, one) for rate in (2, 50) for one in policies
    ]
    assert found["highest_rate"] == dict.fromkeys(policies, 50.0)
    assert all(row[metric]["median"] > 0 for row in rows for metric in METRICS)
    assert {(one["ended"], one["completed"]) for one in found["replays"]} == {("complete", 10)}
    assert (found["kind"], found["schema_version"]) == ("simulated", 1)
    assert found["rows"]["bad_rows"][0]["line"] == 11 and "line 11 skipped" in done.stderr
    assert len(pages.plots((home / "out.html").read_text())) >= 4
    assert "| TTFT mean (s) |" in (home / "out.markdown").read_text()


def test_servers_take_turns_in_rounds_and_are_compared(run: Run, trace: Path, home: Path) -> None:
    with running(FakeServer()) as fast, running(FakeServer(gap_s=0.05)) as slow:
        urls = [f"http://127.0.0.1:{server.port}" for server in (slow, fast)]
        targets = [f"--target={url}" for url in urls]
        given = [*targets, "--rounds=3", "--slo=ttft=0.04,tpot=9", "--limit=4"]
        reports = [f"--export={form}=out.{form}" for form in ("csv", "html", "markdown", "json")]
        done = run("trace-replay", str(trace), *given, *reports)
    found = json.loads((home / "out.json").read_text())
    turns = [(one["round"], one["name"]) for one in found["replays"]]
    assert turns == [(number, url) for number in range(3) for url in (urls[::-1] if number == 1 else urls)]
    first, second = found["compared"]
    assert (first["rounds"], first["ttft_mean_s"]["ratio"], second["name"]) == (3, 1.0, urls[1])
    assert first["ttft_mean_s"]["min"] <= first["ttft_mean_s"]["median"] <= first["ttft_mean_s"]["max"]
    low, high = second["tpot_mean_s"]["ratio_ci95"]
    assert low <= second["tpot_mean_s"]["ratio"] <= high
    # A round repeats no prompt of another one, and its requests are the same on both servers.
    prompts = [[tuple(body["prompt"]) for body in server.bodies] for server in (slow, fast)]  # type: ignore[call-overload]
    assert sorted(prompts[0]) == sorted(prompts[1]) and len(set(prompts[0])) == 12
    assert done.stdout.splitlines()[0].split()[:3] == ["name", "TTFT", "mean"]
    table = (home / "out.csv").read_text().splitlines()
    assert len(table) == 1 + 2 * 3 * 4 and table[0].startswith("name,rate,round,number,due_s")
    assert f"| {urls[1]} |" in (home / "out.markdown").read_text()
    page = (home / "out.html").read_text()
    pages.check(page)
    found = pages.plots(page)
    assert len(found) == 5 and urls[0] in page
    assert {"TTFT (s)", "share of requests (%)"} <= set[str]().union(*map(pages.read_labels, found))


def test_a_live_replay_measures_a_server(run: Run, trace: Path) -> None:
    with running(FakeServer()) as server:
        url = f"http://127.0.0.1:{server.port}"
        done = run("trace-replay", str(trace), "--target", url, "--model", "m", "--format", "json")
    found = json.loads(done.stdout)
    assert (found["kind"], found["completed"], found["failed"]) == ("live", 10, 0)
    assert found["wait_s"]["max"] >= 0 and {body["model"] for body in server.bodies} == {"m"}


def test_a_replay_of_failed_requests_lists_the_causes_and_ends_with_no(run: Run, trace: Path) -> None:
    with running(FakeServer("error")) as server:
        url = f"http://127.0.0.1:{server.port}"
        done = run("trace-replay", str(trace), "--target", url, code=1)
        found = json.loads(run("trace-replay", str(trace), "--target", url, "--format=json", code=1).stdout)
    assert "10 of 10 requests failed: " in done.stderr and "every request to" in done.stderr
    (cause,) = found["causes"]
    assert cause["requests"] == 10 and f"10 of 10 requests failed: {cause['error']}" in done.stderr


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--profile=trace.jsonl", "--profile"),
        ("--profile=program", "--profile"),
        ("--slo=foo", "--slo"),
        ("--slo=ttft=x", "--slo"),
        ("--speedup=0", "--speedup must be above 0"),
        ("--speedup=nan", "--speedup must be above 0"),
        ("--limit=0", "--limit must be at least 1"),
        ("--duration=-1", "--duration must be above 0"),
        ("--rate=0", "--rate must be above 0"),
        ("--rate=1 --cv=0", "--cv must be above 0"),
        ("--sweep=1,0 --slo=ttft=1", "--sweep"),
        ("--models=", "contains an empty name"),
        ("--models=a,,b", "contains an empty name"),
        ("--columns=time=t,prompt=p,output=o", "t, p, o; its header is"),
        ("--rounds=0 --rate=1", "--rounds"),
        ("--scheduler=magic", "--scheduler must be"),
    ],
)
def test_an_invalid_option_has_a_hint(given: str, words: str, run: Run, trace: Path, home: Path) -> None:
    (home / "program").write_bytes(b"\x7fELF\xff")
    done = run("trace-replay", "trace.jsonl", "--simulate", "--profile=profile.json", *given.split(), code=2)
    assert words in done.stderr and "\nhint: " in done.stderr and not done.stdout


@pytest.mark.parametrize(
    ("given", "words"), [("", "--simulate"), ("--simulate", "--profile"), ("--target ftp://x", "URL")]
)
def test_missing_or_invalid_target_is_named(given: str, words: str, run: Run, trace: Path) -> None:
    assert words in run("trace-replay", "trace.jsonl", *given.split(), code=2).stderr


def test_dead_target_exits_1_with_the_report(run: Run, trace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        done = run("trace-replay", str(trace), "--target", url, "--format", "json", code=1)
    assert json.loads(done.stdout)["ended"] == "target dead"
    assert "does not respond" in done.stderr


@pytest.mark.parametrize(
    ("number", "ended"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")]
)
def test_signal_writes_the_partial_report(trace: Path, home: Path, number: int, ended: str) -> None:
    with running(FakeServer()) as server:
        url = f"http://127.0.0.1:{server.port}"
        given = ["--target", url, "--speedup", "0.001", "--format", "json", "-o", "part.json"]
        program = [sys.executable, "-m", "coldstart.commands.cli", "trace-replay", str(trace)]
        child = subprocess.Popen([*program, *given], cwd=home)
        threading.Thread(target=_signal_once_asked, args=(server, child, number), daemon=True).start()
        assert child.wait(60) == 128 + number
    found = json.loads((home / "part.json").read_text())
    assert found["ended"] == ended and 1 <= found["completed"] <= found["requests"] < 10


def _signal_once_asked(server: FakeServer, child: "subprocess.Popen[bytes]", number: int) -> None:
    wait_until(lambda: server.answered)
    time.sleep(0.2)
    child.send_signal(number)


HOST = """
memory = "20GiB"
policy = "iam"
[models.small]
memory = "4GiB"
start_s = 0.01
[models.large]
memory = "18GiB"
start_s = 0.02
"""


def test_host_simulation_of_two_models_that_do_not_fit_together(run: Run, trace: Path, home: Path) -> None:
    (home / "host.toml").write_text(HOST)
    given = ["trace-replay", str(trace), "--profile", "profile.json", "--host", "host.toml"]
    found = json.loads(run(*given, "--format", "json").stdout)
    assert (found["kind"], found["requests"], found["causes"]) == ("simulated host", 10, [])
    assert {name: row["requests"] for name, row in found["models"].items()} == {"small": 5, "large": 5}
    assert found["counts"]["starts"] >= 2 and found["counts"]["peak_memory_bytes"] == 18 << 30
    reports = ["--export=html=host.html", "--export=csv=host.csv", "--slo=ttft=100,tpot=9,normalized=99"]
    shown = run(*given, *reports).stdout
    assert "policy iam, starts" in shown and "goodput per s " in shown and "SLO attainment 100.0%" in shown
    assert all(label in shown for label in ("TTFT", "TPOT", "per token"))
    page = (home / "host.html").read_text()
    pages.check(page)
    assert len(pages.plots(page)) >= 4 and "large" in page
    lines = (home / "host.csv").read_text().splitlines()
    assert len(lines) == 11 and lines[0].startswith("name,rate,round,number,due_s,prompt_tokens")
    assert [line.split(",")[5] for line in lines[1:]] == [str(9 + row) for row in range(10)]  # prompt_tokens
    (home / "lru.toml").write_text(HOST.replace("iam", "lru"))
    compared = run(*given, "--host", "lru.toml", "--slo=ttft=1", "--rate=9", "--rounds=2", "--format=json")
    rows = json.loads(compared.stdout)["compared"]
    assert [(row["name"], row["rounds"]) for row in rows] == [("host.toml", 2), ("lru.toml", 2)]
    assert all(row[metric]["n"] == 2 for row in rows for metric in METRICS)


FLEET = """
[servers.s]
count = 2
memory = "24GB"
network = "1GB"
load = "10GB"
[models.small]
size = "4GB"
memory = "6GB"
decode_s = 0.01
[models.large]
size = "12GB"
memory = "14GB"
ttft_s = 8
"""


def test_fleet_simulation_uses_the_times_of_each_model(run: Run, trace: Path, home: Path) -> None:
    (home / "fleet.toml").write_text(FLEET)
    given = ["trace-replay", str(trace), "--fleet", "fleet.toml"]
    found = json.loads(run(*given, "--format", "json").stdout)
    assert (found["kind"], found["requests"], found["causes"]) == ("simulated fleet", 10, [])
    assert found["models"]["small"]["requests"] == 5 and found["counts"]["starts"] == 2
    assert found["slo"]["limits"]["large"] == {"ttft_s": 8.0} and found["slo"]["attainment"] == 0.5
    assert "servers 2, starts 2" in run(*given).stdout
    done = run(*given, "--slo", "ttft=100", "--export", "csv=fleet.csv")
    assert "SLO attainment 100.0%" in done.stdout and "TPOT" in done.stdout
    (home / "one.toml").write_text(FLEET.replace("count = 2", "count = 1"))
    compared = json.loads(run(*given, "--fleet", "one.toml", "--format=json").stdout)["compared"]
    assert [row["name"] for row in compared] == ["fleet.toml", "one.toml"]
    assert all(row[metric]["median"] >= 0 for row in compared for metric in METRICS)
    assert len((home / "fleet.csv").read_text().splitlines()) == 11
    assert "lacks these models: nobody" in run(*given, "--models", "nobody", code=2).stderr
