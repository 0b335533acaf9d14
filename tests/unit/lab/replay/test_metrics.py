import io
import json
from dataclasses import astuple

import numpy as np
import pytest
from support import pages

from coldstart.lab.replay import RecordStore, RequestRecord, Slo, series, summarize
from coldstart.lab.replay.compare import compare
from coldstart.lab.replay.html import page
from coldstart.lab.replay.metrics import percentile
from coldstart.lab.replay.render import text
from coldstart.lab.replay.series import load_over_time


def record(number: int, first: float, end: float, tokens: int) -> RequestRecord:
    return RequestRecord(
        number, 1.0, 10, tokens, sent_s=1.5, first_token_s=first, finished_s=end, output_tokens=tokens
    )


FAILED = RequestRecord(9, 1.0, 10, 5, sent_s=1.0, error="OSError: gone")


def test_the_definitions() -> None:
    one = record(0, first=2.0, end=4.0, tokens=5)
    assert (one.ttft_s, one.tpot_s, one.normalized_s, one.latency_s, one.lag_s) == (1.0, 0.5, 0.6, 3.0, 0.5)
    assert record(1, 2.0, 2.0, 1).tpot_s is None


def test_percentiles_interpolate() -> None:
    assert [percentile([1.0, 2.0, 4.0], p) for p in (0, 50, 75, 100)] == [1.0, 2.0, 3.0, 4.0]


def test_failures_count_as_misses_and_not_as_latencies() -> None:
    records = RecordStore([record(0, 2.0, 4.0, 5), record(1, 9.0, 11.0, 5), FAILED])
    found = summarize(records, Slo.parse("ttft=2,tpot=1"), duration_s=10.0)
    assert (found["requests"], found["completed"], found["failed"]) == (3, 2, 1)
    assert found["slo"] == {"limits": {"ttft_s": 2.0, "tpot_s": 1.0}, "attainment": pytest.approx(1 / 3)}
    assert found["goodput_per_s"] == pytest.approx(0.1)
    assert found["ttft_s"]["mean"] == 4.5  # type: ignore[index]
    json.dumps(found)


def test_no_records_are_an_empty_result() -> None:
    found = summarize(RecordStore(), Slo(), 0.0)
    assert found["ttft_s"] is None and found["requests_per_s"] == 0.0
    assert "0 of 0" in text(found)


@pytest.mark.parametrize("bad", ["ttft", "speed=1", "tpot=-1", "ttft=fast"])
def test_a_bad_slo_is_refused(bad: str) -> None:
    with pytest.raises(ValueError):
        Slo.parse(bad)


def test_a_comparison_says_how_many_times_better() -> None:
    slow = summarize(RecordStore([record(0, 3.0, 9.0, 5)]), Slo(), 10.0)
    fast = summarize(RecordStore([record(0, 2.0, 5.0, 5)]), Slo(), 5.0)
    ratios = compare(fast, slow)
    assert ratios["ttft_s.mean"] == 2.0 and ratios["latency_s.p95"] == 2.0 and ratios["requests_per_s"] == 2.0
    assert "ttft_s.mean" in text(fast, ratios)
    with pytest.raises(ValueError, match="trace-replay"):
        compare(fast, {"what": 1})


def test_csv_and_html_hold_every_request() -> None:
    records = RecordStore([FAILED, record(0, 2.0, 4.0, 5)])
    records.table().write_csv(written := io.StringIO())
    lines = written.getvalue().splitlines()
    assert len(lines) == 3 and lines[0].startswith("number,model") and "gone" in lines[2]
    html = page("a <b>", summarize(records, Slo(), 4.0), records)
    pages.check(html)
    found = pages.plots(html)
    assert "a &lt;b&gt;" in html and len(found) == 3 + 5
    labels = set[str]().union(*map(pages.axis_labels, found))
    assert {"requests", "tokens per second", "requests per second", "TTFT (s)", "time (s)"} <= labels


def test_the_load_over_time_adds_up() -> None:
    # 1.0 due; tokens 2.0 to 6.0, one of five at once and one a second; another one's three all at 4.0.
    records = RecordStore([record(0, 2.0, 6.0, 5), record(1, 4.0, 4.0, 3), FAILED])
    load = load_over_time(records, 8.0, bins=8)
    assert load is not None and list(load.time_s) == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert list(load.waiting) == [0, 2, 1, 1, 0, 0, 0, 0, 0]
    assert list(load.running) == [0, 0, 1, 1, 1, 1, 0, 0, 0]
    assert list(load.arrivals_per_s) == [2, 0, 0, 0, 0, 0, 0, 0]
    assert load.tokens_per_s == pytest.approx([0, 1, 1, 1 + 3, 1, 1, 0, 0])


def test_the_load_does_not_depend_on_how_it_is_read() -> None:
    ran = [record(i, 2.0 + i % 7, 3.0 + i % 11 + i % 7, 1 + i % 5) for i in range(100)]
    records = RecordStore(ran)
    edges = np.linspace(0, 20, 41)
    parts, whole = (series._load(records.frames(series.COLUMNS, rows), edges) for rows in (9, 1000))
    for one, other in zip(astuple(parts), astuple(whole), strict=True):
        assert one == pytest.approx(other)
    assert sum(whole.tokens_per_s) * 0.5 == pytest.approx(sum(one.output_tokens for one in ran))
    assert load_over_time(RecordStore([FAILED]), 1.0) is None


def test_no_slo_is_not_judged() -> None:
    found = summarize(RecordStore([record(0, 2.0, 4.0, 5)]), Slo(), 4.0)
    assert found["slo"] is None and found["goodput_per_s"] is None
    assert "SLO" not in text(found) and "goodput" not in text(found)
    assert "SLO attainment 100.0%" in text(
        summarize(RecordStore([record(0, 2.0, 4.0, 5)]), Slo(ttft_s=9), 4.0)
    )
