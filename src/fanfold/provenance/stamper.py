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

_inside = threading.local()  # a saver that calls another one stamps its own file, not the parts


class Stamper:
    """The stamps of one run: what the hooks ask for."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def text(self, inherited: bytes | None = None) -> bytes:
        """Return the stamp of a file that is being saved now; one its content carries already names what it was made from."""
        return encode(make(self.run, {}, parent=decode(inherited) if inherited else None))

    def saved(self, path: Any) -> None:
        """List a file on the run, when it is one on a disk."""
        with guard("list a saved file on its run"):
            if isinstance(path, (str, os.PathLike)) and Path(path).exists():
                note(self.run, Path(path), step_of(self.run))


active: list[Stamper] = []


def current() -> Stamper | None:
    """Return the stamper for a file that is saved now, if there is one."""
    newest = active[-1:]  # one look: a run may end in another thread
    return newest[0] if newest and not getattr(_inside, "busy", False) else None


def quietly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a saver's inner saves pass unstamped: a sharded checkpoint calls torch.save for every tensor."""

    def inner(*args: Any, **kwargs: Any) -> Any:
        before = getattr(_inside, "busy", False)
        _inside.busy = True
        try:
            return original(*args, **kwargs)
        finally:
            _inside.busy = before

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
