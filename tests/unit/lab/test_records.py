import asyncio
import json
from collections.abc import Callable

import pytest
from support import pages
from tools.openai_server import FakeServer, running

from coldstart.lab.live import Target, replay
from coldstart.lab.records import Replay, RequestRecord, parse_slo, summarize, tabulate
from coldstart.lab.report import ReplayRun, compare_runs, find_highest_rates, report, tabulate_metrics
from coldstart.lab.traces import TraceRequest


def record(number: int, first: float, end: float, tokens: int) -> RequestRecord:
    return RequestRecord(
        number, 1.0, 10, tokens, sent_s=1.5, first_token_s=first, finished_s=end, output_tokens=tokens
    )


FAILED = RequestRecord(9, 1.0, 10, 5, sent_s=1.0, error="OSError: gone")


def test_the_definitions() -> None:
    rows = tabulate([record(0, first=2.0, end=4.0, tokens=5), record(1, 2.0, 2.0, 1), FAILED])
    found = rows[["ttft_s", "tpot_s", "normalized_s", "latency_s", "wait_s"]]
    assert found.iloc[0].tolist() == [1.0, 0.5, 0.6, 3.0, 0.5]
    assert rows["tpot_s"].isna().tolist() == [False, True, True] and rows["ok"].tolist() == [
        True,
        True,
        False,
    ]
    assert tabulate([]).empty


def test_failures_count_as_misses_and_not_as_latencies() -> None:
    records = tabulate([record(0, 2.0, 4.0, 5), record(1, 9.0, 11.0, 5), FAILED])
    found = summarize(records, {None: {"ttft_s": 2.0, "tpot_s": 1.0}}, duration_s=10.0)
    assert (found["requests"], found["completed"], found["failed"]) == (3, 2, 1)
    assert found["slo"] == {
        "limits": {"all": {"ttft_s": 2.0, "tpot_s": 1.0}},
        "attainment": pytest.approx(1 / 3),
        "by_metric": {"ttft_s": pytest.approx(1 / 3), "tpot_s": pytest.approx(2 / 3)},
    }
    assert found["goodput_per_s"] == pytest.approx(0.1)
    assert found["ttft_s"]["mean"] == 4.5  # type: ignore[index]
    json.dumps(found)


def test_a_page_has_the_distribution_of_each_metric() -> None:
    done = Replay([FAILED, record(0, 2.0, 4.0, 5)], duration_s=4.0)
    made = report("live", [ReplayRun.from_replay("one", None, 0, done, {})], {}, is_comparison=False)
    found = pages.plots(made.render("html"))
    assert len(found) == 5
    assert {"TTFT (s)", "share of requests (%)"} <= set[str]().union(*map(pages.read_labels, found))


def test_each_model_is_judged_by_its_own_limits() -> None:
    records = [record(0, 2.0, 4.0, 5), record(1, 2.0, 4.0, 5), record(2, 9.0, 11.0, 5)]
    for one, model in zip(records, "aba", strict=True):
        one.model, one.cold = model, model == "b"
    found = summarize(tabulate(records), {"a": {"ttft_s": 2.0}, "b": {"ttft_s": 0.5}}, 10.0)
    assert found["slo"]["attainment"] == pytest.approx(1 / 3) and found["cold_share"] == pytest.approx(1 / 3)
    assert {name: (one["requests"], one["slo"]["attainment"]) for name, one in found["models"].items()} == {
        "a": (2, 0.5),
        "b": (1, 0.0),
    }
    assert found["models"]["b"]["slo"]["limits"] == {"b": {"ttft_s": 0.5}}
    _, (_, models) = tabulate_metrics(found)
    assert models[0] == ["a", "4.5", "7.65", "0.5", "1.3", "0.0%", "50.0%", "0.1"]


def test_a_comparison_pairs_the_rounds_and_leaves_out_incomplete_replays() -> None:
    def run(name: str, number: int, first: float, ended: str = "complete", rate: float = 1.0) -> ReplayRun:
        done = Replay([record(0, 1 + first, 1 + 2 * first, 5), FAILED], 10.0, ended)
        return ReplayRun.from_replay(name, rate, number, done, {None: {"ttft_s": 4.0}})

    slow = [run("slow", number, first) for number, first in enumerate((2.0, 4.0, 8.0))]
    fast = [run("fast", number, first) for number, first in enumerate((1.0, 2.0, 4.0))]
    cut = [run("slow", 3, 0.5, "interrupted"), run("fast", 0, 0.5, rate=2.0)]
    one, two, three = compare_runs([*slow, *fast, *cut])
    assert (one["name"], one["rounds"], two["rounds"], three["rate"]) == ("slow", 3, 3, 2.0)
    assert {mark: one["ttft_mean_s"][mark] for mark in ("median", "min", "max", "n")} == {
        "median": 4.0, "min": 2.0, "max": 8.0, "n": 3
    }  # fmt: skip
    assert (two["ttft_mean_s"]["ratio"], two["ttft_mean_s"]["ratio_ci95"]) == (0.5, (0.5, 0.5))
    assert (two["attainment"]["median"], two["goodput_per_s"]["median"]) == (0.5, 0.1)
    assert (one["attainment"]["ratio"], three["ttft_mean_s"]["ratio"]) == (None, None)
    assert find_highest_rates([one, two, three]) == {"slow": None, "fast": None}
    served = {"attainment": {"median": 0.95}}
    assert find_highest_rates([{**two, **served}, {**three, **served}, one]) == {"fast": 2.0, "slow": None}


def target(port: int, timeout_s: float = 60.0) -> Target:
    return Target(f"http://127.0.0.1:{port}", "m", "key", timeout_s=timeout_s)


def no_signals(stop: Callable[[], None]) -> None:
    """Ignore signals, because a test must not replace the process's handlers."""


def trace(count: int, gap_s: float = 0.0, output: int = 3) -> list[TraceRequest]:
    return [TraceRequest(i * gap_s, 20, output) for i in range(count)]


@pytest.mark.parametrize("mode", ["ok", "length"])
def test_every_token_is_timed_and_counted(mode: str) -> None:
    with running(FakeServer(mode)) as server:
        result = replay(trace(5, 0.01), target(server.port), register_interrupt=no_signals)
    assert result.end_reason == "complete"
    assert [record.number for record in result.records] == [0, 1, 2, 3, 4]
    for record in result.records:
        assert record.ok and record.output_tokens == 3
        assert (
            record.sent_s is not None and record.first_token_s is not None and record.finished_s is not None
        )
        assert record.due_s <= record.sent_s <= record.first_token_s <= record.finished_s
    assert server.bodies[0]["stream"] is True and server.bodies[0]["ignore_eos"] is True
    assert [len(body["prompt"]) for body in server.bodies] == [20] * 5  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "words"),
    [("error", "429"), ("cut", "the connection was lost"), ("hang", "did not finish within 0.3 s")],
)
def test_a_failing_request_is_recorded_not_raised(mode: str, words: str) -> None:
    with running(FakeServer(mode)) as server:
        server_target = target(server.port, 0.3 if mode == "hang" else 60.0)
        result = replay(trace(2), server_target, register_interrupt=no_signals)
    assert all(record.error and words in record.error and not record.ok for record in result.records)


def test_an_interrupt_keeps_what_was_measured() -> None:
    def soon(stop: Callable[[], None]) -> None:
        after = stop if server.answered > 2 else lambda: soon(stop)
        asyncio.get_running_loop().call_later(0.25, after)

    with running(FakeServer()) as server:
        result = replay(trace(10_000, 0.02), target(server.port), register_interrupt=soon)
    assert result.end_reason == "interrupted"
    assert 0 < sum(record.ok for record in result.records) <= len(result.records) < 10_000
