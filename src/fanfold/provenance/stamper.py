"""The stamper of the current save: the newest active run, except for inner saves, which write parts of a saver's own file."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import guard
from ..probes.native import library as native
from .record import NAME, decode, encode, make, step_of
from .write import note

_thread = threading.local()  # busy: in an inner save; stamper: of the asynchronous save the thread was created for
active: list[Any] = []  # the runs that stamp


class Stamper:
    """The stamp for one save: describes the run as it was when the save began, however long it takes."""

    def __init__(self, run: Any) -> None:
        self.run, self.step = run, step_of(run)

    def text(self, inherited: bytes | None = None) -> bytes:
        """Return the stamp; `inherited`, a stamp already in the content, becomes its parent."""
        stamp = make(self.run, {}, parent=decode(inherited) if inherited else None)
        stamp["run"]["step"] = self.step
        return encode(stamp)

    def saved(self, path: Any) -> None:
        """List a saved file on the run, if it is on disk."""
        with guard("list a saved file on its run"):
            if isinstance(path, (str, os.PathLike)) and Path(path).exists():
                note(self.run, Path(path), self.step)

    def take_thread(self) -> None:
        """Stamp everything this thread saves from now on, even after the run has ended."""
        _thread.stamper = self


def current() -> Stamper | None:
    """Return the stamper for a save that starts now, if any."""
    if getattr(_thread, "busy", False):
        return None
    newest = active[-1:]  # a slice, read once: a run may end in another thread
    return getattr(_thread, "stamper", None) or (Stamper(newest[0]) if newest else None)


def quietly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a saver so that its inner saves are not stamped: a sharded checkpoint calls torch.save for every tensor."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_thread, "busy", False)
        _thread.busy = True
        try:
            return original(*args, **kwargs)
        finally:
            _thread.busy = before

    return inner


def export_natively(by: Stamper | None) -> bool:
    """Set the stamp that torch's export hook writes (None: none), also for files saved by C++; return whether that worked."""
    library = native.current()
    if library is None:
        return False
    text = b""
    try:
        text = by.text() if by is not None else b""
    finally:  # if making the stamp fails, export none: the previous one is outdated
        done = bool(library.ff_export_file(NAME.encode() if text else b"", text, len(text)))
    return done
