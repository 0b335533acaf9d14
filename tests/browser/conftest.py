"""A real Chromium for the tests of pages; they are skipped where `fetch-chromium.sh` has not made one."""

from collections.abc import Iterator

import pytest
from tools import chromium
from tools.chromium import Page


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    """The page of one browser, which all tests share."""
    python = chromium.find_python()
    if python is None:
        pytest.skip("no Chromium: tests/tools/fetch-chromium.sh")
    with chromium.browser(python) as opened:
        yield opened


@pytest.fixture(params=[(width, dark) for width in (1280, 800, 400) for dark in (False, True)], ids=str)
def shown(request: pytest.FixtureRequest, page: Page) -> Page:
    """The page at three widths, in a light and a dark colour scheme."""
    width, dark = request.param
    page.show(width=width, dark=dark)
    return page


@pytest.fixture(scope="session")
def axe() -> str:
    """JavaScript of axe-core."""
    python = chromium.find_python()
    assert python is not None
    return chromium.axe_source(python)
