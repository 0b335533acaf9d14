"""Page at /ui: the status of a host in a browser, with plots of the changes since the page was opened.

Invariant: the page contains no data of the host. It reads all data from /status, with an API key that the reader
enters if the host requires one. Its content security policy allows no other connection and no script but its own.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from html import escape
from importlib.resources import files

_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)
_POLICY = (
    "default-src 'none'; connect-src 'self'; script-src {scripts}; style-src 'unsafe-inline';"
    " base-uri 'none'; form-action 'none'"
)


@cache
def page() -> str:
    """Return the page as one HTML document."""
    text = files(__package__).joinpath("ui.html").read_text(encoding="utf-8")
    return text.replace("<!--policy-->", escape(_policy(text), quote=False), 1)


def _policy(text: str) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()) for script in _SCRIPT.findall(text)]
    return _POLICY.format(scripts=" ".join(f"'sha256-{digest.decode()}'" for digest in digests))


@cache
def content() -> bytes:
    """Return the encoded page, one object for all clients: unread answers take no memory of their own."""
    return page().encode()


@cache
def headers() -> dict[str, str]:
    """Return the page's response headers. No other page may show it in a frame."""
    return {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": f"{_policy(page())}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
