"""Stored results of transformers' scans, against the installed transformers."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
PROGRAM = """
import json, sys
from coldstart.vllm import package_scans
if sys.argv[1:]:
    package_scans.reuse_scans()
import transformers, transformers.models
from transformers.utils import import_utils as utils
named = transformers, transformers.models
lists = [(one._class_to_module, {n: sorted(of) for n, of in one._object_missing_backend.items()}) for one in named]
print(json.dumps([utils.create_import_structure_from_path.cache_info().misses, lists, utils.PACKAGE_DISTRIBUTION_MAPPING]))
"""


def test_scans_are_repeated_only_after_a_change(tmp_path: Path) -> None:
    installed = Path(str(find_spec("transformers").origin)).parent  # type: ignore[union-attr]
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(installed, tmp_path / "transformers", copy_function=os.symlink, ignore=ignored)
    env = os.environ | {"PYTHONPATH": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}

    def scan(*arguments: str) -> tuple[int, Any, Any]:
        command = [sys.executable, "-c", PROGRAM, *arguments]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return tuple(json.loads(done.stdout))

    original, first, second = scan(), scan("reuse"), scan("reuse")
    assert original[1:] == first[1:] == second[1:]
    assert first[0] > 100 and second[0] == 0
    (tmp_path / "transformers" / "models" / "llama" / "modeling_new.py").write_text('__all__ = ["New"]\n')
    (tmp_path / "new-1.dist-info").mkdir()
    (tmp_path / "new-1.dist-info" / "METADATA").write_text("Name: new\n")
    (tmp_path / "new-1.dist-info" / "top_level.txt").write_text("new\n")
    changed = scan("reuse")
    read, ((modules, _), _), distributions = changed
    assert read > 100 and modules["New"] == "models.llama.modeling_new" and distributions["new"] == ["new"]
    next((tmp_path / "state").rglob("models.*")).write_bytes(b"damaged")
    assert scan("reuse") == changed
