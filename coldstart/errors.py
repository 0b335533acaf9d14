"""Errors of coldstart that a user can meet, and the exit codes of the command line.

Every error states what failed, on which object and why. `hint` is what the user can do next, if possible a command to type.
"""

from coldstart.artifacts.errors import (
    AUTH_REQUIRED,
    CHECK_FAILED,
    ERROR,
    NO_BUNDLE,
    SUCCESS,
    ColdstartError,
    describe_reason,
)

__all__ = [
    "AUTH_REQUIRED",
    "CHECK_FAILED",
    "ERROR",
    "NO_BUNDLE",
    "SUCCESS",
    "AuthRequiredError",
    "ColdstartError",
    "CommandFailedError",
    "LaunchRefusedError",
    "NoBundleError",
    "UsageError",
    "describe_reason",
]


class CommandFailedError(ColdstartError):
    """A check failed: an invalid bundle, a regression, a server that died (exit code 1).

    `is_final` is set if another start with the same arguments would fail in the same way.
    """

    exit_code = CHECK_FAILED
    is_final = False


class UsageError(ColdstartError):
    """The arguments or the configuration are invalid (exit code 2)."""

    exit_code = ERROR


class LaunchRefusedError(RuntimeError):
    """An available start mode did not start the server; the message has the reason. The next mode is tried."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


class NoBundleError(ColdstartError):
    """No bundle has this key, or none is compatible (exit code 3)."""

    exit_code = NO_BUNDLE


class AuthRequiredError(ColdstartError):
    """The hub requires authentication, or the network is needed and --offline is set (exit code 4)."""

    exit_code = AUTH_REQUIRED
