"""List the files of a bundle's sections, and the differences between two bundles. Needs neither torch nor vLLM."""

from __future__ import annotations

from dataclasses import dataclass

from coldstart.artifacts.bundle import Bundle
from coldstart.artifacts.key import Mismatch, diff
from coldstart.artifacts.section import SECTION_TYPES


@dataclass(frozen=True, slots=True)
class SectionFile:
    """One file of a section that is a directory tree; `size` in bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class BundleDifference:
    """Fields of the key, and digests of sections, in which two bundles differ: `wanted` left, `found` right."""

    fields: list[Mismatch]
    sections: list[Mismatch]


def list_files(bundle: Bundle) -> dict[str, list[SectionFile]]:
    """Return the files of each section that is a tree, by section, in the order of the manifest.

    Every blob that is read is verified. Raises BundleError for one that is damaged.
    """
    return {
        entry.type: _read_tree(bundle, entry.type)
        for entry in bundle.manifest.sections
        if bundle.has(entry.type) and SECTION_TYPES[entry.type].encoding == "tar.zst"
    }


def _read_tree(bundle: Bundle, section: str) -> list[SectionFile]:
    from coldstart.artifacts import trees

    with bundle.open_blob(section) as reader:
        members = trees.scan(reader, bundle.entry(section))
    return [SectionFile(member.name, member.size) for member in members if not member.is_directory]


def compare_bundles(left: Bundle, right: Bundle) -> BundleDifference:
    """Compare the keys and the sections of two bundles, independent of their order."""
    return BundleDifference(diff(left.key, right.key), _compare_sections(left, right))


def _compare_sections(left: Bundle, right: Bundle) -> list[Mismatch]:
    mine, theirs = ({one.type: one.digest for one in bundle.manifest.sections} for bundle in (left, right))
    pairs = [Mismatch(name, mine.get(name), theirs.get(name)) for name in sorted({*mine, *theirs})]
    return [pair for pair in pairs if pair.wanted != pair.found]
