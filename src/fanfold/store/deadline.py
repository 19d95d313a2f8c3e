"""A time limit for one query. A server sets it for each request; the loops of every reader check it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextvars import ContextVar

from ..errors import FanfoldError

_until: ContextVar[float] = ContextVar("fanfold-deadline", default=float("inf"))


class TookTooLong(FanfoldError):
    """Raised when a query needs more time than it is given."""


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Stop the code inside after this many seconds, at its next check()."""
    token = _until.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _until.reset(token)


def check() -> None:
    """Raise TookTooLong once the time is up. Called for each run, rank and chunk that is read."""
    if time.monotonic() > _until.get():
        raise TookTooLong(
            "this took too long and was stopped. Nothing was changed. Ask for less at a time: fewer runs or metrics, one rank "
            "instead of all, or a filter without statistics such as loss.min."
        )
