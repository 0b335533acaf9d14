"""Ray client of a gateway, in a child process: find or create the controller, and forward calls to it.

`controller_connection` is the other end.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from coldstart.fleet.live import actors
from coldstart.system.ipc import json_lines
from coldstart.system.proc.lifeline import die_with_supervisor

CONNECT_S = 120.0


def main(descriptor: int, options: dict[str, Any]) -> None:
    """Until the gateway's end of the connection closes."""
    die_with_supervisor()
    _connect(str(options["address"]))
    controller = _controller(dict(options["controller"]))
    asyncio.run(_serve(json_lines.Channel(socket.socket(fileno=descriptor)), controller))


def _connect(address: str) -> None:
    """A cluster that is just coming up is waited for. Raises ConnectionError, RuntimeError."""
    end = time.monotonic() + CONNECT_S
    while True:
        try:
            ray.init(address=address, namespace=actors.NAMESPACE, log_to_driver=False, logging_level="ERROR")
            return
        except (ConnectionError, RuntimeError, ValueError):
            if time.monotonic() > end:
                raise
            with suppress(Exception):
                ray.shutdown()
            time.sleep(0.5)


def _controller(options: dict[str, Any]) -> Any:
    """On this machine, where its state file is; it outlives this process and starts again by itself."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return actors.ControllerActor.options(  # type: ignore[attr-defined]
        name=actors.CONTROLLER,
        namespace=actors.NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
        scheduling_strategy=here,
    ).remote(options)


async def _serve(channel: json_lines.Channel, controller: Any) -> None:
    loop = asyncio.get_running_loop()
    channel.socket.setblocking(False)
    over, lock = asyncio.Event(), asyncio.Lock()
    tasks: set[asyncio.Task[None]] = set()

    async def call(message: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"reply": message["call"]}
        try:
            if "message" in message:
                answer["value"] = await controller.call.remote(message["message"])
            else:
                answer["value"] = await asyncio.to_thread(actors.end_all)
        except RayError as error:
            answer["error"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        async with lock:
            with suppress(OSError):
                await loop.sock_sendall(channel.socket, json_lines.encode(answer))

    def heard() -> None:
        messages = channel.receive(None)
        if messages is None:
            loop.remove_reader(channel.socket)
            over.set()
            return
        for message in messages:
            task = loop.create_task(call(message))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    loop.add_reader(channel.socket, heard)
    await over.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
