"""Checks of an HTML page: well formed, self-contained, plots with axes."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

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
    assert parser.policy.startswith("default-src 'none'")
    assert "http" not in parser.policy
    assert "*" not in parser.policy
    assert "url(" not in page.split("</style>", 1)[0] and "@import" not in page.split("</style>", 1)[0]


def plots(page: str) -> list[ElementTree.Element]:
    """Return the plots of a page."""
    found = re.findall(r"<figure>.*?</figure>", page, flags=re.S)
    return [ElementTree.fromstring(text.replace("&quot;", "'")) for text in found]


def read_labels(plot: ElementTree.Element) -> set[str]:
    """Return the labels of a plot: quantity and unit."""
    return {
        (one.text or "").strip() for one in plot.iter() if one.tag == "figcaption" or one.get("class") == "x"
    }
