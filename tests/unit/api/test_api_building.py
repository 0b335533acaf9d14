"""`materialize`, its plan, and `find_bundle`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import BundleNotFoundError, Store
from tools.bundles import provenance, publish

from coldstart import api
from coldstart.errors import UsageError
from coldstart.materialize import materialize
from coldstart.materialize.materialize import MaterializationPlan
from coldstart.materialize.options import SECTIONS, Options, Phase, Steps
from coldstart.models.inspection import Lookup
from coldstart.system import paths

ARGS = ["--max-model-len", "512"]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """Replace the build by one small section and return the options of each build."""
    asked: list[Options] = []

    def build(lookup: Lookup, options: Options, phase: Phase) -> Bundle:
        asked.append(options)
        with phase("publish") as step, lookup.store.open_draft(lookup.key) as draft:
            step("written")
            draft.add_json("kv", {"bytes": len(asked)})
            return draft.publish(provenance(), signer=sign.load_host_key(paths.state_dir()))

    monkeypatch.setattr(materialize, "materialize", build)
    return asked


def test_materialize_reports_each_stage(model: str, built: list[Options]) -> None:
    said: list[object] = []

    @contextmanager
    def progress(stage: str) -> Iterator[Steps]:
        said.append(stage)
        yield said.append

    api.materialize(model, on_progress=progress)
    assert said == ["publish", "written"]


def test_plan_names_key_sections_and_the_existing_bundle(model: str, built: list[Options]) -> None:
    before = api.plan_materialization(model, ARGS)
    assert isinstance(before, MaterializationPlan) and built == []
    assert (before.existing, {*SECTIONS} - {*before.sections}) == (None, {"graphs"})
    assert api.plan_materialization(model, ARGS, Options(graphs=True)).sections == SECTIONS
    bundle = before.run()
    after = api.plan_materialization(model, ARGS, Options(snapshot=True))
    assert (after.existing, after.sections, after.key) == (
        bundle,
        (*before.sections, "snapshot"),
        before.key,
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return publish(Store(tmp_path / "bundles"), tmp_path / "scratch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"level": "deep"}, "invalid level 'deep'"),
        ({"vllm_args": ["--dtype", "half"]}, "--level checksum starts no server"),
        ({"model": "/m"}, "cannot use --model"),
        ({"vllm_args": "--dtype half"}, "expected a sequence of strings"),
    ],
)
def test_validate_refuses_options_that_cannot_be_used(
    options: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        api.validate("tiny:v1", cache_dir=tmp_path, **options)  # type: ignore[arg-type]


def test_validate_raises_for_a_reference_of_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleNotFoundError):
        api.validate("tiny:v1", cache_dir=tmp_path)
