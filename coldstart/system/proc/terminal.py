"""The controlling terminal of this process."""

from __future__ import annotations

import os


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal, which it loses when the terminal is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
