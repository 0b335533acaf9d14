"""Pinned bytes: a bundle of today must be written the same way, and a bundle of yesterday must stay readable.

From the first release on, `bundle-v1.tar` is never rewritten: a change that breaks it needs a new format version.
Compressed bytes depend on the zstd release, so of a tree the tar stream is pinned.
"""

from hashlib import sha256
from pathlib import Path

import zstandard
from coldstart.artifacts import canonical
from coldstart.artifacts.archive import import_archive
from coldstart.artifacts.store import Store
from tools.bundles import KV, NAME, TREE, key, publish_sections, write_tree

from coldstart.validate.checks import check

_GOLDEN = Path(__file__).parent / "bundle-v1.tar"
_CONFIG = (
    b'{"format_version":"1.0","key":{"hardware.name":"cpu","model.name":"tiny","runtime.vllm":"0.32"},'
    b'"provenance":{"arguments":["materialize","org/tiny"],"created":"2026-01-02T03:04:05Z",'
    b'"model_name":"org/tiny","seconds":{"load":1.5},"tool":{"coldstart":"0.1.0"}}}'
)


def test_json_bundle_is_written_byte_for_byte(store: Store) -> None:
    bundle = publish_sections(store, kv=KV)
    assert bundle.find_readable_section("kv").digest == canonical.compute_digest(
        b'{"blocks":7,"bytes_per_block":4096.5}'
    )
    assert bundle.manifest.serialize_config() == _CONFIG
    assert bundle.image_manifest.config.digest == canonical.compute_digest(_CONFIG)
    assert bundle.digest == "sha256:71a77e7daef74ec7ba3f24ceb7e36e8eb47611d7a624f3e2e31a3a5441d4ee9f"
    assert key().digest == "sha256:219c14c00161c949fdb7e9a2502e6f9f2923c9f658feaab0afe050933f311195"


def test_tree_is_written_byte_for_byte(store: Store, tmp_path: Path) -> None:
    bundle = publish_sections(store, compile=write_tree(tmp_path / "tree", TREE))
    with bundle.open_section("compile") as reader:
        stream = zstandard.ZstdDecompressor().stream_reader(reader.readall() or b"").read()
    assert sha256(stream).hexdigest() == "2e20b45e0afa372c4d4c60ece7a0aaeafff2fdbd1eaa83a5fe0a4aa26526881a"


def test_the_golden_archive_stays_readable(store: Store) -> None:
    """Its section `tokenizer` is no section of this release: it is retained and reported."""
    (bundle,) = import_archive(store, _GOLDEN)
    assert bundle.digest == "sha256:a9c7e3803bbbf61570c10eeb6a15aca671a71295ada980870b914c19ef6a4c41"
    assert [(one.code, one.subject) for one in check(bundle)] == [("CS-SECTION-UNKNOWN", "tokenizer")]
    assert (bundle.name, bundle.key, bundle.read_json("kv")) == (NAME, key(), KV)
