"""Indexes, manifests, configs and sections made to confuse a reader: each is refused with its own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from coldstart.artifacts import canonical, oci
from coldstart.artifacts.blobs import blob_path
from coldstart.artifacts.errors import BundleError, TooLargeError
from coldstart.artifacts.limits import LIMITS
from coldstart.artifacts.store import Store
from tools.bundles import config, forge, plant, publish

from coldstart.validate.checks import check

_LAYER = {
    "mediaType": "application/vnd.coldstart.section.kv.v1+json",
    "digest": f"sha256:{'0' * 64}",
    "size": 1,
}


def _layers(*layers: object) -> Callable[[bytes], bytes]:
    return lambda data: canonical.dumps(json.loads(data) | {"layers": layers})


def _config(**changes: object) -> bytes:
    return json.dumps(config(**changes)).encode()


def _nested(depth: int) -> bytes:
    return b'{"format_version":"1.0","key":' + b"[" * depth + b"]" * depth + b"}"


CONFIGS = {
    "not json": (b"{", "CS-JSON"),
    "not utf-8": (b'{"format_version":"\xff"}', "CS-JSON"),
    "nan": (b'{"format_version":NaN}', "CS-JSON"),
    "deep": (_nested(100), "CS-MANIFEST"),
    "very deep": (_nested(100_000), "CS-JSON"),
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


@pytest.mark.parametrize("name", CONFIGS)
def test_config_refused_with_its_code(name: str, store: Store) -> None:
    data, code = CONFIGS[name]
    bundle = plant(store, data)
    with pytest.raises(BundleError) as caught:
        _ = bundle.manifest
    assert caught.value.code == code
    assert [finding.code for finding in check(bundle, "manifest")] == [code]


MANIFESTS = {
    "schema 1": (lambda data: data.replace(b'"schemaVersion":2', b'"schemaVersion":1'), "CS-MANIFEST"),
    "config digest": (lambda data: data.replace(b'"digest":"sha256:', b'"digest":"sha256:/'), "CS-MANIFEST"),
    "another artifact": (lambda data: data.replace(b"coldstart.bundle", b"example.bundle"), "CS-MANIFEST"),
    "too large": (lambda data: data + b" " * LIMITS.manifest_bytes, "CS-SIZE"),
    "a type twice": (_layers(_LAYER, _LAYER), "CS-SECTION-TABLE"),
    "too many sections": (_layers(*[_LAYER] * 65), "CS-SIZE"),
    "a digest that is a path": (_layers(_LAYER | {"digest": "sha256:../../x"}), "CS-MANIFEST"),
    "a negative size": (_layers(_LAYER | {"size": -1}), "CS-MANIFEST"),
    "a size past the cap": (_layers(_LAYER | {"size": 1 << 60}), "CS-SIZE"),
    "a boolean size": (_layers(_LAYER | {"size": True}), "CS-MANIFEST"),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_manifest_refused_with_its_code(name: str, store: Store) -> None:
    change, code = MANIFESTS[name]
    bundle = plant(store, canonical.dumps(config()), change)
    with pytest.raises(BundleError) as caught:
        _ = bundle.manifest
    assert caught.value.code == code


def test_tree_passed_off_as_another_media_type(store: Store, tmp_path: Path) -> None:
    bundle = forge(store, b"x", "compile", media_type="application/vnd.coldstart.section.compile.v1+json")
    with pytest.raises(BundleError) as caught:
        bundle.extract_section("compile", tmp_path / "out")
    assert caught.value.code == "CS-SECTION-UNSUPPORTED"


def test_blob_that_is_a_link(store: Store, tmp_path: Path) -> None:
    bundle = publish(store, tmp_path)
    path = blob_path(store.root, bundle.find_readable_section("kv").digest)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError) as caught:
        bundle.read_json("kv")
    assert caught.value.code == "CS-LINK"


def test_layer_that_is_no_section_is_reported_and_not_read(store: Store, tmp_path: Path) -> None:
    layer = _LAYER | {"mediaType": "application/vnd.oci.image.layer.v1.tar"}
    bundle = plant(store, canonical.dumps(config()), _layers(layer))
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
    with pytest.raises(BundleError) as caught:
        store.list_bundles()[0].read_json("kv")
    assert caught.value.code == "CS-INDEX"
