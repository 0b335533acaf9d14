"""Equation 5 with the costs of a bundle's proof start: its terms, savings of a mode, and learned rates of a source."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from coldstart.artifacts.bundle import Bundle
from tools.bundles import key

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import ladder, prediction
from coldstart.launch.request import ServeRequest
from coldstart.models.inspection import Lookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache

Publish = Callable[..., Bundle]
SOURCE = "http://weights.example/tiny"
CACHE = Cache(Path("/nonexistent"))
SPANS = {
    "import torch": 1.0,
    "import vllm": 2.0,
    "import engine": 0.5,
    "configure": 1.0,
    "start engine": 4.0,
    "read tensors": 2.0,
    "build app": 0.5,
    "first token": 0.25,
}
STAGES = {"ready_s": 10.0, "spans": SPANS}
SIZES = (600, 400)
WEIGHTS = {"files": [{"tensors": [{"size": size}]} for size in SIZES]}


def load(moved: int = 100, began: float = 50.0, ended: float = 52.0, **more: Any) -> dict[str, Any]:
    """Return a worker's report of a load that fetched `moved` bytes."""
    return {"fetch": {"fetched_bytes": moved, "began": began, "ended": ended}, **more}


def test_the_terms_add_up_to_the_start_they_come_from() -> None:
    costs, loading = prediction.terms(SPANS, 10.0)
    assert loading == 2.0 and costs.libraries == 3.5 and costs.prefill == 0.25
    assert costs.context == 1.0 + 4.0 + 0.5 - loading  # "start engine" contains the load
    assert costs.creation == 10.0 - 3.5 - 3.5 - 2.0 - 0.25 and costs.waiting == costs.transfer == 0


@pytest.mark.parametrize("name", ["read tensors", "configure", "start engine", "build app"])
def test_no_term_is_guessed(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        prediction.terms({k: v for k, v in SPANS.items() if k != name}, 10.0)


def test_a_bundle_of_an_earlier_release_calls_the_load_by_another_name() -> None:
    earlier = {"load" if name == "read tensors" else name: seconds for name, seconds in SPANS.items()}
    assert prediction.terms(earlier, 10.0) == prediction.terms(SPANS, 10.0)


def test_no_term_is_negative() -> None:
    costs, _ = prediction.terms(SPANS | {"start engine": 0.0}, 3.0)
    assert costs.context == costs.creation == 0.0


def test_the_start_that_was_measured_is_predicted_as_it_was(publish: Publish) -> None:
    made = prediction.predict(publish(stages=STAGES, weights=WEIGHTS), "fresh", None, CACHE)
    assert made is not None and made.ttft_s == pytest.approx(10.0)
    document = made.document()
    assert document["ttft_s"] == made.ttft_s and document["terms"]["load_s"] == 2.0
    assert document["terms"]["fetch_s"] is None and document["terms"]["libraries_s"] == 3.5


def test_a_template_spares_the_imports_and_nothing_else(publish: Publish) -> None:
    bundle = publish(stages=STAGES, weights=WEIGHTS)
    made = prediction.predict(bundle, "template-runtime", None, CACHE)
    assert made is not None and made.ttft_s == pytest.approx(10.0 - 3.5) and made.costs.libraries == 0
    for mode in ("template-engine", "snapshot"):
        assert prediction.predict(bundle, mode, None, CACHE) is None


@pytest.mark.parametrize(("seconds", "ttft_s"), [(1.0, 10.0), (20.0, 20.25)])
def test_fetching_counts_where_it_is_slower_than_everything_else(
    publish: Publish, tmp_path: Path, seconds: float, ttft_s: float
) -> None:
    bundle = publish(stages=STAGES, weights=WEIGHTS)
    prediction.learn_rate(SOURCE, [load(sum(SIZES), 0.0, seconds)], Cache(tmp_path))
    made = prediction.predict(bundle, "fresh", SOURCE, Cache(tmp_path))
    assert made is not None and made.fetch_s == pytest.approx(seconds)
    assert made.ttft_s == pytest.approx(ttft_s)
    first = prediction.predict(bundle, "fresh", "http://elsewhere.example", Cache(tmp_path))
    assert first is not None and first.fetch_s is None and first.ttft_s == pytest.approx(10.0)


@pytest.mark.parametrize(
    "sections",
    [
        {"weights": WEIGHTS},
        {"stages": STAGES},
        {"stages": {"ready_s": 10.0}, "weights": WEIGHTS},
        {"stages": {"spans": SPANS}, "weights": WEIGHTS},
        {"stages": {"ready_s": 10.0, "spans": {}}, "weights": WEIGHTS},
        {"stages": {"ready_s": "long", "spans": SPANS}, "weights": WEIGHTS},
        {"stages": {"ready_s": 10.0, "spans": SPANS | {"read tensors": 0.0}}, "weights": WEIGHTS},
        {"stages": [], "weights": WEIGHTS},
        {"stages": STAGES, "weights": {"files": [{"name": "pytorch_model.bin", "tensors": []}]}},
        {"stages": STAGES, "weights": {"files": []}},
    ],
)
def test_bundle_without_enough_data_predicts_nothing(publish: Publish, sections: dict[str, Any]) -> None:
    assert prediction.predict(publish(**sections), "fresh", None, CACHE) is None


def test_a_rate_is_that_of_the_host_last_seen(tmp_path: Path) -> None:
    assert prediction.known_rate(SOURCE, Cache(tmp_path)) is None
    prediction.learn_rate(SOURCE, [{}, {"fetch": None}, load(100)], Cache(tmp_path))
    prediction.learn_rate("s3://bucket/a", [load(10)], Cache(tmp_path))
    assert prediction.known_rate("http://user:secret@weights.example/other", Cache(tmp_path)) == 50.0
    assert prediction.known_rate("s3://bucket/b", Cache(tmp_path)) == 5.0
    assert prediction.known_rate("http://weights.example:81/tiny", Cache(tmp_path)) is None
    prediction.learn_rate("http://user:secret@weights.example/other", [load(200)], Cache(tmp_path))
    assert prediction.known_rate(SOURCE, Cache(tmp_path)) == 100.0
    assert "secret" not in "".join(path.read_text() for path in tmp_path.rglob("*.json"))


@pytest.mark.parametrize("loads", [[], [{}], [load(0)], [load(9, 5.0, 5.0)]])
def test_nothing_is_learned_where_nothing_was_fetched(tmp_path: Path, loads: list[dict[str, Any]]) -> None:
    prediction.learn_rate(SOURCE, [load(100)], Cache(tmp_path))
    prediction.learn_rate(SOURCE, loads, Cache(tmp_path))
    assert prediction.known_rate(SOURCE, Cache(tmp_path)) == 50.0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_rate_is_not_learned_when_it_cannot_be_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fails(_: int) -> None:
        raise OSError(number, os.strerror(number))

    prediction.learn_rate(SOURCE, [load(100)], Cache(tmp_path))
    monkeypatch.setattr(os, "fsync", fails)
    prediction.learn_rate(SOURCE, [load(400)], Cache(tmp_path))
    assert prediction.known_rate(SOURCE, Cache(tmp_path)) == 50.0


@pytest.mark.parametrize("text", ["", "[]", '{"http://weights.example": "fast"}', "\0"])
def test_damaged_record_is_ignored_and_replaced(tmp_path: Path, text: str) -> None:
    prediction.learn_rate(SOURCE, [load(1)], Cache(tmp_path))
    (record,) = tmp_path.rglob("rates.json")
    record.write_text(text)
    assert prediction.known_rate(SOURCE, Cache(tmp_path)) is None
    prediction.learn_rate(SOURCE, [load(100)], Cache(tmp_path))
    assert prediction.known_rate(SOURCE, Cache(tmp_path)) == 50.0


def test_a_cache_that_cannot_be_written_ends_no_server(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file where the directory would be")
    prediction.learn_rate(SOURCE, [load()], Cache(tmp_path))
    assert prediction.known_rate(SOURCE, Cache(tmp_path)) is None


@pytest.mark.parametrize("source", ["http://host:port/x", "http://[half/x", "", "/models/a"])
def test_a_source_of_any_spelling_has_a_rate(tmp_path: Path, source: str) -> None:
    prediction.learn_rate(source, [load(100)], Cache(tmp_path))
    assert prediction.known_rate(source, Cache(tmp_path)) == 50.0


def test_actual_start_is_reported_in_the_same_terms() -> None:
    known = prediction.actual(SPANS, 10.0, [load()], 40.0)
    costs, _ = prediction.terms(SPANS, 10.0)
    assert known == {"ttft_s": 10.0, "terms": costs.document() | {"load_s": 2.0, "fetch_s": 2.0}}


def test_slowest_worker_is_reported_without_a_timeline() -> None:
    loads = [load(seconds=1.5), load(seconds=2.5)]
    assert prediction.actual({}, 9.0, loads, 40.0)["terms"] == {"load_s": 2.5, "fetch_s": 2.0}
    assert prediction.actual({}, 9.0, [{}], 40.0) == {"ttft_s": 9.0, "terms": {}}


def test_fetch_of_an_earlier_start_does_not_count() -> None:
    assert "fetch_s" not in prediction.actual(SPANS, 10.0, [load(began=50.0)], 51.0)["terms"]


def _started(mode: str = "fresh") -> ladder.StartedServer:
    report = {"loads": [load(sum(SIZES), 50.0, 70.0)]}
    running = SimpleNamespace(process=SimpleNamespace(pid=1), ready_s=21.0, report=report)
    return ladder.StartedServer(
        mode, LaunchPlan(Arguments()), cast(Any, running), ladder.Account(), began=40.0
    )


def test_a_start_is_predicted_by_what_was_known_before_it(
    publish: Publish, model: ResolvedModel, tmp_path: Path
) -> None:
    bundle = publish(stages=STAGES, weights=WEIGHTS)
    found = Lookup(model, Arguments(), Cache(tmp_path), bundle.key, bundle)
    request = ServeRequest(found, weights_from=SOURCE)
    first, second = (prediction.document(request, _started(), {}) for _ in range(2))
    assert first is not None and first["terms"]["fetch_s"] is None
    assert first["actual"] == {"ttft_s": 21.0, "terms": {"fetch_s": 20.0}}
    assert second is not None and second["terms"]["fetch_s"] == pytest.approx(20.0)
    assert second["ttft_s"] == pytest.approx(20.25)


def test_a_start_without_a_bundle_teaches_the_rate_and_predicts_nothing(
    model: ResolvedModel, tmp_path: Path
) -> None:
    request = ServeRequest(Lookup(model, Arguments(), Cache(tmp_path), key()), weights_from=SOURCE)
    assert prediction.document(request, _started(), {}) is None
    assert prediction.known_rate(SOURCE, Cache(tmp_path)) == 50.0
