"""Fake servers, and the look-up of a bundle."""

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.engines import Publish

from coldstart.contract.arguments import Arguments
from coldstart.contract.plan import LaunchPlan
from coldstart.launch import ladder
from coldstart.launch.planning import ServeRequest
from coldstart.launch.server import Server
from coldstart.models.inspection import BundleLookup
from coldstart.models.resolution import ResolvedModel
from coldstart.system.paths import Cache


@pytest.fixture
def lookup(publish: Publish, model: ResolvedModel) -> BundleLookup:
    """Publish a bundle for the model and return its look-up."""
    bundle = publish(kv={"bytes": 1})
    return BundleLookup(model, Arguments(), Cache.at(), bundle.key, bundle)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers that supervision replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def start_server(lookup: BundleLookup, fake_engine: Callable[[str], None]) -> Iterator[Callable[..., Server]]:
    """Return start_server(plan, mode, **options), which starts a fake server that is stopped afterwards."""
    fake_engine("serves")
    started: list[Server] = []

    def start(plan: LaunchPlan, mode: str, **options: Any) -> Server:
        request = ServeRequest(lookup, mode=mode, ready_timeout=20, **options)
        started.append(ladder.start_server(request, plan))
        return started[-1]

    yield start
    for one in started:
        if one.is_running():
            one.running.process.signal(signal.SIGKILL)
            one.running.process.wait()
