"""The documentation site builds without a warning."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_site_builds_without_a_warning() -> None:
    pytest.importorskip("zensical")
    for command in (["docs/_tools/stage.py"], ["-m", "zensical", "build", "--strict"]):
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    assert (ROOT / "build" / "site" / "index.html").is_file()
