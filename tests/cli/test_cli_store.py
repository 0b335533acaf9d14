"""The commands over the store, from the outside."""

import json
from pathlib import Path

import pytest
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import CODE, key, publish
from tools.shell import Run

from coldstart.system import runtime
from coldstart.system.paths import Cache


def test_an_empty_store_says_what_to_do(run: Run) -> None:
    assert "coldstart materialize" in run("list").stderr


def test_ls_is_list(run: Run, bundle: Bundle) -> None:
    assert run("ls", "-q").stdout == run("list", "-q").stdout


def test_inspect_shows_all_parts(run: Run, bundle: Bundle) -> None:
    text = run("inspect", "org/tiny").stdout
    for part in (
        bundle.digest,
        bundle.key.digest,
        "compile",
        "hardware.name",
        "coldstart 0.1.0",
        "not signed",
    ):
        assert part in text
    data = json.loads(run("inspect", "org/tiny:v1", "--format", "json").stdout)
    assert data["provenance"]["model_name"] == "org/tiny"
    assert data["trust"]["ok"] is False


def test_inspect_forms(run: Run, bundle: Bundle) -> None:
    assert json.loads(run("inspect", bundle.digest, "--manifest").stdout)["image"]["layers"]
    assert "kernel.so" in run("inspect", "org/tiny", "--tree").stdout
    members = json.loads(run("inspect", "org/tiny", "--tree", "--format=json").stdout)["sections"]["compile"]
    assert {member["path"]: member["size"] for member in members} == {n: len(d) for n, d in CODE.items()}
    assert bundle.key.digest in run("inspect", "org/tiny", "--key").stdout


def test_inspect_diff(run: Run, bundle: Bundle, home: Path) -> None:
    other = publish(Store(Cache.at().bundles), home / "scratch", key(dtype="float16"), blocks=9)
    data = json.loads(run("inspect", bundle.ref, "--diff", other.ref, "--format", "json").stdout)
    assert data["fields"] == [{"field": "engine.dtype", "left": None, "right": "float16"}]
    assert [section["section"] for section in data["sections"]] == ["kv"]
    assert run("inspect", bundle.ref, "--diff", bundle.ref).stdout == "no difference\n"


@pytest.fixture
def model(home: Path) -> Path:
    if runtime.vllm_distribution() is None:
        pytest.skip("a key needs an installed vLLM")
    place = home / "my-model"
    place.mkdir()
    (place / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return place


def test_key_of_a_model_without_a_bundle(run: Run, model: Path) -> None:
    data = json.loads(run("inspect", "--key", str(model), "--format=json", "--", "--max-model-len=1K").stdout)
    assert data["fields"]["engine.max_model_len"] == 1024
    assert data["bundle"] is None
    assert str(model) not in json.dumps(data)


def test_a_miss_names_field_wanted_and_found(run: Run, model: Path, home: Path) -> None:
    from coldstart.contract.arguments import Arguments
    from coldstart.models import keys, resolution

    made = keys.compose(resolution.resolve(str(model)), Arguments(["--max-model-len", "512"]))
    publish(Store(Cache.at().bundles), home / "scratch", made)
    hit = run("inspect", str(model), "--", "--max-model-len=512")
    assert made.digest in hit.stdout
    missed = run("inspect", str(model), "--", "--max-model-len", "1024", code=3).stderr
    assert "engine.max_model_len: wanted 1024, found 512" in missed
    assert f"coldstart materialize {model} -- --max-model-len 1024" in missed


def test_export_and_import_elsewhere(run: Run, bundle: Bundle, home: Path) -> None:
    assert run("export", "org/tiny").stdout == "org--tiny-v1.oci.tar\n"
    done = run("import", "org--tiny-v1.oci.tar", "--cache-dir", "other")
    assert done.stdout.strip() == bundle.ref
    assert "will not run" in done.stderr
    assert run("list", "-q", "--cache-dir", "other").stdout.strip() == bundle.ref


def test_push_and_pull_through_a_directory(run: Run, bundle: Bundle) -> None:
    there = run("push", "org/tiny", "shared").stdout.strip()
    assert run("pull", there, "--cache-dir", "other").stdout.strip() == bundle.ref


def test_prune_keeps_the_newest_and_drops_the_named(run: Run, bundle: Bundle, home: Path) -> None:
    newer = publish(Store(Cache.at().bundles), home / "scratch", blocks=9)
    assert newer.version == 2
    listed = json.loads(run("prune", "--dry-run", "--format=json").stdout)
    assert listed["removed"] == [bundle.digest]
    assert len(run("list", "-q").stdout.splitlines()) == 2
    run("prune")
    assert run("list", "-q").stdout.strip() == newer.ref
    run("prune", "org/tiny")
    assert run("list", "-q").stdout.strip() == ""


def test_trust_travels_by_public_key(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = json.loads(run("trust", "show", "--format", "json").stdout)
    (home / "friend.pub").write_text(shown["public_key"])
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "elsewhere"))
    run("trust", "add", "friend.pub", "--name", "friend")
    keys = json.loads(run("trust", "list", "--format", "json").stdout)["keys"]
    assert {entry["own"] for entry in keys} == {True, False}
    assert shown["fingerprint"] in {entry["fingerprint"] for entry in keys}


def test_no_key_is_no_trust(run: Run, home: Path) -> None:
    (home / "bad.pub").write_text("nonsense")
    assert "bad.pub" not in run("trust", "list").stdout
    assert run("trust", "add", "bad.pub", code=1).stdout == ""


def test_doctor_answers_with_an_exit_code(run: Run) -> None:
    done = run("doctor", "--format", "json", code=None)
    assert done.returncode == (0 if json.loads(done.stdout)["able"] else 1)
