"""Generated traces in each format, malformed rows, and constant memory."""

import io
import tracemalloc
from itertools import islice
from pathlib import Path
from statistics import mean, pstdev

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tools.examples import examples

from coldstart.lab.traces import TraceError, TraceReport, TraceRequest, read_trace, tables
from coldstart.lab.traces.arrivals import rearrive
from coldstart.lab.traces.formats import Columns, csv_parser
from coldstart.lab.traces.transform import cap_tokens, cut, map_models, sort_by_arrival, speed_up

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
    rows = list(read_trace(write(tmp_path, SAMPLES[name]), name, tokens=(7, 3)))
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 1.5])
    assert rows[0].prompt_tokens == 7 and rows[0].output_tokens == 3


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


def test_malformed_rows_are_refused_on_demand(tmp_path: Path) -> None:
    path = write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,7,3\nnoon,7,3\n")
    with pytest.raises(TraceError, match="line 3: time 'noon'"):
        list(read_trace(path, "azure-llm", strict=True))


@pytest.mark.parametrize("row", ["1,2", "1,2,x", "1,,3", "nan,2,3", "1,2.5,3", "1,-2,3"])
def test_bad_cells_never_become_requests(row: str, tmp_path: Path) -> None:
    report = TraceReport()
    path = write(tmp_path, f"t,p,o\n{row}\n")
    columns = Columns.parse("time=t,prompt=p,output=o")
    assert list(read_trace(path, "csv", columns=columns, report=report)) == []
    assert report.skipped == 1 and report.bad_rows[0].line == 2


def test_unreadable_trace_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\n1,2\n")
    with pytest.raises(TraceError, match="no column TIMESTAMP"):
        list(read_trace(path, "azure-llm"))
    with pytest.raises(TraceError, match="column mapping"):
        list(read_trace(path, "csv"))
    with pytest.raises(TraceError, match="unknown trace format"):
        read_trace(path, "parquet")
    with pytest.raises(TraceError, match="cannot read"):
        list(read_trace(tmp_path / "absent", "mooncake"))
    with pytest.raises(TraceError, match="missing"):
        Columns.parse("time=t")


@pytest.mark.slow
def test_a_hundred_thousand_rows_need_constant_memory(tmp_path: Path) -> None:
    import pandas  # noqa: F401 - loaded before memory is counted

    path = tmp_path / "long.csv"
    with path.open("w") as out:
        out.write("t,p,o\n")
        out.writelines(f"{i},{i % 500 + 1},{i % 90 + 1}\n" for i in range(100_000))
    columns = Columns.parse("time=t,prompt=p,output=o")
    tracemalloc.start()
    rows = sum(1 for _ in sort_by_arrival(rearrive(read_trace(path, "csv", columns=columns), 5, 2, 1)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert rows == 100_000
    assert peak < 4 << 20


ROWS = [TraceRequest(float(i), 10 + i, 5 + i, f"f{i % 5}") for i in range(20)]


@pytest.mark.parametrize("cv", [1.0, 3.0])
def test_arrivals_have_the_asked_rate_and_cv(cv: float) -> None:
    rows = rearrive((ROWS[0] for _ in range(40_000)), rate=4.0, cv=cv, seed=3)
    times = [row.arrival_s for row in rows]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert mean(gaps) == pytest.approx(0.25, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)


def test_the_same_seed_gives_the_same_trace() -> None:
    one, two, three = ([r.arrival_s for r in rearrive(ROWS, 1, 2, seed)] for seed in (5, 5, 6))
    assert one == two != three


def test_speed_duration_limit_and_caps() -> None:
    assert [row.arrival_s for row in cut(speed_up(ROWS, 2.0), 3.0, None)] == [0, 0.5, 1, 1.5, 2, 2.5, 3]
    assert len(list(cut(ROWS, None, 4))) == 4
    assert {(r.prompt_tokens, r.output_tokens) for r in cap_tokens(ROWS, 10, 5)} == {(10, 5)}
    with pytest.raises(TraceError):
        speed_up(ROWS, 0)


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
    with pytest.raises(TraceError, match="unknown model mapping"):
        list(map_models(ROWS, ["a"], "alphabet", 0))


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
    rows = sum(1 for _ in islice(read_trace(path, name, report=report), 10**6))
    assert (rows, report.skipped) == (count, 0)


PLAIN = st.one_of(
    st.integers(-3, 10**17).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.sampled_from(
        ["2023-11-16 18:15:46.6805900", "2023-11-16T18:15:46Z", "2023-11-16", " 7 ", "1_0", "1e3", ""]
    ),
    st.sampled_from(["nan", "inf", "0x10", "True", '"7"', '"a,b"', '7"', "½", "2023-13-01 00:00:00", "\t"]),
)

COUNT = st.sampled_from(["7", " 8", "1e3", "9.0", "1_0"])
GOOD = st.tuples(
    st.one_of(
        st.floats(allow_nan=False, allow_infinity=False).map(repr),
        st.sampled_from(
            ["2023-11-16 18:15:46.6805900", "2023-11-16T18:15:46.1Z", "2023-11-16 18:15:46.123+02:00"]
        ),
    ),
    COUNT,
    COUNT,
    COUNT,
    st.sampled_from(["m", ' "a,b" ', "½"]),
).map(list)


@examples(150)
@example([["0", "0", "1", "1"], ["0.0", "7", "7", "7", "m"]], 2)
@example([["0.0", "7", "7", "7", "m"], ['7"'], ["\t"]], 1)
@given(
    st.lists(st.one_of(GOOD, GOOD, GOOD, st.lists(PLAIN, max_size=6)), max_size=12),
    st.sampled_from([1, 2, 4096]),
)
def test_batches_read_what_single_rows_read(rows: list[list[str]], batch: int) -> None:
    text = "t,p,p,o,m\n" + "".join(",".join(row) + "\n" for row in rows)
    columns = Columns("t", "p", "o", "m", 1e-3)
    parse = csv_parser(columns, (1, 1))
    lines = text.splitlines(keepends=True)
    blank = {number for number, line in enumerate(lines, start=1) if not line.strip()}
    wanted = [
        (number, found if isinstance(found, TraceRequest) else str(found))
        for number, found in tables._by_row(["t", "p", "p", "o", "m"], lines[1:], parse, 1)
        if number not in blank
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BATCH", batch)
        read = list(tables.read(io.StringIO(text, newline=""), columns, (1, 1), parse))
    assert [(n, one if isinstance(one, TraceRequest) else str(one)) for n, one in read] == wanted


@pytest.mark.parametrize("name", ["azure-llm", "azure-functions", "burstgpt"])
def test_plain_traces_are_read_by_column(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "_by_row", lambda *given: pytest.fail("row by row"))
    assert len(list(read_trace(write(tmp_path, SAMPLES[name]), name))) == 2


def test_a_line_break_inside_a_cell_keeps_the_line_numbers(tmp_path: Path) -> None:
    report = TraceReport()
    path = write(tmp_path, 't,p,o,x\n1,2,3,\n2,2,3,"a\nb"\n\n3,x,3,\n4,2,3,"c"\n')
    rows = list(read_trace(path, "csv", columns=Columns.parse("time=t,prompt=p,output=o"), report=report))
    assert [row.arrival_s for row in rows] == [0.0, 1.0, 3.0]
    assert [bad.line for bad in report.bad_rows] == [6]
