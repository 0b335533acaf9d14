"""Freeze an engine that was built from a bundle. The image stays on this machine, beside the store."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from coldstart.artifacts.bundle import Bundle
from coldstart.errors import CommandFailedError
from coldstart.launch import fetch, prepare, process_snapshot
from coldstart.models import inspection
from coldstart.models.inspection import Lookup
from coldstart.system import paths
from coldstart.system.snapshot import runtime_image

if TYPE_CHECKING:
    from coldstart.materialize.progress import Phase

STAGE = "freeze a built engine"
_TIMEOUT_S = 600.0
# Gloo would bind the address of this machine's first interface, which a thawed process might not have.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def has_snapshot(lookup: Lookup, bundle: Bundle | None) -> bool:
    """Return whether an engine of `bundle` was frozen on this machine."""
    return bundle is not None and runtime_image.engine_place(lookup.cache.runtimes, bundle.digest).is_dir()


def add_snapshot(lookup: Lookup, bundle: Bundle, phase: Phase) -> None:
    """Freeze an engine template started from `bundle`.

    Raises:
        CommandFailedError: No snapshot can be created here; the message has the reason.
    """
    plan = prepare.prepare(
        lookup, bundle, fetch.choose(lookup), trust=inspection.trust, root=paths.frozen_dir()
    )
    place = runtime_image.engine_place(lookup.cache.runtimes, bundle.digest)
    with phase(STAGE) as say:
        try:
            with runtime_image.published(place) as images:
                unshared = process_snapshot.freeze(
                    replace(plan, env=plan.env | _LOOPBACK), images, _TIMEOUT_S
                )
        except process_snapshot.SnapshotUnusableError as error:
            raise CommandFailedError(f"cannot create a snapshot: {error}", hint="coldstart doctor") from error
        if unshared is not None:
            say(unshared)
