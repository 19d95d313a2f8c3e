"""Where things of a run lie on disk, and which runs there are. Names are percent-encoded, so no name can leave its folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, unquote

from ..errors import JournalError, RunError
from . import bodies, packed
from . import format as fmt
from .bodies import Header
from .files import is_folder
from .format import HEAD_SIZE, PACKED, SUFFIX, Kind, Layout
from .walker import Record, Walker, all_spans

_TAIL = 1 << 18
MAX_HEADER = 1 << 20
MAX_NAME = 200
FOLDERS = ("journal", "blobs", "relay", "forward", "ops", "trackers", "probes")  # that a run has of its own


@lru_cache(maxsize=1 << 12)
def encode_name(name: str) -> str:
    """Return a name as one path component: safe on every filesystem, and never `.`, `..` or hidden."""
    text = (
        quote(name, safe=" ()+,-=@[]_~", errors="backslashreplace").replace(".", "%2E")
        if name.startswith(".")
        else quote(name, safe=" ()+,-.=@[]_~", errors="backslashreplace")
    )
    if len(text) > MAX_NAME:
        from ..process import digest

        text = f"{text[:MAX_NAME].rstrip('%')}~{digest(name)}"
    return text or "%"


def decode_name(component: str) -> str:
    return unquote(component, errors="replace")


def run_path(root: Path, project: str, run_id: str) -> Path:
    return _path(f"{root}/{encode_name(project)}/{encode_name(run_id)}")


def journal_files(run: Path, *, strict: bool = False) -> list[Path]:
    """Return a run's journals, packed ones too; of one that is there twice, as its process wrote it. Links are not followed.

    A folder that cannot be read has none, unless `strict`: then it raises. One that is a link has none either.
    """
    if is_link(run / "journal"):
        return []
    try:
        with os.scandir(run / "journal") as entries:
            names = [entry.path for entry in entries
                     if entry.name.endswith((SUFFIX, PACKED)) and entry.is_file(follow_symlinks=False)]  # fmt: skip
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        if strict:
            raise
        return []
    # Reversed, the packed one comes first and gives way.
    found = {name[: -len(SUFFIX)]: Path(name) for name in sorted(names, reverse=True)}
    return sorted(found.values())


def run_directories(root: Path, project: str | None = None) -> Iterator[Path]:
    """Yield the directories of all runs below `root`, of one project or of all."""
    return (run for run in run_folders(root, project) if is_run(run))


def is_run(path: Path) -> bool:
    """Tell whether a directory is a run: it holds a folder of journals, and not a link to one elsewhere."""
    return is_folder(f"{path}/journal")


def check_folders(run: Path) -> None:
    """Raise RunError where one of a run's own folders is a link: what is written for the run would end up elsewhere."""
    for name in FOLDERS:
        if is_link(run / name):
            raise RunError(
                f"{run / name} is a link, and a run's own folders never are. Nothing was read or written through it. "
                "Remove the link, or copy what it points to."
            )


def run_folders(root: Path, project: str | None = None, *, failed: dict[Path, str] | None = None) -> Iterator[Path]:
    """Yield the directories that stand where runs do; whoever looks into each anyway need not ask whether it is one.

    `root` may be a link; nothing below it is followed, a project that is asked for by name included.
    `failed` is given the folders that cannot be read, and why.
    """
    projects = (
        _folders(root, failed) if project is None else [path for path in [root / encode_name(project)] if not is_link(path)]
    )
    return (run for folder in projects for run in _folders(folder, failed))


def is_link(path: Path) -> bool:
    """Tell whether a folder is a link; one that cannot be looked at counts as none, and fails where it is read."""
    return os.path.islink(path)  # noqa: PTH114 - by the hundred


def _folders(path: Path, failed: dict[Path, str] | None) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            found = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if failed is not None:
            failed[path] = str(error.strerror)
        return []
    return [_path(name) for name in sorted(found)]


@lru_cache(maxsize=1 << 17)
def _path(name: str) -> Path:
    """Return the same object for the same name: taking names apart costs more than looking at the files, by the thousand."""
    return Path(name)


def read_header(path: Path) -> Header | None:
    """Read a journal's first frame alone; None if it is not whole yet, or damaged."""
    try:
        with packed.opened(path) as file:
            head = file.read(HEAD_SIZE)
            length = int.from_bytes(head[4:8], "little")
            if len(head) < HEAD_SIZE or length > MAX_HEADER:
                return None
            data = head + file.read(length)
            first = next(iter(Walker(fmt.check_id(path.stem.rpartition("-")[2])).read(data, len(data))), None)
    except (OSError, JournalError):
        return None
    return first.data if isinstance(first, Record) and isinstance(first.data, Header) else None


def last_step(path: Path) -> int | None:
    """Return the highest step near the end of a journal, from its tail alone; of a tail without steps, from a longer one."""
    try:
        seed = fmt.seed_of(fmt.check_id(path.stem.rpartition("-")[2]))
        with packed.opened(path) as file:
            size = file.seek(0, os.SEEK_END)
            length = _TAIL
            while True:
                file.seek(max(0, size - length))
                steps = list(_steps_in(file.read(), seed))
                if steps or length >= size:
                    return max(steps, default=None)
                length *= 16
    except (OSError, JournalError):
        return None


def _steps_in(data: bytes, seed: int) -> Iterator[int]:
    """Yield the steps of the sound frames in a stretch of a journal; rows tell theirs without their shape."""
    for span in all_spans(data, seed):
        if span.kind == Kind.ROW and not span.flags & Layout.STEP_NONE:
            width = 8 if span.flags & Layout.STEP_WIDE else 4
            for at in range(span.at + HEAD_SIZE + 12, span.end, span.stride) if span.stride >= HEAD_SIZE + 12 + width else ():
                yield int.from_bytes(data[at : at + width], "little", signed=True)
        elif span.kind == Kind.VALUES:
            with contextlib.suppress(JournalError):
                found = bodies.decode(span.kind, memoryview(data)[span.at + HEAD_SIZE : span.end])
                if isinstance(found, bodies.Values):
                    yield found.s
