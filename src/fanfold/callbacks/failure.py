"""CallbackError: raised by a loop when a callback raises. It names the callback and the event, and keeps the original type."""

from __future__ import annotations

import traceback
from typing import Any

from ..errors import FanfoldError


class CallbackError(FanfoldError):
    """Raised when a callback raises. It is also an instance of the original type, so `except ConnectionError` still works.

    `callback`, `event` and `step` tell where; `__cause__` is the original exception.
    """

    callback: str = ""
    event: str = ""
    step: int = 0
    text: str = ""

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:  # its class is created dynamically, so only the cause can restore it
        return blame, (self.callback, self.event, self.step, self.__cause__)


def blame(callback: str, event: str, step: int, error: Exception) -> CallbackError:
    """Build the error for a callback that raised `error`."""
    made = _alike(type(error), error)
    made.callback, made.event, made.step = callback, event, step
    said = "".join(traceback.format_exception_only(type(error), error)).strip()
    made.text = (
        f"callback {callback} raised in {event}, at step {step}: {said}. Training stops here; the other callbacks were told. "
        "Fix the callback, or continue without it: on_error='disable'."
    )
    made.__cause__ = error
    return made


def _alike(kind: type[Exception], error: Exception) -> CallbackError:
    """Create a CallbackError that is also a `kind`, without calling its constructor, whose arguments are unknown."""
    try:
        both: Any = type("CallbackError", (CallbackError, kind), {"__module__": __name__})
        made: CallbackError = both.__new__(both, *error.args)
        made.__dict__.update(error.__dict__)
        made.args = error.args
    except (TypeError, ValueError):  # a type that cannot be inherited from, or created this way
        return CallbackError()
    return made
