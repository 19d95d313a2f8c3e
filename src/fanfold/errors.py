"""The exception hierarchy, the warnings, and guard(): the only place that catches everything.

FanfoldError
├── SettingError      a setting or argument that cannot be understood      (also ValueError)
├── RunError          a run that cannot be opened, joined or resumed
│   └── RunNotFound   no run with that id or path                          (also LookupError)
├── MetricNotFound    no metric of that name in a run                      (also LookupError)
├── Forbidden         something a caller of a server may not see or do
├── JournalError      a journal this version cannot read
├── ValueRefused      a value that cannot be logged, under strict=True     (also TypeError)
├── MissingExtra      an optional library that is not installed            (also ImportError)
└── CallbackError     a callback that raised; see callbacks/failure.py     (also the type it raised)

Warnings go to the logger "fanfold", once per cause: see Notices.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import reprlib
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ParamSpec, TypeVar, cast

T = TypeVar("T")
P = ParamSpec("P")
F = TypeVar("F", bound=Callable[..., Any])
PREFIX = "fanfold: "


def named(record: logging.LogRecord) -> bool:
    """Prefix a warning with the library's name: without logging set up, Python prints only the message."""
    if record.levelno >= logging.WARNING and not str(record.msg).startswith(PREFIX):
        record.msg = PREFIX + str(record.msg)
    return True


logger = logging.getLogger("fanfold")
logger.addFilter(named)


class FanfoldError(Exception):
    """Base class of every error fanfold raises on purpose.

    Catch it to handle any of them.

    Example:
        ```python
        import fanfold

        try:
            fanfold.open("no-such-run")
        except fanfold.FanfoldError as error:
            print(error)
        ```
    """


class SettingError(FanfoldError, ValueError):
    """A setting or argument that cannot be understood.

    The message says what was expected; nothing was started. Also a ValueError.

    Example:
        ```python
        import fanfold

        try:
            fanfold.init("llm", durability="forever")
        except fanfold.SettingError as error:
            print(error)
        ```
    """


class RunError(FanfoldError):
    """A run that cannot be opened, joined or resumed.

    Raised when there is no run yet, when a name fits several runs, or when `resume` forbids it.

    Example:
        ```python
        import fanfold

        try:
            fanfold.init("llm", id="new", resume="must")
        except fanfold.RunError as error:
            print(error)
        ```
    """


class RunNotFound(RunError, LookupError):
    """No run with that id or path.

    `fanfold ls` lists the runs; FANFOLD_DIR names another place. Also a LookupError.

    Example:
        ```python
        import fanfold

        try:
            fanfold.open("no-such-run")
        except fanfold.RunNotFound as error:
            print(error)
        ```
    """


class MetricNotFound(FanfoldError, LookupError):
    """No metric of that name in a run, or not on that rank.

    The message lists the metrics or ranks there are. Also a LookupError.

    Example:
        ```python
        import fanfold.errors

        fanfold.init("llm").log({"loss": 0.5})
        try:
            fanfold.open("-").series("lost")
        except fanfold.errors.MetricNotFound as error:
            print(error)
        ```
    """


class Forbidden(FanfoldError):
    """Something a caller of a server may not see or do.

    Ask whoever runs the gateway for a token with that scope.
    """


class JournalError(FanfoldError):
    """A journal this version cannot read.

    It was written by a newer version, or is damaged: upgrade fanfold, or restore the file from a copy.
    """


class ValueRefused(FanfoldError, TypeError):
    """A value that cannot be logged, raised only under strict=True.

    Convert it to a number, a text or a media object first. Also a TypeError.

    Example:
        ```python
        import fanfold

        run = fanfold.init("llm", strict=True)
        try:
            run.log({"oops": object()})
        except fanfold.ValueRefused as error:
            print(error)
        ```
    """


class MissingExtra(FanfoldError, ImportError):
    """An optional library that is not installed.

    The message ends with the `pip install` line. Also an ImportError.

    Example:
        ```python
        import fanfold

        try:
            fanfold.init("llm", trackers=["mlflow"]).finish()
        except fanfold.MissingExtra as error:
            print(error)
        ```
    """


class Notices:
    """Warnings, logged once per cause, and a count of how often each happened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._lock = threading.RLock()  # re-entrant: a signal handler may warn

    def once(self, cause: str, message: str) -> bool:
        """Log `message` at WARNING the first time `cause` occurs; count every time."""
        with self._lock:
            self.counts[cause] += 1
            first = self.counts[cause] == 1
        if first:
            outcome(logger.warning, message)  # the user's log handlers and filters may raise
        return first

    def after_fork_in_child(self) -> None:
        """Replace the lock, which a forked child may have inherited locked."""
        self._lock = threading.RLock()


notices = Notices()


@contextlib.contextmanager
def guard(what: str, *, strict: bool = False) -> Iterator[None]:
    """Keep training alive: an exception inside is counted, logged as a warning once, and swallowed.

    With `strict` it is raised. `what` completes the sentence "could not …".
    """
    try:
        yield
    except Exception as error:
        if strict:
            raise
        notices.once(
            f"{what}:{type_name(error)}",
            f"could not {what}: {describe(error).rstrip('.')}. Training continues without it. "
            "Pass strict=True to fanfold.init to raise instead.",
        )
        logger.debug("could not %s", what, exc_info=True)


def verb(what: str, default: Callable[[], Any] = lambda: None) -> Callable[[F], F]:
    """Decorate a run's method so that it returns `default()` instead of raising into training, unless the run is strict.

    `what` completes the sentence "could not …".
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found, done = None, False
            with guard(what, strict=self.strict):
                found, done = method(self, *args, **kwargs), True
            return found if done else default()

        call.guarded = True  # type: ignore[attr-defined]
        return cast(F, call)

    return decorate


def outcome(action: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T | None, Exception | None]:
    """Call foreign code (a tracker library, for example) and return its result, or the exception it raised."""
    try:
        return action(*args, **kwargs), None
    except Exception as error:  # noqa: BLE001 - this module is where everything is caught
        return None, error


def reading(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call code of a value being read (its __str__, its items) and return the result, or the exception it raised.

    A value that raises SystemExit, or a subclass of KeyboardInterrupt, must not end the training either. Ctrl-C does, and so
    does anything raised by a signal handler.
    """
    try:
        return action(), None
    except Exception as error:  # noqa: BLE001 - this module is where everything is caught
        return None, error
    except (SystemExit, KeyboardInterrupt) as error:
        if type(error) is KeyboardInterrupt or _from_a_signal(error):
            raise
        return None, error


def _from_a_signal(error: BaseException) -> bool:
    """Return whether an error was raised by a Python signal handler."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {getattr(getattr(one, "__func__", one), "__code__", None) for one in handlers if callable(one)}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def describe(error: BaseException) -> str:
    """Return an error as one short text; never raise, whatever its own methods do."""
    text, _ = outcome(lambda: "".join(traceback.format_exception_only(type(error), error)).strip())
    return (text or "an error that cannot be shown")[:500]


def type_name(value: object) -> str:
    """Return the full name of a value's type; never raise."""
    name, _ = outcome(lambda: f"{type(value).__module__}.{type(value).__qualname__}"[:200])
    return name or "an unknown type"


def shown(value: object) -> str:
    """Return a short repr of a value for a message; never raise."""
    text, _ = outcome(lambda: "".join((reprlib.repr(value),)))
    text = text or f"<{type_name(value)}>"
    return text if len(text) <= 80 else text[:79] + "…"


def clean_text(text: str) -> str:
    """Return text that can be encoded as UTF-8: lone surrogates are escaped."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace").decode()
    return text


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the closest known name, if any, and all known ones."""
    import difflib

    names = list(known)
    near = difflib.get_close_matches(word, names, 1)
    return (f" Did you mean {near[0]}?" if near else "") + f" Known: {', '.join(names)}."


@contextlib.contextmanager
def needed(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Import optional libraries inside this; if one is not installed, the error names the extra that installs it."""
    try:
        yield
    except ImportError as error:
        raise missing_extra(package, extra, purpose) from error


def missing_extra(package: str, extra: str, purpose: str) -> MissingExtra:
    """Build the error for an optional library that is not installed."""
    return MissingExtra(f"{purpose} needs {package}, which is not installed. Run: pip install 'fanfold[{extra}]'")
