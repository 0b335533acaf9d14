"""Moments of a cron expression with five fields, in local time."""

from __future__ import annotations

import time
from datetime import datetime

from coldstart.errors import UsageError

_HINT = 'write five fields, such as "0 8 * * 1-5" for 8:00 on weekdays'


def parse_crontab(given: object) -> str:
    """Return a cron expression. Raises UsageError if it is invalid or never comes to pass."""
    if not isinstance(given, str):
        raise UsageError(f"expected a cron expression, found {given!r}", hint=_HINT)
    try:
        find_next_moment(given, time.time())
    except ValueError as error:
        raise UsageError(f"invalid cron expression {given[:80]!r}: {error}", hint=_HINT) from error
    return given


def find_next_moment(expression: str, now: float) -> float:
    """Return the first moment after `now`, both as Unix time.

    A moment that daylight saving time skips comes an hour later; of an hour that it repeats, each moment comes twice only
    if `now` lies in its repetition.

    Raises:
        ValueError: The expression is invalid, or has no moment within 50 years.
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
    raise ValueError("it has no moment within 50 years")
