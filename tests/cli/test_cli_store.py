"""Commands of the bundle store, run as a user runs them."""

import json
import os
import re
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from support.graphs_tools import proven
from tools.bundles import KV, flip, key, publish, publish_sections
from tools.command_line import Run

from coldstart.models import inspection
from coldstart.models.inspection import NOT_MADE
from coldstart.system import paths
from coldstart.system.paths import Cache


def test_list_names_the_next_command_when_store_is_empty(run: Run) -> None:
    assert "coldstart materialize" in run("list").stderr


def test_hint_about_a_damaged_index_makes_the_store_usable(run: Run, bundle: Bundle, home: Path) -> None:
    index = Cache.at().bundles / "index.json"
    index.write_bytes(b"")
    assert f"hint: `mv {index.parent} ELSEWHERE`" in run("list", code=1).stderr
    index.parent.rename(home / "elsewhere")
    assert "coldstart materialize" in run("list").stderr


def test_list_marks_the_bundles_whose_code_does_not_run_here(run: Run, bundle: Bundle, home: Path) -> None:
    signer = sign.load_host_key(paths.state_dir())
    publish(Store(Cache.at().bundles), home / "scratch", key(dtype="float16"), signer=signer)
    head, *rows = run("list").stdout.splitlines()
    assert [row[head.index("trusted") :].split()[0] for row in rows] == ["no", "yes"]
    listed = json.loads(run("list", "--format", "json").stdout)["bundles"]
    assert [one["trusted"] for one in listed] == [False, True]
    (sign.trust_dir(paths.state_dir()) / "bad.pub").write_text("no key")
    assert bundle.ref in run("list", "-q").stdout


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


@pytest.mark.parametrize(
    ("stages", "shown"),
    [
        (
            {"ready_s": 9.09, "memory_bytes": 829224960},
            "test start ready in 9.1 s with 790.8 MiB of memory\n",
        ),
        (
            {"ready_s": 9.09, "memory_bytes": 829224960, "device_bytes": 15 << 30},
            "790.8 MiB of memory, and 15.0 GiB on the device\n",
        ),
        (
            {
                "ready_s": 9.09,
                "memory_bytes": 9,
                "device_bytes": 15 << 30,
                "asleep_bytes": 3 << 29,
                "parked_bytes": 0,
                **{"weights_bytes": 1 << 30, "kv_floor_bytes": 1 << 20, "device_floor_bytes": 2 << 30},
            },
            "on the device, 1.0 GiB of weights, 1.0 MiB of KV cache for one request, 2.0 GiB at least, 1.5 GiB asleep, 0 B p",
        ),
        ({"ready_s": None}, "test start not recorded\n"),
    ],
)
def test_inspect_shows_the_start_that_proved_the_bundle(run: Run, stages: object, shown: str) -> None:
    made = publish_sections(Store(Cache.at().bundles), stages=stages)
    assert shown in run("inspect", made.digest).stdout


def test_inspect_diff(run: Run, bundle: Bundle, home: Path) -> None:
    other = publish(Store(Cache.at().bundles), home / "scratch", key(dtype="float16"), blocks=9)
    data = json.loads(run("inspect", bundle.ref, "--diff", other.ref, "--format", "json").stdout)
    assert data["fields"] == [{"field": "engine.dtype", "left": None, "right": "float16"}]
    assert [section["section"] for section in data["sections"]] == ["kv"]
    assert run("inspect", bundle.ref, "--diff", bundle.ref).stdout == "no difference\n"


def test_name_means_its_newest_version_and_command_says_which(run: Run, bundle: Bundle, home: Path) -> None:
    store = Store(Cache.at().bundles)
    newer = publish(store, home / "scratch", key(dtype="float16"), blocks=9)
    note = "Using org/tiny:v2 of 2 versions\n"
    for command, *more in (["inspect"], ["export"], ["validate"], ["push", str(home / "there")]):
        done = run(command, "org/tiny", *more)
        assert done.stderr.count(note) == 1, command
        assert (
            note
            not in run(command, "org/tiny:v1", *more, *(["--force"] if command == "export" else [])).stderr
        )
    assert newer.digest in run("inspect", "org/tiny").stdout
    assert note in run("trust", "why", "org/tiny", code=1).stderr


def test_a_name_means_its_newest_trusted_version(run: Run, bundle: Bundle, home: Path) -> None:
    store = Store(Cache.at().bundles)
    signer = sign.load_host_key(paths.state_dir())
    signed = publish(store, home / "scratch", key(dtype="float16"), signer=signer)
    publish(store, home / "scratch", key(dtype="bfloat16"))
    done = run("validate", "org/tiny", "--format", "json")
    assert json.loads(done.stdout)["bundles"][0]["ref"] == signed.ref
    assert "Using org/tiny:v2 of 3 versions\n" in done.stderr


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("docker:foo/bar", "./docker:foo/bar"),
        ("gs:/b", "./gs:/b"),
        ("C:\\x", "'./C:\\x'"),
        (" oci://h/x", "'./ oci://h/x'"),
        ("registry.example/foo:v1", "oci://registry.example/foo:v1;"),
        ("localhost:5000/foo", "oci://localhost:5000/foo;"),
    ],
)
def test_push_and_pull_need_an_address(run: Run, bundle: Bundle, home: Path, address: str, hint: str) -> None:
    for words in (("push", "org/tiny"), ("pull",)):
        before = {path.name for path in home.iterdir()}
        said = run(*words, address, code=2).stderr
        assert hint in said.splitlines()[-1]
        assert {path.name for path in home.iterdir()} == before


def test_pull_reports_the_damaged_blobs_that_it_replaces(run: Run, bundle: Bundle) -> None:
    there = run("push", "org/tiny", "shared").stdout.strip()
    assert "replaced" not in run("pull", there).stderr
    for number, digest in enumerate(
        (bundle.find_readable_section("kv").digest, bundle.image_manifest.config.digest, bundle.digest)
    ):
        for damaged in (bundle.find_readable_section("compile").digest, digest):
            flip(blob_path(bundle.layout.root, damaged), 3)
        done = run("pull", there, "--format", "json") if number else run("pull", there)
        if number:
            assert json.loads(done.stdout)["bundles"][0]["replaced_blobs"] == 2
        else:
            assert "org/tiny:v1: 2 damaged blobs replaced" in done.stderr
        assert run("validate", "org/tiny").stdout == f"{bundle.ref}: valid at level checksum\n"


def test_a_damaged_manifest_is_not_called_trusted(run: Run) -> None:
    bundle = publish_sections(Store(Cache.at().bundles), signer=sign.load_host_key(paths.state_dir()), kv=KV)
    assert json.loads(run("list", "--format", "json").stdout)["bundles"][0]["trusted"]
    flip(blob_path(bundle.layout.root, bundle.layout.read_entries()[-1].digest), 3)
    assert "is trusted" in run("trust", "why", bundle.ref).stdout  # its signature was verified before
    flip(blob_path(bundle.layout.root, bundle.digest), 3)
    assert not json.loads(run("list", "--format", "json").stdout)["bundles"][0]["trusted"]
    said = run("trust", "why", bundle.ref, code=1)
    assert "CS-DIGEST" in said.stderr and "is trusted" not in said.stdout


def _pem(home: Path, name: str) -> str:
    (home / f"{name}.pub").write_bytes(sign.load_host_key(home / f"state-of-{name}").public_pem)
    return f"{name}.pub"


def test_trust_remove_refuses_a_bundle_when_its_verification_was_remembered(run: Run, home: Path) -> None:
    maker = sign.load_host_key(home / "state-of-maker")
    made = publish_sections(Store(Cache.at().bundles), signer=maker, kv=KV)
    for name in ("maker", "again"):  # one key under two names
        run("trust", "add", _pem(home, "maker"), "--name", name)
    assert inspection.trust(made).is_trusted
    assert list((paths.state_dir() / "verdicts").iterdir())
    assert inspection.trust(made).is_trusted
    removed = json.loads(run("trust", "remove", "maker", "--format", "json").stdout)["removed"]
    assert {key["name"] for key in removed} == {"maker", "again"}
    assert not inspection.trust(made).is_trusted
    assert "is not trusted" in run("trust", "why", made.ref, code=1).stderr
    assert maker.fingerprint not in run("trust", "list").stdout


def test_trust_remove_names_its_key_by_name_file_or_fingerprint(run: Run, home: Path) -> None:
    for form in (str, lambda mark: mark[8:20], lambda _: "friend", lambda mark: f"friend-{mark[8:]}.pub"):
        mark = run("trust", "add", _pem(home, "friend"), "--name", "friend", "-q").stdout.strip()
        assert mark in run("trust", "remove", form(mark)).stdout
        assert mark not in run("trust", "list").stdout


def test_trust_remove_fails_when_the_key_is_unknown_own_or_ambiguous(run: Run, home: Path) -> None:
    own = run("trust", "list", "-q").stdout.strip()
    for word in ("nobody", own[8:19], "", "../signing/host"):
        assert "no trusted key" in run("trust", "remove", word, code=2).stderr
    assert "own key" in run("trust", "remove", own, code=2).stderr
    for name in ("one", "two"):
        run("trust", "add", _pem(home, name), "--name", "same")
    assert "several keys" in run("trust", "remove", "same", code=2).stderr
    assert len(run("trust", "list", "-q").stdout.split()) == 3


def test_an_ambiguous_name_lists_each_bundle_on_a_line(run: Run, bundle: Bundle, home: Path) -> None:
    publish(Store(Cache.at().bundles), home / "scratch", key(dtype="float16"))
    lines = run("prune", "org/tiny", code=2).stderr.splitlines()
    first, *choices, hint = lines[[line.startswith("error: ") for line in lines].index(True) :]
    assert first == "error: 'org/tiny' matches 2 bundles [CS-AMBIGUOUS]"
    assert [line.split()[0] for line in choices] == ["org/tiny:v1", "org/tiny:v2"]
    assert hint.startswith("hint: specify one of the bundles")


GOLDEN = Path(__file__).parent.parent / "golden" / "graphs" / "inspect.txt"


def test_inspect_shows_the_graphs(run: Run, home: Path, tmp_path: Path) -> None:
    proven(tmp_path / "section")
    publish_sections(Store(Cache.at().bundles), stages={"ready_s": 1.5}, graphs=tmp_path / "section")
    shown = run("inspect", "org/tiny").stdout
    steady = re.sub(r"\b[0-9a-f]{64}\b", "...", shown[shown.index("CUDA graphs\n") :])
    if os.environ.get("COLDSTART_REFRESH_GOLDEN"):
        GOLDEN.write_text(steady, encoding="utf-8")
    assert steady == GOLDEN.read_text(encoding="utf-8")
    data = json.loads(run("inspect", "org/tiny", "--format", "json").stdout)["graphs"]
    assert data["nodes"] == sum(data["nodes_by_kind"].values()) and data["graphs"] == 4
    assert sum(data["relocations_by_region"].values()) == data["relocations"]
    assert data["proof"]["graphs"] == 4


def test_inspect_shows_why_a_bundle_has_no_graphs(run: Run, home: Path) -> None:
    not_made = {"graphs": "the installed vLLM runs on the processor"}
    publish_sections(Store(Cache.at().bundles), stages={"ready_s": 1.5, NOT_MADE: not_made})
    assert "no graphs  the installed vLLM runs on the processor" in run("inspect", "org/tiny").stdout
    assert json.loads(run("inspect", "org/tiny", "--format", "json").stdout)["not_made"]["graphs"]
