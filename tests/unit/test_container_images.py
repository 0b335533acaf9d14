"""Images of container files are pinned by digest: requirements/images.py asks a real registry process."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from coldstart.artifacts import canonical, oci, oci_registry, remote
from coldstart.artifacts.store import Store
from support.registry import host
from tools.bundles import publish

__all__ = ["host"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def images() -> ModuleType:
    """The module requirements/images.py, which is not installed."""
    spec = importlib.util.spec_from_file_location("images", ROOT / "requirements/images.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _push_index(host: str, store: Store, directory: Path) -> str:
    """Push an index with one manifest as models/tiny:1, and return its digest."""
    bundle = publish(store, directory)
    remote.push(bundle, f"oci://{host}/models/tiny:single")
    index = oci.index_document([bundle.descriptor])
    place = oci_registry.repository(f"{host}/models/tiny:1")
    headers = {"Content-Type": oci.INDEX_TYPE}
    with place.session.ask("PUT", place.url("manifests", "1"), headers=headers, body=index) as answer:
        assert answer.status == 201
    return canonical.digest(index)


def test_digest_of_the_index_is_written_and_refreshed(
    images: ModuleType, host: str, store: Store, tmp_path: Path
) -> None:
    digest, image = _push_index(host, store, tmp_path), f"{host}/models/tiny:1"
    file = tmp_path / "Containerfile"
    for before in ("", "@sha256:" + "0" * 64, f"@{digest}"):
        file.write_text(f"# FROM a comment\nFROM {image}{before} AS base\nFROM base\nRUN true\n")
        assert images.pin_images([file]) == []
        assert file.read_text() == f"# FROM a comment\nFROM {image}@{digest} AS base\nFROM base\nRUN true\n"


def test_line_is_unchanged_when_the_registry_does_not_answer(
    images: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "Containerfile"
    file.write_text("FROM localhost:1/models/tiny:1\n")
    assert images.main([str(file)]) == 1
    assert file.read_text() == "FROM localhost:1/models/tiny:1\n"
    assert "cannot pin localhost:1/models/tiny:1, its line is unchanged: " in capsys.readouterr().err


def test_cpu_image_is_pinned() -> None:
    text = (ROOT / "examples/container/Containerfile.cpu").read_text()
    assert re.search(r"^FROM \S+:[\w.-]+@sha256:[0-9a-f]{64}$", text, re.MULTILINE)
