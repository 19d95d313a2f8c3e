"""Who may change a model file: one stamper at a time, in place where nobody looks at it, else anew beside itself."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ..errors import FanfoldError

WAIT_SECONDS = 300.0


@contextlib.contextmanager
def anew(path: Path) -> Iterator[BinaryIO]:
    """Yield the file that takes the place of `path` at the end; an error inside leaves `path` as it was, and nothing else."""
    import shutil

    aside = path.with_name(f".{path.name}.{os.getpid()}.stamping")
    aside.unlink(missing_ok=True)  # of a process of the same number that was killed
    try:
        # Private until it has the rights of the one it replaces: a model is not to be read by others for a moment either.
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        shutil.copymode(path, aside)
        owner = path.stat()
        with contextlib.suppress(OSError):  # another's file can be given back by root alone
            os.chown(aside, owner.st_uid, owner.st_gid)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[BinaryIO]:
    """Yield the open file to one process at a time: every rank of a job may call stamp() on the one that rank 0 saved."""
    until = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < until:
        with path.open("r+b", buffering=0) as file, _locked(file) as ours:
            # Else another is at it, or it was written anew since we opened it.
            if ours and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return
        time.sleep(0.01)  # with the file closed: see unshared()
    raise FanfoldError(
        f"{path} could not be stamped: another process has been stamping it for {WAIT_SECONDS:.0f} s. The file was left alone. "
        "Look whether that one hangs, then stamp again."
    )


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[bool]:
    """Yield whether we have the lock. It is given back by hand: a child forked meanwhile has the file open, too."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    except (ImportError, OSError):  # not POSIX, or a filesystem without locks
        yield True
        return
    try:
        yield True
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def unshared(file: BinaryIO) -> Iterator[bool]:
    """Yield whether nobody else on this machine has the file open or mapped; whoever opens it now waits until the end.

    A model loaded from a safetensors file is a view of that file: its weights are what stands there. So the weights' place may
    only change where there is no such model.
    """
    held = _leased(file)
    for _ in range(0 if held else 3):  # ranks that wait for their turn look in for a moment
        time.sleep(0.01)
        if held := _leased(file):
            break
    try:
        yield held
    finally:
        if held:
            import fcntl

            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _leased(file: BinaryIO) -> bool:
    try:
        import fcntl

        # Sent when another waits to open it. The usual signal, SIGIO, would end the process; this one is ignored.
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except (ImportError, AttributeError, OSError):  # not Linux, not ours, or others have it
        return False
    return True
