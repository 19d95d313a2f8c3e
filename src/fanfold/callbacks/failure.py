"""CallbackError: what a loop raises when a callback did. It names the callback and the event, and is caught as what it was."""

from __future__ import annotations

import traceback
from typing import Any

from ..errors import FanfoldError


class CallbackError(FanfoldError):
    """A callback raised. It is also an instance of the type the callback raised, so `except ConnectionError` still works.

    `callback`, `event` and `step` say where; `__cause__` is the exception itself.
    """

    callback: str = ""
    event: str = ""
    step: int = 0
    text: str = ""

    def __str__(self) -> str:
        return self.text

    def __reduce__(self) -> Any:  # its class is made on the fly, so only the cause can say which it was
        return blame, (self.callback, self.event, self.step, self.__cause__)


def blame(callback: str, event: str, step: int, error: Exception) -> CallbackError:
    """Build the error for a callback that raised `error`."""
    made = _alike(type(error), error)
    made.callback, made.event, made.step = callback, event, step
    said = "".join(traceback.format_exception_only(type(error), error)).strip()
    made.text = (
        f"callback {callback} raised in {event}, at step {step}: {said}. Training stops here; the other callbacks were told. "
        "Fix the callback, or go on without it: on_error='disable'."
    )
    made.__cause__ = error
    return made


def _alike(kind: type[Exception], error: Exception) -> CallbackError:
    """Make a CallbackError that is also a `kind`, without calling its constructor: nobody knows what that asks for."""
    try:
        both: Any = type("CallbackError", (CallbackError, kind), {"__module__": __name__})
        made: CallbackError = both.__new__(both, *error.args)
        made.__dict__.update(error.__dict__)
        made.args = error.args
    except (TypeError, ValueError):  # a type that cannot be inherited from, or made this way
        return CallbackError()
    return made
