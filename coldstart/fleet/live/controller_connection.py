"""Connection of a gateway to the controller, through a child process that is Ray's client.

Ray ends processes that lose their cluster for too long, and its import takes seconds: neither may happen in the
gateway. The child calls the controller: {"call": n, "message": document}, answered by {"reply": n, "value": document}
or {"reply": n, "error": text}; {"call": n} ends the fleet. A child that ends is started again.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from coldstart.contract import environment
from coldstart.fleet.live import messages
from coldstart.fleet.live.contact import ControllerAwayError
from coldstart.fleet.live.messages import Call
from coldstart.host.live.log import Log
from coldstart.system.ipc import json_lines
from coldstart.system.ipc.peers import PeerError

AGAIN_S = 1.0


class RayConnection:
    """Connection over Ray.

    `options` go to `coldstart.fleet.live.client`: the address of Ray and the options of a new controller.
    """

    def __init__(self, options: Mapping[str, Any], env: Mapping[str, str], log: Log) -> None:
        self.options, self.env, self.log = options, env, log
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: json_lines.Channel | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number, self._not_before = 0, 0.0
        self._sent: asyncio.Lock = asyncio.Lock()

    async def call(self, call: Call) -> Any:
        """Implement ControllerConnection: return the JSON document of the reply."""
        return await self._call({"message": messages.document(call)})

    async def end_fleet(self) -> None:
        """End every server and the controller. Raises ControllerAwayError."""
        await self._call({})

    async def _call(self, asked: Mapping[str, Any]) -> Any:
        loop = asyncio.get_running_loop()
        channel = self._started(loop)
        self._number += 1
        number = self._number
        answer = self._asked[number] = loop.create_future()
        line = json_lines.encode({"call": number, **asked})
        try:
            async with self._sent:
                await loop.sock_sendall(channel.socket, line)
            return await answer
        except OSError as error:
            raise ControllerAwayError(str(error)) from error
        finally:
            self._asked.pop(number, None)

    def _started(self, loop: asyncio.AbstractEventLoop) -> json_lines.Channel:
        if self._channel is not None:
            return self._channel
        if loop.time() < self._not_before:
            raise ControllerAwayError("the Ray client has just ended")
        self._not_before = loop.time() + AGAIN_S
        ours, theirs = socket.socketpair()
        given = {str(environment.SUPERVISOR_PID): str(os.getpid()), **self.env}
        command = [sys.executable, "-P", "-m", "coldstart.fleet.live.client", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(self.options)],
                pass_fds=(theirs.fileno(),),
                env=os.environ | given,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.setblocking(False)
        channel = self._channel = json_lines.Channel(ours)
        loop.add_reader(ours, self._heard)
        return channel

    def _heard(self) -> None:
        assert self._channel is not None
        try:
            messages = self._channel.receive(None)
        except PeerError:
            messages = None
        if messages is None:
            self._ended()
            return
        for message in messages:
            answer = self._asked.get(int(message["reply"]))
            if answer is None or answer.done():
                continue
            if "error" in message:
                answer.set_exception(ControllerAwayError(str(message["error"])))
            else:
                answer.set_result(message["value"])

    def _ended(self) -> None:
        assert self._channel is not None and self._process is not None
        self.log.say("ray client ended")
        asyncio.get_running_loop().remove_reader(self._channel.socket)
        self._channel.close()
        self._channel = None
        asyncio.get_running_loop().run_in_executor(None, self._process.wait)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ControllerAwayError("the Ray client ended"))

    async def close(self) -> None:
        """End the child process."""
        process, channel = self._process, self._channel
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel.socket)
            channel.close()
            self._channel = None
        if process is not None:
            with suppress(OSError):
                process.terminate()
            await asyncio.to_thread(process.wait)
