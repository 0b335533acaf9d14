"""The hub without a network: a complete copy in the local cache is used at once, an incomplete one is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_SCRIPT = """
import sys
asked = []
sys.addaudithook(lambda event, details: asked.append(details[1]) if event == "socket.connect" else None)
from coldstart.errors import ColdstartError
from coldstart.models import hub, resolution
try:
    model = resolution.resolve("acme/tiny", revision=sys.argv[2] or None, offline=sys.argv[1] == "offline")
    print(resolution.ensure_weights(model, offline=sys.argv[1] == "offline").path)
except ColdstartError as error:
    print(error.exit_code, error.message)
print(len(asked))
"""
_UNREACHABLE = {"HF_ENDPOINT": "http://127.0.0.1:9"}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Create a hub cache with a sharded acme/tiny like `hf download`; return the snapshot directory."""
    repository = tmp_path / "hub" / "models--acme--tiny"
    snapshot = repository / "snapshots" / COMMIT
    for directory in (snapshot, repository / "refs", repository / "blobs"):
        directory.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.dumps({"weight_map": {f"t{n}": shard for n, shard in enumerate(shards)}})
    files = {"config.json": "{}", "tokenizer.json": "{}", "model.safetensors.index.json": index}
    for name, text in files.items():
        (repository / "blobs" / name).write_text(text)
    for number, shard in enumerate(shards):
        save_file({f"t{number}": np.zeros(1, np.float32)}, repository / "blobs" / shard)
    for name in (*files, *shards):
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    return snapshot


def _resolve(
    cache: Path, environment: dict[str, str], mode: str = "online", revision: str = ""
) -> tuple[str, int]:
    """Return what the process printed, and how often it connected to another."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", _SCRIPT, mode, revision]
    env = inherited | {"HF_HOME": str(cache.parents[3])} | environment
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    *said, connections = done.stdout.splitlines()
    return "\n".join(said), int(connections)


@pytest.mark.parametrize("revision", ["", COMMIT])
@pytest.mark.parametrize(
    ("environment", "mode"), [({"HF_HUB_OFFLINE": "1"}, "online"), (_UNREACHABLE, "offline")]
)
def test_complete_cache_is_used_at_once_without_the_hub(
    cache: Path, environment: dict[str, str], mode: str, revision: str
) -> None:
    assert _resolve(cache, environment, mode, revision) == (str(cache), 0)


@pytest.mark.parametrize(("environment", "code"), [(_UNREACHABLE, "2"), ({"HF_HUB_OFFLINE": "1"}, "4")])
def test_error_names_the_missing_shard_when_the_cache_is_incomplete(
    cache: Path, environment: dict[str, str], code: str
) -> None:
    link = cache / "model-00002-of-00002.safetensors"
    link.resolve().unlink()
    found, connections = _resolve(cache, environment)
    assert found.startswith(f"{code} cannot ") and f"lacks {link.name}" in found
    assert (connections > 0) is (environment == _UNREACHABLE)
