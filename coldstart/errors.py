"""Every failure the user can meet: what was wanted, what was found, and the command that mends it.

Invariant: an error that leaves the engine carries its own exit code, so that the command line needs one table
and no special case.
"""

SUCCESS = 0
CHECK_FAILED = 1
ERROR = 2
NO_BUNDLE = 3
AUTH_REQUIRED = 4


class ColdstartError(Exception):
    """A failure with a sentence for the user, the mend where one is known, and an exit code."""

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = ERROR) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.exit_code = exit_code


class CommandFailedError(ColdstartError):
    """The answer is no: an invalid bundle, a regression, a server that died (exit 1)."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, exit_code=CHECK_FAILED)


class UsageError(ColdstartError):
    """The request itself cannot be met as written: arguments, configuration (exit 2)."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, exit_code=ERROR)


class NoBundleError(ColdstartError):
    """No bundle for this key, or none that is compatible (exit 3)."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, exit_code=NO_BUNDLE)


class AuthRequiredError(ColdstartError):
    """The hub refuses without a login, or cannot be reached while offline (exit 4)."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint, exit_code=AUTH_REQUIRED)
