"""The runtime snapshot: a template with the runtime imported, frozen by CRIU; one image starts every model.

It is made once for a machine and a set of versions, and holds no model of anybody's: what had to be configured so that all is
imported was the smallest model that is built here. A server that is forked from the thawed process takes its arguments,
environment, working directory and descriptors from whoever asks, as from a running template, and loads its own weights.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import prepare, process_snapshot
from coldstart.launch.process_snapshot import SnapshotUnusableError, Thawed
from coldstart.models import tiny
from coldstart.system import runtime
from coldstart.system.paths import Cache
from coldstart.system.snapshot import criu, runtime_image

_NO_MODEL_OF_YOURS = "tiny-llama"


def freeze(cache: Cache, timeout: float) -> Path:
    """Make the image for this interpreter, in place of one that is there; its directory.

    Raises CommandFailedError where none can be made, with the reason.
    """
    if (reason := criu.missing()) is not None:
        raise CommandFailedError(f"The runtime cannot be frozen here: {reason}.", hint="coldstart doctor")
    image = runtime_image.place(cache.runtimes)
    model = tiny.build(_NO_MODEL_OF_YOURS, cache.models)
    # What a start from a bundle has as well: inductor reads its settings when it is imported.
    caches = cache.vllm(image.name)
    env = prepare.base_env(caches) | prepare.inductor_env(caches)
    plan = LaunchPlan(Arguments(["--model", str(model)]), env=env)
    try:
        with runtime_image.published(image) as partial:
            process_snapshot.freeze(plan, partial, timeout, level="runtime")
            (partial / runtime_image.ABOUT).write_text(json.dumps(_about()))
    except OSError as error:
        raise CommandFailedError(
            f"The image cannot be written below {cache.runtimes}: {error.strerror or error}.",
            hint="free space: coldstart prune, or --cache-dir DIR",
        ) from error
    return image


def _about() -> dict[str, str]:
    _, vllm = runtime.vllm_distribution() or ("", "")
    made = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"python": sys.executable, "vllm": vllm, "made": made}


def made(cache: Cache) -> Path | None:
    """Where the image for this interpreter lies, None where there is none."""
    if not cache.runtimes.is_dir():
        return None
    image = runtime_image.place(cache.runtimes)
    return image if image.is_dir() else None


def thaw(image: Path, plan: LaunchPlan) -> Thawed:
    """The template of `image`, thawed for the server that `plan` describes. Raises SnapshotUnusableError, OSError."""
    if (reason := criu.missing() or runtime_image.obstacle(image)) is not None:
        raise SnapshotUnusableError(reason)
    return process_snapshot.restored(image, plan)
