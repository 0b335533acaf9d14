"""coldstart validate: exit codes, formats on stdout, and no heavy import."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from coldstart.artifacts import blobs, remote
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from coldstart.commands import cli
from tools import bundles, tiny_models

from coldstart.contract.arguments import Arguments
from coldstart.models import keys, resolution
from coldstart.system.paths import Cache


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return bundles.publish(Store(tmp_path / "cache" / "bundles"), tmp_path / "scratch")


def validate(bundle: Bundle, *arguments: str, word: str = bundles.NAME) -> int:
    cache = bundle.layout.root.parent
    with pytest.raises(SystemExit) as ended:
        cli.main(["validate", word, "--cache-dir", str(cache), *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def damage(bundle: Bundle) -> None:
    path = blobs.blob_path(bundle.layout.root, bundle.find_readable_section("kv").digest)
    path.chmod(0o600)
    path.write_bytes(bytes(len(path.read_bytes())))


def test_validate_names_the_damaged_section(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    damage(bundle)
    assert validate(bundle, "--format", "json") == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert (found["ok"], found["schema_version"]) == (False, 2)
    assert found["bundles"][0]["findings"][0]["subject"] == "kv"
    assert validate(bundle, "--level", "manifest") == 0


def test_each_format_is_alone_on_stdout(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    damage(bundle)
    shown = {}
    for name in ("junit", "github"):
        assert validate(bundle, "--format", name) == 1
        shown[name] = capsys.readouterr().out
    assert ElementTree.fromstring(shown["junit"]).attrib["failures"] == "1"
    assert shown["github"].startswith("::error title=CS-")


def test_a_damaged_bundle_is_whole_after_another_pull(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundles.publish(Store(tmp_path / "other"), tmp_path / "scratch")
    damage(bundle)
    assert validate(bundle) == 1
    assert "hint: fetch the bundle again: coldstart pull ADDRESS;" in capsys.readouterr().out
    assert remote.pull(Store(bundle.layout.root), str(tmp_path / "other")) == bundle
    assert validate(bundle) == 0


@pytest.mark.vllm
def test_a_bundle_of_another_machine_does_not_fit(bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate(bundle, "--against", "this", "--format", "json") == 1
    (report,) = json.loads(capsys.readouterr().out)["bundles"]
    assert {finding["code"] for finding in report["findings"]} == {"CS-KEY-MISMATCH"}


@pytest.mark.slow
def test_a_model_with_arguments_is_looked_up_by_its_key(
    bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = Cache.at(bundle.layout.root.parent)
    tiny_models.place("tiny-llama", cache.models)
    model = resolution.resolve("tiny-llama", cache=cache)
    wanted = keys.compose(model, Arguments(["--seed", "7"]))
    made = bundles.publish(Store(bundle.layout.root), tmp_path / "scratch", wanted)
    assert validate(bundle, "--", "--seed", "7", word="tiny-llama") == 0
    assert capsys.readouterr().out == f"{made.ref}: valid at level checksum\n"
    assert validate(bundle, "--", "--dtype", "float32", word="tiny-llama") == 3
    assert "hint: coldstart materialize tiny-llama -- --dtype float32" in capsys.readouterr().err


@pytest.mark.slow
def test_validate_reports_a_bundle_that_serve_would_not_use(
    bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_models.place("tiny-llama", Cache.at(bundle.layout.root.parent).models)
    words = ("--model", "tiny-llama", "--level", "load", "--format", "junit", "--", "--max-model-len", "64")
    assert validate(bundle, *words) == 1
    (failure,) = ElementTree.fromstring(capsys.readouterr().out).iter("failure")
    assert failure.attrib["type"] == "CS-NOT-SERVED"
