"""What the store has for a model by the words it is started with: asked for its figures, and again when it starts."""

from __future__ import annotations

from collections.abc import Sequence

from coldstart.artifacts.bundle import anyone
from coldstart.host.launches import FAIL, Launch
from coldstart.models import inspection
from coldstart.models.inspection import Lookup
from coldstart.system.paths import Cache


def by_words(
    model: str,
    args: Sequence[str],
    *,
    revision: str | None,
    untrusted: bool,
    cache: Cache,
    offline: bool,
    weights_from: str | None = None,
) -> Lookup:
    """For a machine without the model's weights where they may come from elsewhere. Raises what inspection.look_up raises."""
    accepts = anyone if untrusted else None
    found = inspection.look_up(model, args, cache=cache, offline=offline, revision=revision, accepts=accepts)
    return found.without_weights() if weights_from and not found.model.weight_files else found


def of_launch(launch: Launch, cache: Cache, *, offline: bool) -> Lookup:
    """Raises what inspection.look_up raises, and NoBundleError where the launch needs one."""
    found = by_words(
        launch.model,
        launch.args,
        revision=launch.revision,
        untrusted=launch.untrusted,
        cache=cache,
        offline=offline,
        weights_from=launch.weights_from,
    )
    if found.bundle is None and launch.on_miss == FAIL:
        raise inspection.miss(found)
    return found
