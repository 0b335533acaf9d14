"""Add a process snapshot to a bundle: publish a next version that retains every other section unchanged."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from coldstart.artifacts import sign
from coldstart.artifacts.bundle import Bundle
from coldstart.errors import CommandFailedError
from coldstart.launch import fetch, prepare, process_snapshot
from coldstart.materialize.expectation import describe_nearest, estimates
from coldstart.materialize.workspace import workspace
from coldstart.models import inspection
from coldstart.models.inspection import Lookup
from coldstart.system import paths, timeline

if TYPE_CHECKING:
    from coldstart.materialize.progress import Phase

STAGE = "freeze a built engine"
_TIMEOUT_S = 600.0
# Gloo would bind the address of this machine's first interface, which a thawed process might not have.
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"}


def add_snapshot(lookup: Lookup, bundle: Bundle, phase: Phase) -> Bundle:
    """Freeze an engine template started from `bundle` and publish both as the key's next version.

    Raises:
        CommandFailedError: No snapshot can be created here; the message has the reason.
    """
    plan = prepare.prepare(
        lookup,
        bundle,
        fetch.choose(lookup),
        trust=inspection.trust,
        root=paths.frozen_dir(),
    )
    began, earlier = timeline.now(), estimates(lookup).get(STAGE)
    with phase(STAGE, earlier) as say, lookup.store.begin(bundle.key) as draft:
        if (took := describe_nearest(lookup).get(STAGE)) is not None:
            say(took)
        for section in bundle.manifest.sections:
            draft.keep(bundle, section.type)
        with workspace(lookup.cache.work) as work:
            images = work / "images"
            images.mkdir()
            try:
                unshared = process_snapshot.freeze(
                    replace(plan, env=plan.env | _LOOPBACK), images, _TIMEOUT_S
                )
            except process_snapshot.SnapshotUnusableError as error:
                raise CommandFailedError(
                    f"Cannot create a snapshot: {error}.", hint="coldstart doctor"
                ) from error
            if unshared is not None:
                say(unshared)
            draft.add_tree("snapshot", images, level=1, threads=-1)
        provenance = bundle.manifest.provenance
        seconds = {**provenance.seconds, STAGE: round(timeline.now() - began, 3)}
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        frozen = replace(provenance, created=now, seconds=seconds)
        return draft.publish(frozen, signer=sign.host_key(paths.state_dir()))
