"""Errors that are reported to users, and the exit codes of the command line.

Every error states what failed, on which object and why. `hint` is a command or a value that the user can type, if there
is one.
"""

from coldstart.artifacts.errors import AUTH_REQUIRED as AUTH_REQUIRED
from coldstart.artifacts.errors import CHECK_FAILED as CHECK_FAILED
from coldstart.artifacts.errors import ERROR as ERROR
from coldstart.artifacts.errors import NO_BUNDLE as NO_BUNDLE
from coldstart.artifacts.errors import ColdstartError as ColdstartError
from coldstart.artifacts.errors import describe_reason as describe_reason


class CommandFailedError(ColdstartError):
    """Error for a failed check or command: an invalid bundle, a regression, or a server that exited (exit code 1).

    `is_final` is true if another start with the same arguments would fail in the same way.
    """

    exit_code = CHECK_FAILED
    is_final = False


class UsageError(ColdstartError):
    """Error for invalid arguments or configuration (exit code 2)."""

    exit_code = ERROR


class LaunchRefusedError(RuntimeError):
    """Error for a start mode that cannot be used, with the reason. The launcher then tries the next mode."""

    def __init__(self, reason: str, hint: str | None = None) -> None:
        super().__init__(reason)
        self.hint = hint


class NoBundleError(ColdstartError):
    """Error for a key without a bundle or without a compatible bundle (exit code 3)."""

    exit_code = NO_BUNDLE


class AuthRequiredError(ColdstartError):
    """Error for missing authentication at the hub, or for network access that --offline forbids (exit code 4)."""

    exit_code = AUTH_REQUIRED
