"""Generated traces in each format, malformed rows, and requests of a replay from its options."""

from pathlib import Path
from statistics import mean, pstdev

import pytest

from coldstart.lab.plan import TracePlan, map_models, rearrive
from coldstart.lab.traces import Columns, TraceError, TraceReport, TraceRequest, prompt_tokens, read_trace

SAMPLES = {
    "mooncake": '{"timestamp": 1000, "input_length": 7, "output_length": 3, "hash_ids": [1, 2]}\n'
    '{"timestamp": 2500, "input_length": 8, "output_length": 4, "hash_ids": [], "model": "b"}\n',
    "azure-llm": "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,7,3\n2023-11-16 18:15:48.1805900,8,4\n",
    "azure-functions": "app,func,end_timestamp,duration\na,f,10,9\na,g,12,9.5\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,7,3,10,Conversation log\n6.5,GPT-4,8,4,12,API log\n",
}


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", SAMPLES)
def test_each_format_gives_relative_seconds(name: str, tmp_path: Path) -> None:
    rows = read_trace(write(tmp_path, SAMPLES[name]), name)
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 1.5])
    lengths = (512, 128) if name == "azure-functions" else (7, 3)
    assert (rows[0].prompt_tokens, rows[0].output_tokens) == lengths


SHAREGPT = """[{"id": "a", "conversations": [{"from": "human", "value": "12345678"}, {"from": "gpt", "value": "12345"}]},
 {"id": "b", "conversations": [{"from": "human", "value": "alone"}]}]"""
ALPACA = """[{"instruction": "1234", "input": "", "output": "12345678"},
 {"instruction": "123", "input": "1234", "output": ""}]"""


@pytest.mark.parametrize(("name", "text"), [("sharegpt", SHAREGPT), ("alpaca", ALPACA)])
def test_data_set_of_texts_gives_token_counts_and_names_rows_without_an_answer(
    name: str, text: str, tmp_path: Path
) -> None:
    report = TraceReport()
    (row,) = read_trace(write(tmp_path, text), name, report=report)
    assert (row.arrival_s, row.prompt_tokens, row.output_tokens) == (
        0.0,
        *((2, 2) if name == "sharegpt" else (1, 2)),
    )
    assert [bad.line for bad in report.bad_rows] == [2]
    with pytest.raises(TraceError, match="expected a JSON array"):
        read_trace(write(tmp_path, "{}"), name)


def test_a_plain_csv_is_read_by_column_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "when,in,out,who\n1000,7,3,x\n3000,8,4,y\n")
    columns = Columns.parse("time=when,prompt=in,output=out,model=who,unit=ms")
    assert [(r.arrival_s, r.model) for r in read_trace(path, "csv", columns=columns)] == [
        (0.0, "x"),
        (2.0, "y"),
    ]


def test_malformed_rows_are_named_and_skipped(tmp_path: Path) -> None:
    bad = (
        "{oops\n"
        + SAMPLES["mooncake"]
        + '{"timestamp": 3}\n{"timestamp": 4, "input_length": 0, "output_length": 1}\n'
    )
    report = TraceReport()
    rows = list(read_trace(write(tmp_path, bad), "mooncake", report=report))
    assert len(rows) == report.rows == 2
    assert [row.line for row in report.bad_rows] == [1, 4, 5]
    assert "lacks input_length" in report.bad_rows[1].reason and "above zero" in report.bad_rows[2].reason


def test_unreadable_trace_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\n1,2\n")
    with pytest.raises(TraceError, match="no column TIMESTAMP"):
        list(read_trace(path, "azure-llm"))
    with pytest.raises(TraceError, match="column mapping"):
        list(read_trace(path, "csv"))
    with pytest.raises(ValueError, match="must be one of mooncake"):
        TracePlan(path, "parquet")
    with pytest.raises(TraceError, match="cannot read"):
        list(read_trace(tmp_path / "absent", "mooncake"))
    with pytest.raises(TraceError, match="missing"):
        Columns.parse("time=t")


def test_equal_hash_ids_give_equal_prefixes_and_rows_differ_otherwise() -> None:
    shared = TraceRequest(0, 1100, 1, None, (4, 9))
    one, two = prompt_tokens(shared, 0, 7, 1000), prompt_tokens(shared, 1, 7, 1000)
    assert len(one) == len(two) == 1100
    assert one[:1024] == two[:1024] and one[1024:] != two[1024:]
    assert all(10 <= token < 1000 for token in one)
    assert prompt_tokens(shared, 0, 8, 1000) != one


ROWS = [TraceRequest(float(i), 10 + i, 5 + i, f"f{i % 5}") for i in range(20)]


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_arrivals_have_the_asked_rate_and_cv(cv: float) -> None:
    rows = rearrive((ROWS[0] for _ in range(40_000)), rate=4.0, cv=cv, seed=3)
    times = [row.arrival_s for row in rows]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)


def test_a_plan_changes_speed_duration_limit_and_lengths(tmp_path: Path) -> None:
    lines = "".join(f"{i},{10 + i},{5 + i}\n" for i in range(20))
    path, columns = write(tmp_path, f"t,p,o\n{lines}"), "time=t,prompt=p,output=o"
    fast = TracePlan(path, "csv", columns, speedup=2.0, duration_s=3.0).rows(TraceReport())
    assert [row.arrival_s for row in fast] == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    capped = TracePlan(path, "csv", columns, limit=4, max_prompt=10, max_output=5).rows(TraceReport())
    assert [(row.prompt_tokens, row.output_tokens) for row in capped] == [(10, 5)] * 4


def test_models_are_mapped_round_robin_by_zipf_and_by_column() -> None:
    robin = [row.model for row in map_models(ROWS, ["a", "b"], "round-robin", 0)]
    assert robin[:4] == ["a", "b", "a", "b"]
    many = (ROWS[0] for _ in range(3000))
    zipf = [row.model for row in map_models(many, ["a", "b", "c"], "zipf", 1)]
    assert zipf.count("a") > zipf.count("b") > zipf.count("c") > 0
    column = {
        (old.model, new.model)
        for old, new in zip(ROWS, map_models(ROWS, ["a", "b"], "column", 0), strict=True)
    }
    assert column == {("f0", "a"), ("f1", "b"), ("f2", "a"), ("f3", "b"), ("f4", "a")}
    assert list(map_models(ROWS, [], "zipf", 0)) == ROWS
    with pytest.raises(ValueError, match="must be one of round-robin"):
        TracePlan(Path("trace"), mapping="alphabet")


BESIDE = (folder / "shared" / "traces" for folder in Path(__file__).parents)
REAL = next((folder for folder in BESIDE if folder.is_dir()), Path("absent"))


@pytest.mark.parametrize(
    ("file", "name", "count"),
    [
        ("azure_llm_2023_conv.csv", "azure-llm", 19_366),
        ("mooncake_fast25_conversation.jsonl", "mooncake", 12_031),
        ("azure_functions_2021_sample.csv", "azure-functions", 199),
    ],
)
def test_the_real_traces_are_read_whole(file: str, name: str, count: int) -> None:
    path = REAL / file
    if not path.exists():
        pytest.skip(f"the real trace {file} is not beside the project")
    report = TraceReport()
    rows = len(read_trace(path, name, report=report))
    assert (rows, report.skipped) == (count, 0)
