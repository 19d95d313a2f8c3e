"""The run around a command: how `fanfold exec` tells programs inside about it, and which of them records into the same run.

The first program inside that calls init() does, with all of its ranks; further ones have runs of their own.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from ..journal.directory import run_path
from ..journal.files import read_text

VARIABLE = "FANFOLD_EXEC"
CLAIM = "exec-"  # then the attempt: the file in the run's folder that names the program that joined it
_CLAIM_SECONDS = 1.0


class Wrapped(NamedTuple):
    """The run around a command: where it is, and its attempt."""

    root: str
    project: str
    run: str
    attempt: str

    def text(self) -> str:
        """Return the value of the variable that programs inside get."""
        import json

        return json.dumps(self._asdict())

    @property
    def path(self) -> Path:
        return run_path(Path(self.root), self.project, self.run)


def around() -> Wrapped | None:
    """Return the run around this process, if there is one."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    import json

    with contextlib.suppress(ValueError, TypeError):
        found = json.loads(text)
        if isinstance(found, dict) and all(isinstance(word, str) for word in found.values()):
            return Wrapped(**found)
    return None


def claimed(root: Path, key: str) -> Wrapped | None:
    """Return the run around this process if the program that `key` stands for may record into it.

    A program that writes to another directory never does.
    """
    run = around()
    if run is None or Path(run.root) != root:
        return None
    with contextlib.suppress(OSError):
        return run if _holder(run.path / f"{CLAIM}{run.attempt}", key) == key else None
    return None


def _holder(claim: Path, key: str) -> str:
    """Write a key into a file that does not exist yet; return the key that is in it."""
    try:
        with os.fdopen(os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
            file.write(key)
    except FileExistsError:
        return _read(claim)
    return key


def _read(claim: Path) -> str:
    """Read a key that another rank may be writing at this moment."""
    deadline = time.monotonic() + _CLAIM_SECONDS
    while not (found := read_text(claim)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found
