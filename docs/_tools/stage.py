"""Write the pages of the site into build/pages: docs/ as the root, and the files outside of docs/ that pages link to.

The packages are linked as they install into build/packages, where the reference of the Python API finds the docstrings.

A page links to files of the repository by relative paths, which work in a checkout. The site has another layout, so each link
is rewritten. Run: python docs/_tools/stage.py
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = ROOT / "build/pages"
PACKAGES = ROOT / "build/packages"
OUTSIDE = ("CONTRIBUTING.md", "SECURITY.md", "artifacts/FORMAT.md", "benchmarks/*.md", "examples/README.md")
MOVED = {"README.md": "index.md", "artifacts/FORMAT.md": "reference/bundle-format.md"}
LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def main() -> None:
    """Write all pages and the files that they link to, and link the packages."""
    shutil.rmtree(PACKAGES, ignore_errors=True)
    (PACKAGES / "coldstart").mkdir(parents=True)
    for path in (*(ROOT / "coldstart").iterdir(), ROOT / "artifacts"):
        (PACKAGES / "coldstart" / path.name).symlink_to(path)
    shutil.rmtree(PAGES, ignore_errors=True)
    pages = [*DOCS.rglob("*.md"), *(path for pattern in OUTSIDE for path in ROOT.glob(pattern))]
    for page in pages:
        target = locate(page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(rewrite(page), encoding="utf-8")


def locate(path: Path) -> Path:
    """Return the path of a file of the repository below build/pages. README.md becomes the start page."""
    inside = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)
    return PAGES / MOVED.get(str(inside), inside)


def rewrite(page: Path) -> str:
    """Return the text of a page with each relative link rewritten, and copy the linked files that are no pages."""

    def link(match: re.Match[str]) -> str:
        linked = Path(os.path.normpath(page.parent / match[1]))
        target = locate(linked)
        if linked.suffix != ".md" and linked.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(linked, target)
        return f"]({os.path.relpath(target, locate(page).parent)}{match[2] or ''})"

    return LINK.sub(link, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
