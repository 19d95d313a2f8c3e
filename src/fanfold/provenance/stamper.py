"""Who stamps what is saved now: the newest run that asked for it, unless a saver is at work on the parts of its own file."""

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

_thread = threading.local()  # busy: with the parts of a saver's own file; stamper: of the asynchronous save it was made for
active: list[Any] = []  # the runs that stamp


class Stamper:
    """What one save asks for: the stamp of a run as it was when the save began, however long that takes."""

    def __init__(self, run: Any) -> None:
        self.run, self.step = run, step_of(run)

    def text(self, inherited: bytes | None = None) -> bytes:
        """Return the stamp; one that the content carries already names what it was made from."""
        stamp = make(self.run, {}, parent=decode(inherited) if inherited else None)
        stamp["run"]["step"] = self.step
        return encode(stamp)

    def saved(self, path: Any) -> None:
        """List a file on the run, when it is one on a disk."""
        with guard("list a saved file on its run"):
            if isinstance(path, (str, os.PathLike)) and Path(path).exists():
                note(self.run, Path(path), self.step)

    def take_thread(self) -> None:
        """Stamp all that this thread saves from now on, also when the run has ended."""
        _thread.stamper = self


def current() -> Stamper | None:
    """Return the stamper for a save that begins now, if there is one."""
    if getattr(_thread, "busy", False):
        return None
    newest = active[-1:]  # one look: a run may end in another thread
    return getattr(_thread, "stamper", None) or (Stamper(newest[0]) if newest else None)


def quietly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a saver's inner saves pass unstamped: a sharded checkpoint calls torch.save for every tensor."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_thread, "busy", False)
        _thread.busy = True
        try:
            return original(*args, **kwargs)
        finally:
            _thread.busy = before

    return inner


def export_natively(by: Stamper | None) -> bool:
    """Let torch's own export hook write the stamp (None: nothing): it also reaches what C++ saves. False: no native library."""
    library = native.current()
    if library is None:
        return False
    text = b""
    try:
        text = by.text() if by is not None else b""
    finally:  # a stamp that cannot be made leaves none: the one before tells of an earlier moment
        done = bool(library.ff_export_file(NAME.encode() if text else b"", text, len(text)))
    return done
