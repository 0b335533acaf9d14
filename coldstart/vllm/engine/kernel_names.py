"""Name Inductor's C++ kernels independently of the place where Python and torch are installed.

Inductor names a kernel by a hash of its source and its compile command, and the command contains the include and library
directories of Python and torch. Without them a bundle's kernels are found by any installation. The bundle's key contains the
versions of Python, torch and the compiler, so directories with other contents belong to another bundle.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

# Only absolute paths: the hashed text can contain C++ source too, where "-I" begins "-INFINITY".
_DIRECTORIES = re.compile(r" -[IL]/\S*")


def install() -> None:
    """Make Inductor in this process name kernels so; a kernel that exists under Inductor's own name keeps that name."""
    try:
        from torch._inductor import codecache

        original = codecache.write
        codecache.get_hash, codecache.get_path  # noqa: B018
    except (ImportError, AttributeError):  # this torch names kernels in another way
        return
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def write(content: Any, extension: str, extra: str = "", *args: Any, **kwargs: Any) -> Any:
        if extension.endswith(".cpp"):
            own_key = codecache.get_hash(content.strip(), extra)
            if not Path(codecache.get_path(own_key, extension)[2]).exists():
                extra = _DIRECTORIES.sub("", extra)
        return original(content, extension, extra, *args, **kwargs)

    codecache.write = write
