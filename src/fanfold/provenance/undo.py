"""A file that is changed in place has a note beside it meanwhile: after a kill, an error or Ctrl-C it comes back as it was."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ..errors import FanfoldError, notices
from .anew import anew
from .look import lies, undo_note

CHUNK = 1 << 20
MAX_NOTE = 128 << 20
_INSERT_RANGE, _COLLAPSE_RANGE = 0x20, 0x08
_ABOUT = "fanfold was writing a stamp into the file beside this note and was stopped. fanfold.stamp(path) puts both right."
_SETTLED = 60  # seconds after which a file that nobody synced is on the disk


class Note(msgspec.Struct, kw_only=True):
    """What the file was, and what is done to it. Its beginning follows, without the spaces at its end."""

    size: int
    start: int  # bytes of its beginning
    inserted: int = 0  # bytes put in front of it
    carried: int = 0  # bytes behind the beginning that are copied to the end of the file
    about: str = _ABOUT


@contextlib.contextmanager
def noted(path: Path, fd: int, note: Note) -> Iterator[Callable[[], None]]:
    """Keep a note of the file's beginning while it is changed; yield what to call between two changes that may not trade places.

    A file that is long on the disk stays safe there, so each change waits for the one before. One that was saved just now is not
    on the disk yet, and whoever saved it did not wait either.
    """
    lasting = bool(note.inserted) or time.time() - os.fstat(fd).st_mtime > _SETTLED
    _write(path, msgspec.json.encode(note) + b"\n" + os.pread(fd, note.start, 0).rstrip(b" "), lasting=lasting)

    def settle() -> None:
        if lasting:
            os.fsync(fd)

    done = False
    try:
        yield settle
        settle()
        done = True
    finally:
        if not done:  # an error, a full disk, Ctrl-C
            _undo(path, fd)
        undo_note(path).unlink()


def _write(path: Path, data: bytes, *, lasting: bool) -> None:
    """Write a note, whole or not at all."""
    aside = _aside(path)
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        aside.replace(undo_note(path))
        if lasting:
            _sync_folder(path.parent)
    finally:
        aside.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.undo")  # one name: whoever stamps is alone


def sweep(path: Path) -> None:
    """Take away the note that a kill kept from being finished: the file was not changed yet. For who is alone with the file."""
    if lies(_aside(path)):
        _aside(path).unlink(missing_ok=True)


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def mend(path: Path, whole: Callable[[Path], bool]) -> None:
    """Put a file right that a kill left half changed; a note beside one that is whole, or was saved anew, is only taken away."""
    if not whole(path):
        with path.open("r+b", buffering=0) as file:
            _undo(path, file.fileno())
        if not whole(path):
            raise _lost(path, "what it brings back cannot be read either")
        notices.once(
            f"mended:{path}",
            f"an earlier stamp of {path} was cut short by a kill. The file was put right: it is as it was before.",
        )
    undo_note(path).unlink(missing_ok=True)


def _undo(path: Path, fd: int) -> None:
    """Bring back what the note tells of. A kill in the middle of this can be mended, too: each step may be done twice."""
    note, head = _read(path)
    size = os.fstat(fd).st_size
    if not note.size <= size <= note.size + note.carried and not (note.inserted and size == note.size + note.inserted):
        raise _lost(path, f"the file has {size} bytes, which no stamp leaves of the {note.size} it had")
    if note.carried and size == note.size + note.carried:  # else the copy was not complete, and the original is untouched
        copy(fd, note.size, note.start, note.carried)
    if note.inserted and size > note.size and not move(fd, -note.inserted):  # moved to another filesystem since, perhaps
        _rebuild(path, fd, head, note)
        return
    put(fd, head, 0)
    os.ftruncate(fd, note.size)
    os.fsync(fd)


def _read(path: Path) -> tuple[Note, bytes]:
    """Return a note, and the beginning it holds as long as it was."""
    try:
        if undo_note(path).stat().st_size > MAX_NOTE:
            raise _lost(path, "it is too long")
        told, _, head = undo_note(path).read_bytes().partition(b"\n")
        note = msgspec.json.decode(told, type=Note)
    except (OSError, msgspec.MsgspecError) as error:
        raise _lost(path, str(error)) from error
    if not len(head) <= note.start <= min(note.size, MAX_NOTE) or min(note.carried, note.inserted) < 0:
        raise _lost(path, "its figures do not fit each other")
    return note, head.ljust(note.start)


def _lost(path: Path, why: str) -> FanfoldError:
    return FanfoldError(
        f"{path} cannot be put right by the note {undo_note(path).name}: {why}. Nothing more was changed. "
        "Save the model again and delete the note."
    )


def _rebuild(path: Path, fd: int, head: bytes, note: Note) -> None:
    """Write a file anew without the block that was put in front of it."""
    with anew(path) as target:
        target.write(head)
        at = note.inserted + note.start
        while part := os.pread(fd, CHUNK, at):
            target.write(part)
            at += len(part)


def put(fd: int, data: bytes, at: int) -> None:
    """Write all of the data, or raise: a full disk takes a part of it."""
    left = memoryview(data)
    while left:
        count = os.pwrite(fd, left, at)
        left, at = left[count:], at + count


def copy(fd: int, source: int, target: int, count: int) -> None:
    """Copy bytes within a file, from the first on: the file has its new size only when all are there."""
    for at in range(0, count, CHUNK):
        put(fd, os.pread(fd, min(CHUNK, count - at), source + at), target + at)


def move(fd: int, count: int) -> bool:
    """Put bytes in front of a file without touching the others, or take some away; False where the filesystem cannot."""
    import ctypes  # here, since reading does without

    how = _INSERT_RANGE if count > 0 else _COLLAPSE_RANGE
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return bool(libc.fallocate(fd, how, ctypes.c_long(0), ctypes.c_long(abs(count))) == 0)
    except (OSError, AttributeError):  # not Linux
        return False
