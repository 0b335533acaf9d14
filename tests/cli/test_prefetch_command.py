"""coldstart prefetch: start, status and stop, as text and as JSON, and their errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.range_server import serving
from tools.shell import Run

from coldstart.weights.prefetch import client

BYTES = 300_000


@pytest.fixture
def model(home: Path) -> Iterator[Path]:
    """Yield a model directory; stop the prefetcher of the test afterwards."""
    directory = home / "mine"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["X"]}))
    halves = np.random.default_rng(1).integers(0, 256, (2, BYTES // 2), np.uint8)
    save_file(dict(zip("ab", halves, strict=True)), directory / "model.safetensors")
    yield directory
    with suppress(client.PrefetchError):
        client.request("stop")


@pytest.mark.slow
def test_start_status_stop(run: Run, model: Path) -> None:
    size = (model / "model.safetensors").stat().st_size
    with serving(model) as server:
        done = run("prefetch", "start", str(model), "--weights-from", server.url)
        assert done.stdout.startswith("mine: ") and "Next: coldstart prefetch status" in done.stderr
        assert server.total() == size
        again = run("prefetch", "start", str(model), "--weights-from", server.url, "--format", "json")
        assert json.loads(again.stdout)["fetched_bytes"] == size == server.total()
    status = json.loads(run("prefetch", "status", "--format", "json").stdout)
    (one,) = status["prefetchers"]
    assert status["running"] and one["budget_bytes"] >= one["memory_bytes"] >= size
    assert (one["source"], one["ready_bytes"], one["leases"]) == (server.url, size, 0)
    assert f"{one['pid']}" in run("prefetch", "status").stdout
    assert run("prefetch", "stop").stdout == f"stopped {one['pid']}\n"
    assert run("prefetch", "status").stdout == "no prefetcher is running\n"
    assert json.loads(run("prefetch", "status", "--format", "json").stdout)["running"] is False


def test_start_reports_invalid_requests(run: Run, model: Path) -> None:
    with serving(model) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLDSTART_PREFETCH_MEMORY_BYTES", "9")
            short = run("prefetch", "start", str(model), "--weights-from", server.url, code=1)
        assert "the prefetcher may hold 9" in short.stderr
        offline = ("--weights-from", server.url, "--offline")
        assert "--offline is set" in run("prefetch", "start", str(model), *offline, code=4).stderr
    client.request("stop")
    (model / "model.safetensors").unlink()
    assert "--weights-from" in run("prefetch", "start", str(model), code=2).stderr
