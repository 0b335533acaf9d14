import io
import json

import pytest

from coldstart.measure.replay import RecordStore, RequestRecord, Slo, summarize
from coldstart.measure.replay.compare import compare
from coldstart.measure.replay.html import page
from coldstart.measure.replay.metrics import percentile
from coldstart.measure.replay.render import text, write_csv


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
    assert found["ttft_s"] is None and found["goodput_per_s"] == 0.0
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
    written = io.StringIO()
    write_csv(records, written)
    lines = written.getvalue().splitlines()
    assert len(lines) == 3 and lines[0].startswith("number,model") and "gone" in lines[2]
    html = page("a <b>", {"run": summarize(records, Slo(), 1.0)}, {"run": records})
    assert "a &lt;b&gt;" in html and html.count("<svg") == 4 and "http" not in html
