"""Nodes with read-only caches and caches of others: no secret is recorded, and no cache of another is written."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from coldstart.artifacts import ownership, sign
from coldstart.artifacts.store import Store
from tools import tiny_models
from tools.bundles import publish
from tools.command_line import Run

from coldstart.launch import planning
from coldstart.launch.planning import ServeRequest
from coldstart.models import inspection, relevance
from coldstart.system import paths

Act = Callable[[Callable[[], object]], object]
PLANTED = "PLANTED-secret"


def test_key_fields_contain_no_secret() -> None:
    given = {
        "api_key": PLANTED,
        "hf_tok": PLANTED,
        "speculative_config": {"secret": PLANTED, "method": "ngram"},
        "model_loader_extra": [{"password": PLANTED}],
    }
    fields = relevance.select_engine_fields(given)
    assert PLANTED not in json.dumps(fields) and fields["speculative_config.method"] == "ngram"


def test_cache_of_another_user_is_not_written(home: Path, stranger: Act, tmp_path: Path) -> None:
    """A cache that belongs to another user is read and never written. Root may write anywhere, so another user tries."""
    for place in (tmp_path, *tmp_path.parents):
        if place.stat().st_uid == 0 and place != Path("/") and place != Path("/tmp"):
            place.chmod(place.stat().st_mode | 0o055)
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    own = Path(tempfile.mkdtemp(prefix="cs-"))
    own.chmod(0o777)

    def act() -> object:
        os.environ["XDG_STATE_HOME"] = str(own / "state")
        found = paths.Cache(cache).writable_root
        return [str(found), ownership.describe_path_exposure(found)]

    place, fault = stranger(act)  # type: ignore[misc]
    shutil.rmtree(Path("/var/tmp/coldstart-64321"), ignore_errors=True)
    shutil.rmtree(own)
    assert not place.startswith(str(cache)) and fault is None
    assert paths.Cache(cache).writable_root == cache


def test_bundle_is_served_from_a_read_only_volume(run: Run, home: Path, tmp_path: Path) -> None:
    """The main case in a container: the cache is mounted read-only."""
    tiny_models.require_vllm()
    model = tiny_models.write_empty(home / "my-model")
    wanted = inspection.look_up(str(model)).key
    publish(
        Store(paths.Cache.at().bundles), tmp_path / "s", wanted, signer=sign.load_host_key(paths.state_dir())
    )
    root = paths.Cache.at().root
    mounted = subprocess.run(["mount", "--bind", root, root], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", root], check=True)
        with pytest.raises(OSError, match="Read-only"):
            (root / "x").touch()
        planned = planning.plan(ServeRequest(inspection.look_up(str(model))))
        assert planned.compile_dir is not None and Path(planned.compile_dir).is_dir()
        assert not planned.compile_dir.startswith(str(root))
        assert not planned.env["VLLM_CACHE_ROOT"].startswith(str(root))
        assert run("serve", str(model), "--dry-run").stdout.startswith("mode    fresh\n")
    finally:
        subprocess.run(["umount", root], check=True)
