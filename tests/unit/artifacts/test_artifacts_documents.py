"""Keys, canonical JSON, format versions, and the agreement of FORMAT.md, schema and parser."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import jsonschema
import pytest
from coldstart.artifacts import errors, manifest, oci, store
from coldstart.artifacts.errors import BundleError
from coldstart.artifacts.manifest import SECTION_TYPES
from tools.bundles import config, key, provenance

_RESOURCES = files("coldstart.artifacts")
_SCHEMA = json.loads((_RESOURCES / "bundle.schema.json").read_text())
_FORMAT = (_RESOURCES / "FORMAT.md").read_text()


def _parse(document: object) -> manifest.Manifest:
    data = json.dumps(document).encode()
    return manifest.parse(data, oci.ImageManifest(oci.BUNDLE_TYPE, oci.describe(data, oci.CONFIG_TYPE), ()))


def _provenance(**changes: object) -> dict[str, object]:
    return {"provenance": provenance().document() | changes}


BROKEN = {
    "version": config(format_version="3.0"),
    "no key": config(key={}),
    "key name": config(key={"nodots": 1}),
    "key path": config(key={"a.b": "/x"}),
    "key drive": config(key={"a.b": "C:\\x"}),
    "key array": config(key={"a.b": []}),
    "created": config(**_provenance(created="yesterday")),
    "local time": config(**_provenance(created="2026-01-01T00:00:00+02:00")),
    "arguments": config(**_provenance(arguments="x")),
    "seconds": config(**_provenance(seconds={"a": "1"})),
    "tool": config(**_provenance(tool={"a": 1})),
    "name": config(**_provenance(model_name="../x")),
}


def test_schema_accepts_written_documents() -> None:
    jsonschema.Draft202012Validator.check_schema(_SCHEMA)
    jsonschema.validate(config(), _SCHEMA)
    assert _parse(config()) == manifest.Manifest(key(), (), provenance())


@pytest.mark.parametrize("name", BROKEN)
def test_schema_and_parser_refuse_the_same_documents(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(BROKEN[name], _SCHEMA)
    with pytest.raises(BundleError):
        _parse(BROKEN[name])


def test_format_lists_every_code_once() -> None:
    classes = [*vars(errors).values(), *vars(store).values()]
    made = {c for c in classes if isinstance(c, type) and issubclass(c, BundleError) and c is not BundleError}
    codes = [c.code for c in made]
    assert len(set(codes)) == len(codes)
    listed = re.findall(r"^\| `(CS-[A-Z-]+)` \|", _FORMAT, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(codes) <= set(listed)
    assert all(c.default_hint for c in made)


def test_format_lists_every_section_type_with_its_executability() -> None:
    for line in re.findall(r"^\| `kv`.*|^\| `tokenizer`.*|^\| `compile`.*", _FORMAT, re.MULTILINE):
        names, version, encoding, executable = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", names):
            kind = SECTION_TYPES[name]
            assert (kind.version, kind.encoding) == (int(version), encoding.lower())
            assert kind.executable is ("yes" in executable)
    assert all(f"`{name}`" in _FORMAT for name in SECTION_TYPES)


def test_a_newer_minor_is_read_and_its_members_ignored() -> None:
    assert _parse(config(format_version="1.7", novelty=[1])).key == key()
