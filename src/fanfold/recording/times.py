"""The `time=` of log(): seconds since 1970 or a datetime, as nanoseconds."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from numbers import Number
from typing import Any

from ..errors import notices, outcome, shown, type_name

LATEST = 1 << 63  # nanoseconds: in the year 2262
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def nanoseconds(moment: Any) -> int:
    """Return a moment in nanoseconds since 1970; warn once and return the current time if it is not one."""
    found, _ = outcome(_exact, moment)
    if found is not None and 0 <= found < LATEST:
        return found
    notices.once(
        f"time:{type_name(moment)}",
        f"log(time={shown(moment)}) is not a time between 1970 and 2262. The values are recorded with the current time. "
        "Pass seconds since 1970, as time.time() returns them (not milliseconds), or a datetime.",
    )
    return time.time_ns()


def _exact(moment: Any) -> int | None:
    """Return a moment in whole nanoseconds, rounded once; a datetime without a time zone is local time."""
    if isinstance(moment, datetime):
        return (moment.astimezone(timezone.utc) - _EPOCH) // timedelta(microseconds=1) * 1000
    if isinstance(moment, bool) or not isinstance(moment, Number):
        return None
    whole, parts = (moment if isinstance(moment, int) else float(moment)).as_integer_ratio()
    return (whole * 10**9 + parts // 2) // parts
