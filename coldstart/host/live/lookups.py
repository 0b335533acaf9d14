"""Bundle look-ups for the models of a host: for their memory and start times, and at each start."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coldstart.artifacts.bundle import anyone
from coldstart.contract.arguments import Arguments
from coldstart.host.launches import FAIL, Launch
from coldstart.models import inspection, recorded
from coldstart.models.inspection import Lookup
from coldstart.system.paths import Cache


def look_up_model(
    model: str,
    args: Sequence[str],
    *,
    revision: str | None,
    untrusted: bool,
    cache: Cache,
    offline: bool,
    weights_from: str | None = None,
) -> Lookup:
    """Look up the bundle of a model that is started with the arguments `args`.

    `weights_from` allows a machine without the model's weights. Raises the errors of `inspection.look_up`.
    """
    accepts = anyone if untrusted else None
    found = inspection.look_up(model, args, cache=cache, offline=offline, revision=revision, accepts=accepts)
    return found.drop_weights() if weights_from and not found.model.weight_files else found


def adopt_arguments(launch: Launch, cache: Cache, *, offline: bool) -> tuple[Arguments, str]:
    """Return the arguments of the newest trusted bundle of the launch's model, and that bundle; none and "" without one.

    Raises the errors of `inspection.look_up`, and NoBundleError if `on_miss` is "fail" and the only bundle is not trusted.
    """
    asked = look_up_model(
        launch.model,
        (),
        revision=launch.revision,
        untrusted=launch.untrusted,
        cache=cache,
        offline=offline,
    )
    found = recorded.adopt_arguments(asked)
    if found.bundle is None and found.untrusted is not None and launch.on_miss == FAIL:
        raise inspection.miss(found)
    lender = found.lender
    return found.vllm_args, "" if lender is None else f"{lender.name}:v{lender.version}"


def look_up_launch(
    launch: Launch, cache: Cache, *, offline: bool, use: Callable[[Arguments], str] | None = None
) -> Lookup:
    """Look up the bundle of a launch. Raises the errors of `inspection.look_up`, and NoBundleError if `on_miss` is "fail".

    `use` is as in `inspection.miss`.
    """
    found = look_up_model(
        launch.model,
        launch.args,
        revision=launch.revision,
        untrusted=launch.untrusted,
        cache=cache,
        offline=offline,
        weights_from=launch.weights_from,
    )
    if found.bundle is None and launch.on_miss == FAIL:
        raise inspection.miss(found, use)
    return found
