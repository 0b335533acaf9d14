"""Laws: what is written is read back, equal inputs give equal bytes, and no input crashes a reader."""

import tempfile
from io import BytesIO
from pathlib import Path, PurePosixPath

import pytest
from coldstart.artifacts import canonical, oci, trees
from coldstart.artifacts.archive import export_archive, import_archive
from coldstart.artifacts.bundle import accept_any
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.key import Key, compare_keys
from coldstart.artifacts.store import Store
from hypothesis import assume, given
from hypothesis import strategies as st
from tools.bundles import forge, key, member, plain_tar, provenance, write_tree
from tools.examples import examples

from coldstart.validate.checks import check

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)
_PART = st.text(st.characters(categories=("L", "N"), max_codepoint=0x2FFF), min_size=1, max_size=60)
_NAMES = st.lists(_PART, min_size=1, max_size=4).map("/".join)
_FILES = st.dictionaries(_NAMES, st.binary(max_size=2000), max_size=8)
_WORDS = st.from_regex(r"\A[a-z0-9][a-z0-9. -]{0,12}\Z")
_FIELDS = st.dictionaries(
    st.from_regex(r"\A(engine|model)\.[a-z_]{1,8}\Z"),
    st.integers(-(2**53), 2**53) | st.booleans() | st.none() | _WORDS,
    min_size=1,
    max_size=6,
)


@given(_JSON)
def test_json_round_trips_and_is_canonical(value: object) -> None:
    data = canonical.serialize(value)
    assert canonical.decode(data, object, max_bytes=1 << 20, source="x") == value
    assert canonical.serialize(canonical.decode(data, object, max_bytes=1 << 20, source="x")) == data


@given(_FIELDS, _FIELDS)
def test_keys_differ_where_diff_says(left: dict[str, int | None], right: dict[str, int | None]) -> None:
    one, two = Key(left), Key(right)
    assert (one.digest == two.digest) == (compare_keys(one, two) == [])
    assert Key(dict(reversed(left.items()))).digest == one.digest


@examples(25)
@given(_FILES, _JSON)
@pytest.mark.slow
def test_a_bundle_moves_through_an_archive_unchanged(files: dict[str, bytes], value: object) -> None:
    names = [PurePosixPath(name) for name in files]
    assume(not any(parent in names for name in names for parent in name.parents))
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        (root / "tree").mkdir()
        write_tree(root / "tree", files)
        store = Store(root / "one")
        with store.open_draft(key()) as draft:
            draft.add_json("kv", value)
            first = draft.add_tree("compile", root / "tree")
            bundle = draft.publish(provenance())
        export_archive([bundle], root / "moved.tar")
        (moved,) = import_archive(Store(root / "two"), root / "moved.tar")
        assert moved == bundle and moved.read_json("kv") == value
        moved.extract_section("compile", root / "out", trust=accept_any)
        found = {
            p.relative_to(root / "out").as_posix(): p.read_bytes()
            for p in (root / "out").rglob("*")
            if p.is_file()
        }
        assert found == files
        with store.open_draft(key(other=1)) as draft:
            assert draft.add_tree("compile", root / "out").digest == first.digest


@examples(200)
@given(st.binary(max_size=3000))
def test_no_bytes_crash_the_readers(data: bytes) -> None:
    for read in (
        oci.parse_manifest,
        oci.parse_index,
        oci.check_layout_version,
        lambda d: trees.read_tar(BytesIO(d), 1 << 20),
    ):
        try:
            read(data)
        except BundleError:
            continue


@examples(200)
@given(st.data())
def test_no_damaged_tar_crashes_or_escapes_the_reader(data: st.DataObject) -> None:
    whole = bytearray(plain_tar((member("d", type=b"5"), b""), (member("d/" + "n" * 150), b"abc")))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        names = [one.name for one in trees.read_tar(BytesIO(bytes(whole)), 1 << 20)]
    except BundleError:
        return
    assert all(not name.startswith("/") and ".." not in name.split("/") for name in names)


@examples(25)
@given(st.binary(max_size=500))
@pytest.mark.slow
def test_no_section_bytes_crash_a_validation(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as place:
        for section in ("compile", "kv"):
            found = check(forge(Store(Path(place) / section), data, section))
            assert all(finding.code.startswith("CS-") and finding.hint for finding in found)
