"""Checks of a page in a browser: nothing is cut off, nothing bars a reader, no script fails."""

from tools.chromium import Page

_TOO_WIDE = """(() => {
  const width = document.documentElement.clientWidth;
  const clips = one => ["auto", "scroll", "hidden"].includes(getComputedStyle(one).overflowX);
  const scrolls = one => one && (clips(one) || scrolls(one.parentElement));
  return [...document.body.querySelectorAll("*")]
    .filter(one => one.getBoundingClientRect().right > width + 1 && !scrolls(one.parentElement))
    .map(one => one.outerHTML.slice(0, 120));
})()"""
_BARRIERS = """axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations
  .filter(one => ["serious", "critical"].includes(one.impact))
  .map(one => one.id + ": " + one.nodes.map(node => node.html.slice(0, 160)).join(" | ")))"""


def check(page: Page, axe: str) -> None:
    """Assert that the open page fits its width, has no serious barrier, and that none of its scripts failed."""
    too_wide = page.evaluate(_TOO_WIDE)
    assert too_wide == [], too_wide
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page is too wide"
    page.evaluate(axe + ";true")
    barriers = page.evaluate(_BARRIERS)
    assert barriers == [], barriers
    errors = page.errors()
    assert errors == [], errors
