"""A command as a run: started, shown and recorded by a process around it, and ended with what became of it."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NamedTuple

from ..facts.mask import mask_argv
from .lifecycle import SIGNALS
from .options import RunOptions
from .probes import write_row
from .run import Run
from .start import start_around
from .wrapped import VARIABLE, Wrapped

# Passed on to the command. A terminal sends SIGINT and SIGQUIT to it directly.
PASSED_ON = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGCONT")
FROM_TERMINAL = ("SIGINT", "SIGQUIT")
CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSYS", "SIGTRAP")
_PR_SET_PDEATHSIG = 1
_GB = 1e9
_OPTION = re.compile(r"[-+~]*[A-Za-z_][\w./-]*")  # before =, as in --lr=0.1 and model.dim=64


class Outcome(NamedTuple):
    """How a command ended; `code` is negative for a signal, as in subprocess."""

    code: int
    status: str
    error: str | None
    signal: str | None
    used: dict[str, float] = {}  # noqa: RUF012 - never changed


def config_of(words: Sequence[str]) -> dict[str, Any]:
    """Return a command line as a config: the whole command, and its options by name, without secrets."""
    masked = mask_argv(list(words))
    options: dict[str, Any] = {}
    rest = [*masked[1:], "--"]
    for word, after in itertools.pairwise(rest):
        name, equals, text = word.partition("=")
        if equals and _OPTION.fullmatch(name):
            options[name.lstrip("-+~")] = _value(text)
        elif word.startswith("--") and len(word) > 2:
            options[word[2:]] = True if after.startswith("-") and not _is_number(after) else _value(after)
    return {"command": shlex.join(masked), **({"args": options} if options else {})}


def _value(text: str) -> Any:
    if not _is_number(text):
        return {"true": True, "false": False}.get(text.lower(), text)
    return int(text) if text.lstrip("+-").isdecimal() else float(text)


def _is_number(text: str) -> bool:
    with suppress(ValueError):
        return math.isfinite(float(text)) and not text.startswith("0_")
    return False


def record(words: Sequence[str], options: RunOptions) -> tuple[Run, Outcome]:
    """Run a command inside a new run; return the run, which has ended, and how the command ended."""
    os.environ.pop(VARIABLE, None)  # inside another `fanfold exec`, this is a run of its own
    run, parts = start_around(words, options)
    around = Wrapped(str(options.root), run.project, run.id, parts.member.attempt)
    began = time.monotonic()
    ended = outcome(execute(words, {VARIABLE: around.text(), "FANFOLD_DIR": around.root}))
    ended = ended._replace(used=_used(time.monotonic() - began))
    write_row(parts.writer, ended.used, None, "system")
    parts.ending.finish(30.0, ended.status, ended.error, max(ended.code, 0) or None, ended.signal)
    return run, ended


def execute(words: Sequence[str], variables: dict[str, str]) -> int:
    """Run a command with our streams and signals; return its exit code, negative for a signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _passed_on())  # until there is a command to pass them on to
    try:
        prepare = _prepared(before)
        child = subprocess.Popen(list(words), env={**os.environ, **variables}, preexec_fn=prepare)  # noqa: PLW1509 - see there
        with _passing_on(child.pid):
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            return child.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _prepared(mask: set[int | signal.Signals]) -> Callable[[], object]:
    """Return what the command does first: let signals in, and (on Linux) end when this process is killed.

    Nobody would record how it goes on.
    """
    control = ctypes.CDLL(None).prctl if sys.platform.startswith("linux") else None  # loaded before the fork

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if control:
            control(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return prepare


def _passed_on() -> list[signal.Signals]:
    return [getattr(signal, name) for name in PASSED_ON]


@contextmanager
def _passing_on(pid: int) -> Iterator[None]:
    """Send the signals that this process gets to the command instead."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if signal.Signals(number).name not in FROM_TERMINAL or not _in_foreground():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    before = {number: signal.signal(number, pass_on) for number in _passed_on()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Return whether we are in front of a terminal, which sends its signals to the command as well."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


def outcome(code: int) -> Outcome:
    """Return what an exit code means for the run."""
    if code == 0:
        return Outcome(code, "finished", None, None)
    if code > 0:
        inner = f" ({signal.Signals(code - 128).name} in a program that a shell ran)" if _is_signal(code - 128) else ""
        return Outcome(code, "failed", f"the command ended with exit code {code}{inner}", None)
    name = signal.Signals(-code).name if _is_signal(-code) else f"signal {-code}"
    if name in CRASHES:
        return Outcome(code, "failed", f"the command crashed: {name}", name)
    return Outcome(code, SIGNALS.get(name, "killed"), f"the command was ended by {name}", name)


def _is_signal(number: int) -> bool:
    return number in set(signal.Signals)


def _used(seconds: float) -> dict[str, float]:
    """Return the time and the resources of the command and everything it started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    unit = 1.0 if sys.platform == "darwin" else 1024.0  # of ru_maxrss
    return {
        "system/command/seconds": seconds,
        "system/command/cpu_seconds": used.ru_utime + used.ru_stime,
        "system/command/max_rss_gb": used.ru_maxrss * unit / _GB,
    }


def leave_like(code: int) -> int:
    """Return a command's exit code; if a signal ended it, end this process by the same one."""
    if code >= 0:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # the command left its own
    with suppress(OSError, ValueError):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code
