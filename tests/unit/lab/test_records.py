import json
from pathlib import Path
from statistics import mean, pstdev

import pytest
from tools.openai_server import FakeServer, running

from coldstart.errors import UsageError
from coldstart.lab.live import Target, replay
from coldstart.lab.plan import TracePlan, assign_models, generate_prompt, replace_arrivals
from coldstart.lab.records import Replay, RequestRecord, summarize, tabulate
from coldstart.lab.report import ReplayRun, compare_runs, find_highest_rates, tabulate_metrics
from coldstart.lab.traces import Columns, TraceReport, TraceRequest, read_trace


def record(number: int, first: float, end: float, tokens: int) -> RequestRecord:
    return RequestRecord(
        number, 1.0, 10, tokens, sent_s=1.5, first_token_s=first, finished_s=end, output_tokens=tokens
    )


FAILED = RequestRecord(9, 1.0, 10, 5, sent_s=1.0, error="OSError: gone")


def test_the_definitions() -> None:
    rows = tabulate([record(0, first=2.0, end=4.0, tokens=5), record(1, 2.0, 2.0, 1), FAILED])
    found = rows[["ttft_s", "tpot_s", "normalized_s", "latency_s", "wait_s"]]
    assert found.iloc[0].tolist() == [1.0, 0.5, 0.6, 3.0, 0.5]
    assert rows["tpot_s"].isna().tolist() == [False, True, True]
    assert rows["ok"].tolist() == [True, True, False]
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


def trace(count: int, gap_s: float = 0.0, output: int = 3) -> list[TraceRequest]:
    return [TraceRequest(i * gap_s, 20, output) for i in range(count)]


@pytest.mark.parametrize("mode", ["ok", "length"])
def test_every_token_is_timed_and_counted(mode: str) -> None:
    with running(FakeServer(mode)) as server:
        result = replay(trace(5, 0.01), target(server.port))
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
        result = replay(trace(2), server_target)
    assert all(record.error and words in record.error and not record.ok for record in result.records)


SAMPLES = {
    "Mooncake": '{"timestamp": 1000, "input_length": 7, "output_length": 3, "hash_ids": [1, 2]}\n'
    '{"timestamp": 2500, "input_length": 8, "output_length": 4, "hash_ids": [], "model": "b"}\n',
    "Azure LLM": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,7,3\n2023-11-16 18:15:48.1805900,8,4\n",
    "Azure Functions 2021": "app,func,end_timestamp,duration\na,f,10,9\na,g,12,9.5\n",
    "BurstGPT": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,7,3,10,Conversation log\n6.5,GPT-4,8,4,12,API log\n",
}
# BurstGPT_3 has two more columns, and the Azure LLM trace of 2024 times with a zone.
LATER = {
    "Azure LLM": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,7,3\n2024-05-10 00:00:01.509930+00:00,8,4\n",
    "BurstGPT": "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "19440110.0,1722ac82,43,GPT-4,7,3,10,Conversation log\n19440111.5,1722ac82,2,ChatGPT,8,4,12,Conversation log\n",
}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize(("name", "text"), [*SAMPLES.items(), *LATER.items()])
def test_each_format_is_detected_and_gives_relative_seconds(name: str, text: str, tmp_path: Path) -> None:
    report = TraceReport()
    rows = read_trace(write(tmp_path, text), report=report)
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 1.5])
    lengths = (512, 128) if name == "Azure Functions 2021" else (7, 3)
    assert (rows[0].prompt_tokens, rows[0].output_tokens) == lengths
    assert (report.trace_format, report.rows, report.skipped) == (name, 2, 0)


def of_2019(*rows: str) -> str:
    """Return a file with the published columns: one for each minute of a day."""
    days = [",".join([*row.split(","), *["0"] * 1440][:1444]) for row in rows]
    return "\n".join(
        [",".join(["HashOwner", "HashApp", "HashFunction", "Trigger", *map(str, range(1, 1441))]), *days]
    )


def test_invocation_counts_of_azure_functions_2019_become_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = of_2019("o,a,f,http,0,3,0,2", "o,a,g,timer,0,1,1,1", "o,a,h,queue,0,-1", "o,a,i,queue,x")
    path, report = write(tmp_path, text), TraceReport()
    rows = read_trace(path, report=report)
    assert (report.trace_format, report.rows, report.skipped) == ("Azure Functions 2019", 8, 2)
    assert [bad.line for bad in report.bad_rows] == [4, 5]
    assert sorted(row.model or "" for row in rows) == [*"fffff", *"ggg"]
    times = [row.arrival_s for row in rows]
    assert times == sorted(times) and times[0] == 0 and times[-1] <= 3 * 60
    # The second minute has four invocations, the third one and the fourth three; the first request is up to 60 s late.
    gaps = sum(time < 60 for time in times), sum(time <= 120 for time in times)
    assert 4 <= gaps[0] <= 5 and 5 <= gaps[1] <= 8 and read_trace(path) == rows
    assert len(read_trace(path, limit=3)) == 4 and len(read_trace(path, until_s=1)) == 5
    assert [len(arrange(TracePlan(path, limit=count))) for count in (2, 5, 9)] == [2, 5, 8]
    monkeypatch.setattr("coldstart.lab.traces.MAX_INVOCATIONS", 2000)
    many = write(tmp_path, of_2019("o,a,f,http,1999,1999"))
    with pytest.raises(UsageError, match="more than the maximum of 2,000"):
        read_trace(many)
    assert len(read_trace(many, until_s=0, limit=1)) == 1999


SHAREGPT = """[{"id": "a", "conversations": [{"from": "human", "value": "12345678"}, {"from": "gpt", "value": "12345"}]},
 {"id": "b", "conversations": [{"from": "human", "value": "alone"}]}]"""
ALPACA = """[{"instruction": "1234", "input": "", "output": "12345678"},
 {"instruction": "123", "input": "1234", "output": ""}]"""


@pytest.mark.parametrize(("name", "text"), [("ShareGPT", SHAREGPT), ("Alpaca", ALPACA)])
def test_texts_give_token_counts_and_rows_without_answer_named(name: str, text: str, tmp_path: Path) -> None:
    report = TraceReport()
    (row,) = read_trace(write(tmp_path, text), report=report)
    assert report.trace_format == name
    assert (row.arrival_s, row.prompt_tokens, row.output_tokens) == (0.0, 2 - (name == "Alpaca"), 2)
    assert [bad.line for bad in report.bad_rows] == [2]
    for damaged in (text[:-1], "[" * 99999):
        with pytest.raises(UsageError, match=r"cannot parse the trace .* as JSON"):
            read_trace(write(tmp_path, damaged))


def test_a_plain_csv_is_read_by_column_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "when,in,out,who\n1000,7,3,x\n3000,8,4,y\n")
    columns = Columns.parse("time=when,prompt=in,output=out,model=who,unit=ms")
    assert [(r.arrival_s, r.model) for r in read_trace(path, columns=columns)] == [(0.0, "x"), (2.0, "y")]


def test_malformed_rows_are_named_and_skipped(tmp_path: Path) -> None:
    bad = (
        "{oops\n"
        + SAMPLES["Mooncake"]
        + '{"timestamp": 3}\n{"timestamp": 4, "input_length": 0, "output_length": 1}\n'
        + f'{{"timestamp": {10**400}, "input_length": 1, "output_length": [1]}}\n{"[" * 99999}\n'
    )
    report, short = TraceReport(), TraceReport()
    lines = "TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n\n3,4,5,6\nx,1,1\n"
    (row,) = read_trace(write(tmp_path, lines), report=short)
    assert row.output_tokens == 5 and [one.line for one in short.bad_rows] == [2, 5]
    rows = list(read_trace(write(tmp_path, bad), report=report))
    assert len(rows) == report.rows == 2
    assert [row.line for row in report.bad_rows] == [1, 4, 5, 6, 7]
    assert "input_length is empty" in report.bad_rows[1].reason
    assert "not a positive integer" in report.bad_rows[2].reason


def test_unreadable_trace_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\n1,2\n")
    with pytest.raises(UsageError, match="an unknown trace format; its columns are a, b"):
        read_trace(path)
    with pytest.raises(UsageError, match="these columns: p; its header is 'a,b'"):
        read_trace(path, columns=Columns.parse("time=a,prompt=p,output=b"))
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "absent")
    with pytest.raises(UsageError, match=r"cannot parse the trace as CSV: .* EOF inside string"):
        read_trace(write(tmp_path, SAMPLES["BurstGPT"] + '"'))
    with pytest.raises(UsageError, match="expected time="):
        Columns.parse("time=t")


def test_equal_hash_ids_give_equal_prefixes_and_rows_differ_otherwise() -> None:
    shared = TraceRequest(0, 1100, 1, None, (4, 9))
    one, two = generate_prompt(shared, 0, 7, 1000), generate_prompt(shared, 1, 7, 1000)
    assert len(one) == len(two) == 1100
    assert one[:1024] == two[:1024] and one[1024:] != two[1024:]
    assert all(10 <= token < 1000 for token in one)
    assert generate_prompt(shared, 0, 8, 1000) != one


ROWS = [TraceRequest(float(i), 10 + i, 5 + i, f"f{i % 5}") for i in range(20)]


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_arrivals_have_the_asked_rate_and_cv(cv: float) -> None:
    rows = replace_arrivals((ROWS[0] for _ in range(40_000)), rate=4.0, cv=cv, seed=3)
    times = [row.arrival_s for row in rows]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)


def arrange(plan: TracePlan) -> list[TraceRequest]:
    return plan.transform(plan.read(TraceReport()))


def test_a_plan_changes_speed_duration_limit_and_lengths(tmp_path: Path) -> None:
    lines = "".join(f"{i},{10 + i},{5 + i}\n" for i in range(20))
    path, columns = write(tmp_path, f"t,p,o\n{lines}"), "time=t,prompt=p,output=o"
    fast = arrange(TracePlan(path, columns, speedup=2.0, duration_s=3.0))
    assert [row.arrival_s for row in fast] == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    capped = arrange(TracePlan(path, columns, limit=4, max_prompt=10, max_output=5))
    assert [(row.prompt_tokens, row.output_tokens) for row in capped] == [(10, 5)] * 4


def test_models_are_mapped_round_robin_by_zipf_and_by_column() -> None:
    robin = [row.model for row in assign_models(ROWS, ["a", "b"], "round-robin", 0)]
    assert robin[:4] == ["a", "b", "a", "b"]
    many = (ROWS[0] for _ in range(3000))
    zipf = [row.model for row in assign_models(many, ["a", "b", "c"], "zipf", 1)]
    assert zipf.count("a") > zipf.count("b") > zipf.count("c") > 0
    column = {
        (old.model, new.model)
        for old, new in zip(ROWS, assign_models(ROWS, ["a", "b"], "column", 0), strict=True)
    }
    assert column == {("f0", "a"), ("f1", "b"), ("f2", "a"), ("f3", "b"), ("f4", "a")}
    assert list(assign_models(ROWS, [], "zipf", 0)) == ROWS
    with pytest.raises(ValueError, match="must be one of round-robin"):
        TracePlan(Path("trace"), mapping="alphabet")


BESIDE = (folder / "shared" / "traces" for folder in Path(__file__).parents)
REAL = next((folder for folder in BESIDE if folder.is_dir()), Path("absent"))


@pytest.mark.parametrize(
    ("file", "name", "count"),
    [
        ("azure_llm_2023_conv.csv", "Azure LLM", 19_366),
        ("mooncake_fast25_conversation.jsonl", "Mooncake", 12_031),
        ("azure_functions_2021_sample.csv", "Azure Functions 2021", 199),
    ],
)
def test_the_real_traces_are_read_whole(file: str, name: str, count: int) -> None:
    path = REAL / file
    if not path.exists():
        pytest.skip(f"the real trace {file} is not beside the project")
    report = TraceReport()
    rows = len(read_trace(path, report=report))
    assert (report.trace_format, rows, report.skipped) == (name, count, 0)
