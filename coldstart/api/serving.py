"""Start a server from the bundle of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from coldstart.api.bundles import PathLike, check_arguments, check_choice, look_up
from coldstart.launch import driver, listening, modes
from coldstart.launch.planning import ServeRequest
from coldstart.launch.scheduler import STOCK, check_scheduler
from coldstart.launch.server import Server
from coldstart.materialize.materialize import MaterializationPlan
from coldstart.materialize.options import Options, Phase
from coldstart.scheduling.settings import SchedulerSettings

OnMiss = Literal["fail", "warn", "materialize"]


def serve(
    model: str,
    vllm_args: Sequence[str] = (),
    *,
    host: str = listening.DEFAULT_HOST,
    port: int = listening.DEFAULT_PORT,
    api_key: str | None = None,
    mode: str = modes.AUTO,
    on_miss: OnMiss = "fail",
    ready_timeout_s: float | None = None,
    scheduler: SchedulerSettings = STOCK,
    weights_from: str | None = None,
    defer_capture: bool = False,
    require_signature: bool = False,
    untrusted: bool = False,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: PathLike | None = None,
    on_progress: Phase | None = None,
) -> Server:
    """Start a vLLM server from its bundle, and return when it has generated its first token.

    The server stops when this process exits. Use the result as a context manager, or call `Server.stop`.

    Args:
        model: Alias, repository ID, or directory.
        vllm_args: Command-line arguments of vLLM.
        host: Address to listen on.
        port: Port to listen on; 0 selects a free port.
        api_key: Key that the server requires from every client; None: no key.
        mode: Name of a start mode, or "auto" for the fastest available mode.
        on_miss: If no bundle matches: raise NoBundleError ("fail"), start stock vLLM ("warn") or build one ("materialize").
        ready_timeout_s: Maximum time to the first token, in seconds; None: no limit.
        scheduler: Scheduling policy and its settings; default: vLLM's own policy.
        weights_from: Address from which the weights are fetched; None: the directory of the model.
        defer_capture: Capture most CUDA graphs after the server is ready.
        require_signature: Refuse a bundle that no trusted key has signed.
        untrusted: Accept a bundle that no trusted key has signed; its code is not used.
        revision: Commit, branch or tag of a hub model.
        offline: Download nothing.
        cache_dir: As for `materialize`.
        on_progress: As for `materialize`; used only if a bundle is built.

    Raises:
        UsageError: An option is invalid, or the model does not exist.
        NoBundleError: No bundle fits and `on_miss` is "fail".
        AuthRequiredError: The hub requires authentication, or `offline` forbids a download.
        CommandFailedError: The server exited or exceeded `ready_timeout_s`, or its bundle lacks a required signature.
    """
    check_choice("mode", mode, (modes.AUTO, *modes.list_mode_names()))
    check_choice("on_miss", on_miss, get_args(OnMiss))
    check_scheduler(scheduler, check_arguments(vllm_args))
    lookup = look_up(
        model, vllm_args, revision=revision, offline=offline, cache_dir=cache_dir, untrusted=untrusted
    )
    if weights_from is not None:
        lookup = lookup.accept_nearest_without_weights()
    if lookup.bundle is None and on_miss == "materialize":
        MaterializationPlan(lookup, Options()).run(on_progress)
        lookup = lookup.refresh()
    key = [] if api_key is None else ["--api-key", api_key]
    return driver.start_server(
        ServeRequest(
            lookup,
            [*listening.build_address_arguments(host, port, lookup.vllm_args), *key],
            mode=mode,
            without_bundle=on_miss == "warn",
            ready_timeout=ready_timeout_s,
            require_signature=require_signature,
            scheduler=scheduler,
            weights_from=weights_from,
            defer_capture=defer_capture,
        )
    )
