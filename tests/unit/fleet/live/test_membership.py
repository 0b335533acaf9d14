"""The fleet replaces a server actor that can never answer."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

REPLACED = """
import asyncio
from types import SimpleNamespace

from ray.exceptions import ActorUnschedulableError

from coldstart.fleet.live import membership

membership.POLL_S = 0.02
NO_WORKERS = SimpleNamespace(workers=(), seq=0)
said = []

def calls(act):
    return SimpleNamespace(remote=act)

async def dead(method):
    raise ActorUnschedulableError("the node is not known here yet")

async def alive(method, *args):
    if method == "report":
        return NO_WORKERS
    await asyncio.sleep(60)

control = SimpleNamespace(
    add_server=lambda spec, node: said.append("joined"), mark_unusable=lambda name, reason: said.append(reason)
)

async def wait_until(condition, task):
    while not condition():
        assert not task.done(), task.exception()
        await asyncio.sleep(0.01)

async def main():
    known = {"a": SimpleNamespace(actor=SimpleNamespace(call=calls(dead)))}
    task = asyncio.create_task(membership.follow_server(control, SimpleNamespace(name="a"), known, None))
    await wait_until(lambda: said, task)
    assert set(said) == {"ActorUnschedulableError"}, said
    known["a"] = SimpleNamespace(actor=SimpleNamespace(call=calls(alive)))
    await wait_until(lambda: said[-1] == "joined", task)
    task.cancel()

asyncio.run(main())
"""


# In a separate process, because ray changes the environment, on which templates depend.
@pytest.mark.skipif(find_spec("ray") is None, reason="no ray")
def test_an_actor_that_could_not_be_placed_is_replaced() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", REPLACED], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
