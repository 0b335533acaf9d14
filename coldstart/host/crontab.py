"""Times that a cron expression with five fields matches, in local time."""

from __future__ import annotations

import time
from datetime import datetime

from coldstart.errors import UsageError

_HINT = 'write five fields, such as "0 8 * * 1-5" for 8:00 on weekdays'


def parse_crontab(given: object) -> str:
    """Return a cron expression. Raises UsageError if it is invalid or matches no time."""
    if not isinstance(given, str):
        raise UsageError(f"expected a cron expression, found {given!r}", hint=_HINT)
    try:
        find_next_moment(given, time.time())
    except ValueError as error:
        raise UsageError(f"invalid cron expression {given[:80]!r}: {error}", hint=_HINT) from error
    return given


def find_next_moment(expression: str, now: float) -> float:
    """Return the first time after `now` that the expression matches, both as Unix time.

    If daylight saving time skips a matching local time, the result is one hour later. In an hour that is repeated, the
    second occurrence is returned only if `now` is after the first one.

    Raises:
        ValueError: The expression is invalid, or matches no time within 50 years.
    """
    from cronsim import CronSim, CronSimError

    if len(expression.split()) != 5:
        raise ValueError("it does not have five fields")
    try:
        for moment in CronSim(expression, datetime.fromtimestamp(now)):
            # The later of two equal local times, where the earlier one has passed.
            for fold in (0, 1):
                at = moment.replace(fold=fold).timestamp()
                if at > now:
                    return at
    except CronSimError as error:
        raise ValueError(str(error)) from error
    raise ValueError("it matches no time within 50 years")
