"""The type of the fixture that runs ``coldstart`` in a child process."""

import subprocess
from collections.abc import Callable

Run = Callable[..., "subprocess.CompletedProcess[str]"]
"""run(*args, code=0, cwd=None): the finished process; fails unless it exits with ``code`` (None: any)."""
