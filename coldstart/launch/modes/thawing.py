"""Launch a server from a template that CRIU thaws for this server alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from coldstart.errors import UsageError
from coldstart.launch.modes.mode import LaunchRefusedError, await_ready

if TYPE_CHECKING:
    from coldstart.launch.process_snapshot import Thawed
    from coldstart.launch.request import ServerStart
    from coldstart.launch.server_process import Running, ServerProcess


def launch_thawed(start: ServerStart, thaw: Callable[[ServerStart], Thawed]) -> Running:
    """Thaw a template, have it fork the server, and wait until the server is ready.

    Raises:
        LaunchRefusedError: The image cannot be used, for whatever reason, so that another mode can start the server.
    """
    from coldstart.launch.process_snapshot import SnapshotUnusableError

    try:
        thawed = thaw(start)
    except SnapshotUnusableError as error:
        raise LaunchRefusedError(str(error), error.hint) from error
    except (UsageError, OSError, LookupError, ValueError, TypeError) as error:
        raise LaunchRefusedError(str(error)) from error
    return await_ready(start, _fork(start, thawed))


def _fork(start: ServerStart, thawed: Thawed) -> tuple[ServerProcess, int]:
    from coldstart.launch import server_process

    try:
        return server_process.forked(start.plan, thawed.socket, thawed)
    except BaseException:
        thawed.end()
        raise
