"""Runtime snapshot: a template with the runtime imported, frozen by CRIU. One image starts every model.

The snapshot is created once for a machine and a set of versions. It contains no model of a user: the smallest model that
coldstart builds is configured so that all modules are imported. A server forked from the thawed process receives its arguments,
environment, working directory and descriptors with the request, as from a running template, and loads its own weights.
"""

from __future__ import annotations

from pathlib import Path

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.errors import CommandFailedError
from coldstart.launch import prepare, process_snapshot
from coldstart.launch.process_snapshot import SnapshotUnusableError, Thawed
from coldstart.models import tiny
from coldstart.system.paths import Cache
from coldstart.system.snapshot import criu, runtime_image

_NO_MODEL_OF_YOURS = "tiny-llama"


def freeze(cache: Cache, timeout: float) -> Path:
    """Create the image for this interpreter, replace an existing one, and return its directory.

    Raises:
        CommandFailedError: The image cannot be created; the message has the reason.
    """
    if (reason := criu.missing()) is not None:
        raise CommandFailedError(f"cannot freeze the runtime: {reason}", hint="coldstart doctor")
    image = runtime_image.place(cache.runtimes)
    model = tiny.build(_NO_MODEL_OF_YOURS, cache.models)
    # The settings of a start from a bundle: inductor reads them when it is imported.
    caches = cache.vllm(image.name)
    env = prepare.base_env(caches) | prepare.inductor_env(caches)
    plan = LaunchPlan(Arguments(["--model", str(model)]), env=env)
    try:
        with runtime_image.published(image) as partial:
            process_snapshot.freeze(plan, partial, timeout, level="runtime")
    except OSError as error:
        raise CommandFailedError(
            f"cannot write the image below {cache.runtimes}: {error.strerror or error}",
            hint="free space with coldstart prune, or use another disk with --cache-dir DIR",
        ) from error
    return image


def find_image(cache: Cache) -> Path | None:
    """Return the directory of the image for this interpreter, None if it does not exist."""
    if not cache.runtimes.is_dir():
        return None
    image = runtime_image.place(cache.runtimes)
    return image if image.is_dir() else None


def thaw(image: Path, plan: LaunchPlan) -> Thawed:
    """Thaw the template in `image` for the server of `plan`. Raises SnapshotUnusableError, OSError."""
    if (reason := criu.missing() or runtime_image.obstacle(image)) is not None:
        raise SnapshotUnusableError(reason, criu.hint())
    return process_snapshot.restored(image, plan)
