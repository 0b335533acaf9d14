"""Checks of an HTML page: well formed, self-contained, plots with axes and hover values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "br", "input"}


class _Checked(HTMLParser):
    """Parser that checks the nesting of elements and records references to other resources."""

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
    """Check that a page is well formed, refers to no other resource, and forbids the browser to load any."""
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
    """Return the JSON documents of the plots."""
    found = re.findall(r'<script class="plot" type="application/json">(.*?)</script>', page, flags=re.S)
    return [json.loads(text) for text in found]


def axis_labels(plot: dict[str, Any]) -> set[str]:
    """Return the axis labels: quantity and unit."""
    return {one["axis_label"] for one in _objects(plot) if one.get("axis_label")}


def objects(plot: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the attributes of its objects of a class such as HoverTool."""
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
