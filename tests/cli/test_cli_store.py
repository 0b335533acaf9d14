"""Commands of the bundle store, run as a user runs them."""

import json
import os
from pathlib import Path

import pytest
from coldstart.artifacts import sign
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.store import Store
from tools.bundles import CODE, flip, key, provenance, publish
from tools.shell import Run

from coldstart.models import inspection
from coldstart.system import paths, runtime
from coldstart.system.paths import Cache


def test_list_names_the_next_command_when_store_is_empty(run: Run) -> None:
    assert "coldstart materialize" in run("list").stderr


def test_list_marks_the_bundles_whose_code_does_not_run_here(run: Run, bundle: Bundle, home: Path) -> None:
    signer = sign.host_key(paths.state_dir())
    publish(Store(Cache.at().bundles), home / "scratch", key(dtype="float16"), signer=signer)
    head, *rows = run("list").stdout.splitlines()
    assert [row[head.index("trusted") :].split()[0] for row in rows] == ["no", "yes"]
    listed = json.loads(run("list", "--format", "json").stdout)["bundles"]
    assert [one["trusted"] for one in listed] == [False, True]
    (sign.trust_dir(paths.state_dir()) / "bad.pub").write_text("no key")
    assert bundle.ref in run("list", "-q").stdout


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


@pytest.mark.parametrize(
    ("stages", "shown"),
    [
        (
            {"ready_s": 9.09, "memory_bytes": 829224960},
            "proof      ready in 9.1 s with 790.8 MiB of memory\n",
        ),
        ({"ready_s": None}, "proof      not recorded\n"),
    ],
)
def test_inspect_shows_the_start_that_proved_the_bundle(run: Run, stages: object, shown: str) -> None:
    with Store(Cache.at().bundles).begin(key()) as draft:
        draft.add_json("stages", stages)
        made = draft.publish(provenance())
    assert shown in run("inspect", made.digest).stdout


def test_inspect_shows_manifest_tree_and_key(run: Run, bundle: Bundle) -> None:
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


def test_inspect_names_the_differing_field_when_no_bundle_matches(run: Run, model: Path, home: Path) -> None:
    from coldstart.contract.arguments import Arguments
    from coldstart.models import keys, resolution

    made = keys.compose(resolution.resolve(str(model)), Arguments(["--max-model-len", "512"]))
    publish(Store(Cache.at().bundles), home / "scratch", made)
    hit = run("inspect", str(model), "--", "--max-model-len=512")
    assert made.digest in hit.stdout
    missed = run("inspect", str(model), "--", "--max-model-len", "1024", code=3).stderr
    assert "--max-model-len: 512 in the bundle, 1024 requested" in missed
    assert f"coldstart materialize {model} -- --max-model-len 1024" in missed


def test_a_name_means_its_newest_version_and_the_command_says_which(
    run: Run, bundle: Bundle, home: Path
) -> None:
    store = Store(Cache.at().bundles)
    newer = publish(store, home / "scratch", key(dtype="float16"), blocks=9)
    note = "Using org/tiny:v2, the newest of 2\n"
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
    signer = sign.host_key(paths.state_dir())
    signed = publish(store, home / "scratch", key(dtype="float16"), signer=signer)
    publish(store, home / "scratch", key(dtype="bfloat16"))
    done = run("validate", "org/tiny", "--format", "json")
    assert json.loads(done.stdout)["bundles"][0]["ref"] == signed.ref
    assert "Using org/tiny:v2, the newest trusted of 3\n" in done.stderr


@pytest.mark.parametrize("command", ["validate", "inspect", "export"])
def test_an_archive_is_imported_first(run: Run, bundle: Bundle, home: Path, command: str) -> None:
    archive = run("export", "org/tiny").stdout.strip()
    for options in ([], ["--cache-dir", "other"]):
        said = run(command, archive, *options, code=3).stderr
        assert f"no bundle matches {archive!r}" in said and f"hint: coldstart import {archive}\n" in said


def test_export_to_an_existing_file_names_the_option_that_replaces_it(run: Run, bundle: Bundle) -> None:
    archive = run("export", "org/tiny").stdout.strip()
    said = run("export", "org/tiny", code=2).stderr
    assert f"error: {archive} exists already" in said and "hint: replace it with --force" in said
    run("export", "org/tiny", "--force")


def test_directory_of_bundles_is_pulled_first(run: Run, bundle: Bundle, home: Path) -> None:
    run("push", "org/tiny", "shared")
    said = run("validate", "shared", code=2).stderr
    assert f"hint: coldstart pull {home / 'shared'}, then specify the bundle\n" in said


def test_export_and_import_elsewhere(run: Run, bundle: Bundle, home: Path) -> None:
    assert run("export", "org/tiny").stdout == "org--tiny-v1.oci.tar\n"
    done = run("import", "org--tiny-v1.oci.tar", "--cache-dir", "other")
    assert done.stdout.strip() == bundle.ref
    assert "will not run" in done.stderr
    assert run("list", "-q", "--cache-dir", "other").stdout.strip() == bundle.ref


def test_push_and_pull_through_a_directory(run: Run, bundle: Bundle) -> None:
    there = run("push", "org/tiny", "shared").stdout.strip()
    assert run("pull", there, "--cache-dir", "other").stdout.strip() == bundle.ref


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("docker:foo/bar", "./docker:foo/bar"),
        ("gs:/b", "./gs:/b"),
        ("C:\\x", "'./C:\\x'"),
        (" oci://h/x", "'dir:// oci://h/x'"),
        ("there ", "'dir://there '"),
        ("registry.example/foo:v1", "oci://registry.example/foo:v1;"),
        ("localhost:5000/foo", "oci://localhost:5000/foo;"),
    ],
)
def test_push_and_pull_refuse_what_is_no_address(
    run: Run, bundle: Bundle, home: Path, address: str, hint: str
) -> None:
    for words in (("push", "org/tiny"), ("pull",)):
        before = {path.name for path in home.iterdir()}
        said = run(*words, address, code=2).stderr
        assert hint in said.splitlines()[-1]
        assert {path.name for path in home.iterdir()} == before


@pytest.mark.parametrize("name", ["./docker:foo", "dir://there ", "my.dir/foo", "a/b:c", "a:b"])
def test_push_and_pull_accept_a_directory_with_an_odd_name(
    run: Run, bundle: Bundle, home: Path, name: str
) -> None:
    (home / "a:b").mkdir()
    there = run("push", "org/tiny", name).stdout.strip()
    assert run("pull", f"{name}@{bundle.digest}", "--cache-dir", "other").stdout.strip() == bundle.ref
    assert there.endswith(f"@{bundle.digest}")


def test_pull_names_the_full_path_that_is_no_layout(run: Run, home: Path) -> None:
    (home / "one/two").mkdir(parents=True)
    assert f"{home}/one/two is not an image layout" in run("pull", f"{home}/one/two", code=1).stderr


def test_archive_commands_hint_push_and_pull_when_they_get_an_address(run: Run, bundle: Bundle) -> None:
    assert "hint: coldstart push REF ADDRESS" in run("export", "org/tiny", "--to", "oci://h/x", code=2).stderr
    assert "hint: coldstart pull ADDRESS" in run("import", "docker://foo/bar", code=2).stderr


@pytest.mark.parametrize("command", ["inspect", "push", "prune"])
def test_an_absent_version_lists_those_that_exist(run: Run, bundle: Bundle, home: Path, command: str) -> None:
    publish(Store(Cache.at().bundles), home / "scratch", blocks=9)
    more = ["there"] if command == "push" else []
    said = run(command, "org/tiny:v9", *more, code=3).stderr
    assert "no bundle matches 'org/tiny:v9': org/tiny has v1, v2" in said and "\nhint: " in said


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_pull_advises_another_source_when_its_source_is_damaged(
    run: Run, bundle: Bundle, home: Path, damage: str
) -> None:
    there = run("push", "org/tiny", "shared").stdout.strip()
    path = blob_path(home / "shared", bundle.entry("kv").digest)
    path.unlink() if damage == "remove" else flip(path, 3)
    said = run("pull", there, "--cache-dir", "other", code=1).stderr
    assert (
        "hint: pull it from another source, or push it again from where it is whole: coldstart push" in said
    )
    assert run("list", "-q", "--cache-dir", "other").stdout.strip() == ""
    flip(blob_path(bundle.layout.root, bundle.entry("kv").digest), 3)
    assert "fetch the bundle again: coldstart pull ADDRESS" in run("push", "org/tiny", "third", code=1).stderr


def test_pull_reports_the_damaged_blobs_that_it_replaces(run: Run, bundle: Bundle) -> None:
    there = run("push", "org/tiny", "shared").stdout.strip()
    assert "replaced" not in run("pull", there).stderr
    for number, digest in enumerate((bundle.entry("kv").digest, bundle.image.config.digest, bundle.digest)):
        for damaged in (bundle.entry("compile").digest, digest):
            flip(blob_path(bundle.layout.root, damaged), 3)
        done = run("pull", there, "--format", "json") if number else run("pull", there)
        if number:
            assert json.loads(done.stdout)["bundles"][0]["replaced_blobs"] == 2
        else:
            assert "org/tiny:v1: 2 damaged blobs replaced" in done.stderr
        assert run("validate", "org/tiny").stdout == f"{bundle.ref}: valid at level checksum\n"


def test_prune_dry_run_names_the_command_that_removes_the_same(run: Run, bundle: Bundle, home: Path) -> None:
    publish(Store(Cache.at().bundles), home / "scratch", blocks=9)
    noted = run("prune", "org/tiny:v2", "--dry-run").stderr
    assert noted.endswith("Next: coldstart prune org/tiny:v2\n")
    assert "Next: coldstart prune\n" in run("prune", "--dry-run").stderr
    assert "Next: coldstart prune --keep 2\n" in run("prune", "--keep", "2", "--dry-run").stderr
    other = run("prune", "--cache-dir", "a b", "--dry-run").stderr
    assert f"Next: coldstart prune --cache-dir '{home / 'a b'}'\n" in other


def test_trust_add_accepts_a_public_key(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = json.loads(run("trust", "show", "--format", "json").stdout)
    (home / "friend.pub").write_text(shown["public_key"])
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "elsewhere"))
    added = run("trust", "add", "friend.pub", "--name", "friend").stdout
    assert added == f"added friend ({shown['fingerprint']})\n"
    keys = json.loads(run("trust", "list", "--format", "json").stdout)["keys"]
    assert {entry["own"] for entry in keys} == {True, False}
    assert shown["fingerprint"] in {entry["fingerprint"] for entry in keys}


def test_trust_show_names_the_file_that_it_wrote(run: Run, home: Path) -> None:
    done = run("trust", "show", "--output", "build farm.pem")
    assert "Next, on the other machine: coldstart trust add 'build farm.pem'\n" in done.stderr
    run("trust", "add", "build farm.pem")
    assert "coldstart trust add FILE\n" in run("trust", "show").stderr


def test_a_damaged_manifest_is_not_called_trusted(run: Run) -> None:
    with Store(Cache.at().bundles).begin(key()) as draft:
        draft.add_json("kv", {"blocks": 3})
        bundle = draft.publish(provenance(), signer=sign.host_key(paths.state_dir()))
    assert json.loads(run("list", "--format", "json").stdout)["bundles"][0]["trusted"]
    flip(blob_path(bundle.layout.root, bundle.digest), 3)
    assert not json.loads(run("list", "--format", "json").stdout)["bundles"][0]["trusted"]
    said = run("trust", "why", bundle.ref, code=1)
    assert "CS-DIGEST" in said.stderr and "is trusted" not in said.stdout


def _pem(home: Path, name: str) -> str:
    (home / f"{name}.pub").write_bytes(sign.public_pem(home / f"state-of-{name}"))
    return f"{name}.pub"


def test_trust_remove_refuses_a_bundle_when_its_verification_was_remembered(run: Run, home: Path) -> None:
    maker = sign.host_key(home / "state-of-maker")
    with Store(Cache.at().bundles).begin(key()) as draft:
        draft.add_json("kv", {"blocks": 3})
        made = draft.publish(provenance(), signer=maker)
    for name in ("maker", "again"):  # one key under two names
        run("trust", "add", _pem(home, "maker"), "--name", name)
    assert inspection.trust(made).ok
    assert list((paths.state_dir() / "verdicts").iterdir())
    assert inspection.trust(made).ok
    removed = json.loads(run("trust", "remove", "maker", "--format", "json").stdout)["removed"]
    assert {key["name"] for key in removed} == {"maker", "again"}
    assert not inspection.trust(made).ok
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
        assert "No trusted key" in run("trust", "remove", word, code=2).stderr
    assert "own key" in run("trust", "remove", own, code=2).stderr
    for name in ("one", "two"):
        run("trust", "add", _pem(home, name), "--name", "same")
    assert "several keys" in run("trust", "remove", "same", code=2).stderr
    assert len(run("trust", "list", "-q").stdout.split()) == 3


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".hidden", "a b", "a\nb", "x" * 65, "\u00e4"])
def test_trust_add_refuses_a_name_that_is_not_a_slug(run: Run, home: Path, name: str) -> None:
    file = _pem(home, "friend")
    before = sorted(home.rglob("*.pub"))
    assert "invalid name" in run("trust", "add", file, "--name", name, code=2).stderr
    assert sorted(home.rglob("*.pub")) == before


def test_trust_add_refuses_a_file_when_it_is_a_pipe_or_large(run: Run, home: Path) -> None:
    os.mkfifo(home / "pipe")
    with (home / "large").open("wb") as large:
        large.truncate(1 << 30)
    for file, reason in (
        ("pipe", "not a regular file"),
        ("large", "larger than"),
        ("/dev/zero", "not a regular"),
    ):
        done = run("trust", "add", file, code=2)
        assert reason in done.stderr and "coldstart trust show" in done.stderr


def test_trust_add_names_the_file_without_a_key(run: Run, home: Path) -> None:
    (home / "f.txt").write_text("not a key")
    assert "f.txt is not a public key in PEM" in run("trust", "add", "f.txt", code=1).stderr


def test_doctor_answers_with_an_exit_code(run: Run) -> None:
    done = run("doctor", "--format", "json", code=None)
    assert done.returncode == (0 if json.loads(done.stdout)["able"] else 1)


def test_an_ambiguous_name_lists_each_bundle_on_a_line(run: Run, bundle: Bundle, home: Path) -> None:
    publish(Store(Cache.at().bundles), home / "scratch", key(dtype="float16"))
    lines = run("prune", "org/tiny", code=2).stderr.splitlines()
    first, *choices, hint = lines[[line.startswith("error: ") for line in lines].index(True) :]
    assert first == "error: 'org/tiny' names 2 bundles [CS-AMBIGUOUS]"
    assert [line.split()[0] for line in choices] == ["org/tiny:v1", "org/tiny:v2"]
    assert hint.startswith("hint: use a reference to one of them")
