"""The pulse of a rank: a small file that its process rewrites every second, and the node's watcher reads."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ..journal.files import open_regular, open_to_write

FOLDER = "blackbox"
PREFIX, SUFFIX = "pulse-", ".json"
MAX_BYTES = 64 << 10
MAX_PULSES = 4096


class Spot(Struct):
    """One line of one Python frame."""

    file: str = ""
    line: int = 0
    name: str = ""
    code: str = ""


class Collective(Struct):
    """A collective that a rank has started and not finished, or one of its last ones."""

    group: str = ""
    group_name: str = ""
    name: str = ""
    seq: int = 0
    p2p: bool = False
    sizes: list[list[int]] = []
    dtypes: list[str] = []
    state: str = ""
    since: float = 0.0
    members: list[int] = []  # the ranks of its group; none: all of them, or unknown


class Pulse(Struct, kw_only=True):
    """What a rank is doing. Times are seconds since 1970; 0: not so."""

    rank: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
    world: Annotated[int, Meta(ge=1)] = 1
    node: str = ""
    boot: str = ""
    attempt: str = ""
    pid: int = 0
    born: str = ""  # when the process began: a pid may be given to another one
    process: str = ""
    time: float = 0.0
    step: int = -1
    usual: float = 0.0  # seconds that a step usually takes
    same_since: float = 0.0  # the training thread has been on the same line
    idle_since: float = 0.0  # and its process has used no CPU and read or written nothing
    busy: str = ""  # an activity that may take long: saving, compiling, …
    where: list[Spot] = []
    waiting: list[Collective] = []
    enqueued: dict[str, int] = {}
    thread: int = 0  # the training thread
    signal: int = 0  # makes the process write its stacks; 0: it cannot
    stacks: str = ""  # the file it writes them to
    ended: bool = False


_decoder = msgspec.json.Decoder(Pulse)


def file_of(folder: Path, rank: int, process: str) -> Path:
    return folder / f"{PREFIX}{rank}-{process}{SUFFIX}"


class PulseFile:
    """The file of one process. It is overwritten in place: a reader that meets half a pulse tries again a second later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_to_write(path)

    def write(self, pulse: Pulse) -> None:
        data = msgspec.json.encode(pulse)[:MAX_BYTES]
        os.pwrite(self._fd, data, 0)
        os.ftruncate(self._fd, len(data))

    def close(self, *, remove: bool) -> None:
        os.close(self._fd)
        if remove:
            with contextlib.suppress(OSError):
                self.path.unlink()


def read(path: Path) -> Pulse | None:
    """Return the pulse in a file; None if there is none, or not a whole one."""
    try:
        with open_regular(path) as file:
            return _decoder.decode(file.read(MAX_BYTES))
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def read_all(folder: Path) -> dict[str, Pulse]:
    """Return the pulses in a run, by file name."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.name.startswith(PREFIX))
    except OSError:
        return {}
    found = ((name, read(folder / name)) for name in names[:MAX_PULSES] if name.endswith(SUFFIX))
    return {name: pulse for name, pulse in found if pulse is not None}


def as_data(pulse: Pulse) -> dict[str, Any]:
    """Return a pulse as plain data, for an event."""
    found: dict[str, Any] = msgspec.to_builtins(pulse)
    return found
