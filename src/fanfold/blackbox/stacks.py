"""Stacks without the GIL: Python's faulthandler writes them to a file of the run, on a fatal signal or on one that we send.

A program that uses faulthandler itself keeps it: then only the signal that we send is ours.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..facts.mask import mask_text
from ..journal.files import open_regular, open_to_write
from .position import line_text

MAX_TEXT = 128 << 10
_FILE = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)")
_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
WORDS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}


class _Handler:
    """What this process gave to faulthandler, once: a descriptor that leads to the file of the current run, and a signal."""

    fd = -1
    signal = 0


def _register() -> None:
    if _Handler.fd >= 0:
        return
    _Handler.fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    _Handler.signal = _free_signal()
    if _Handler.signal:
        faulthandler.register(_Handler.signal, file=_Handler.fd, all_threads=True, chain=False)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=_Handler.fd, all_threads=True)


def _free_signal() -> int:
    """Return a signal that asks for stacks: a real-time one that nothing else uses; 0 if there is none."""
    return next((number for number in signals() if signal.getsignal(number) is signal.SIG_DFL), 0)


def signals() -> Sequence[int]:
    """Return the signals that may ask for stacks."""
    first = getattr(signal, "SIGRTMIN", None)
    return () if first is None else range(int(first) + 8, int(first) + 16)


class StackFile:
    """The file of a run that faulthandler writes to, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _register()
        self.signal = _Handler.signal
        self._point(open_to_write(path, os.O_TRUNC | os.O_APPEND))

    def _point(self, fd: int) -> None:
        os.dup2(fd, _Handler.fd, inheritable=False)
        os.close(fd)

    def close(self) -> None:
        """Let later stacks go nowhere, and remove the file if it is empty."""
        self._point(os.open(os.devnull, os.O_WRONLY))
        if self.path.exists() and self.path.stat().st_size == 0:
            self.path.unlink()


def text_of(path: Path, start: int = 0) -> str:
    """Return what was written to a stack file, masked and bounded."""
    try:
        with open_regular(path) as file:
            file.seek(start)
            return mask_text(file.read(MAX_TEXT).decode("utf-8", "replace"))
    except OSError:
        return ""


def fatal_signal(text: str) -> str:
    """Return the signal that ended a process according to its stack file; "" if none did."""
    found = _FATAL.search(text)
    return WORDS.get(found[1].strip(), found[1].strip()[:80]) if found else ""


def threads_in(text: str) -> list[dict[str, Any]]:
    """Return the threads in a stack file, with their frames, the innermost first."""
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            name = line.partition("[")[2].partition("]")[0] if "[" in line else ""
            current = line.startswith("Current")
            threads.append({"id": int(head[1], 16), "name": name, "frames": [], "current": current})
        elif threads and (spot := _FILE.match(line)):
            number, code = int(spot[2]), line_text(spot[1], int(spot[2]))
            threads[-1]["frames"].append({"file": spot[1], "line": number, "name": spot[3], "code": code})
    return threads
