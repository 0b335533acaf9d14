"""What an HTML page of ours has to be: well formed, alone, its plots with axes and hover values; drawn where Chromium is."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

VOID = {"meta", "br", "input"}


class _Checked(HTMLParser):
    """Every element closes in order; what would be loaded from elsewhere is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outside: list[str] = []
        self.policy = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [
            f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href", "action")
        ]
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> None:
    """Well formed, refers to nothing, and forbids the browser to ask for anything."""
    parser = _Checked()
    parser.feed(page)
    assert parser.open == [] and parser.outside == []
    assert (
        parser.policy.startswith("default-src 'none'")
        and "http" not in parser.policy
        and "*" not in parser.policy
    )
    assert "url(" not in page.split("</style>", 1)[0] and "@import" not in page.split("</style>", 1)[0]


def plots(page: str) -> list[dict[str, Any]]:
    """The plots' own documents, as the library gets them."""
    found = re.findall(r'<script class="plot" type="application/json">(.*?)</script>', page, flags=re.S)
    return [json.loads(text) for text in found]


def axis_labels(plot: dict[str, Any]) -> set[str]:
    """The labels of its axes: quantity and unit."""
    return {one["axis_label"] for one in _objects(plot) if one.get("axis_label")}


def objects(plot: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The attributes of its objects of that class, such as HoverTool."""
    return [one.get("attributes", {}) for one in _dicts(plot) if one.get("name") == name]


def _objects(value: object) -> Iterator[dict[str, Any]]:
    return (one["attributes"] for one in _dicts(value) if "attributes" in one)


def _dicts(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for inner in value.values():
            yield from _dicts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _dicts(inner)


def drawn(address: str, home: Path) -> tuple[str, str]:
    """The page's document after its scripts ran in headless Chromium, and what the browser's console said.

    Skips where there is no Chromium.
    """
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium here: the page was parsed but not drawn (Debian: apt-get install chromium)")
    # No name resolves, so that a request that got past the page's own policy would be told in the log.
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=6000",
        "--enable-logging=stderr",
    ]
    options += [
        f"--user-data-dir={home / 'browser'}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    done = subprocess.run(
        [browser, *options, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=120
    )
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(line for line in said if "document idle" not in line)
