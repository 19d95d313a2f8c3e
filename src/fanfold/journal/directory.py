"""The layout of runs on disk, and how to list them. Names are percent-encoded, so that none can escape its folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

from ..errors import JournalError, RunError
from ..settings import stranger
from . import format as fmt
from .files import create, is_folder
from .format import HEAD_SIZE, PACKED, SUFFIX, Kind, Layout

if TYPE_CHECKING:
    from .bodies import Header

_TAIL = 1 << 18
MAX_HEADER = 1 << 20
MAX_NAME = 200
REQUESTS = "requests"
REPORTS = "reports"  # in a run: the runs in which reporting callbacks keep what they send, in folders of projects
# The folders a run may have.
FOLDERS = ("journal", "blobs", "relay", "forward", "ops", "trackers", "probes", "blackbox", "agreement", REQUESTS)


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


def project_of(run: Path, first: str | None) -> str:
    """Return the project whose folder a run is in; `first` is the one it began in, whose name may be too long for a folder."""
    folder = run.parent.name
    return first if first and encode_name(first) == folder else decode_name(folder)


def decode_name(component: str) -> str:
    return unquote(component, errors="replace")


def run_path(root: Path, project: str, run_id: str) -> Path:
    return _path(f"{root}/{encode_name(project)}/{encode_name(run_id)}")


def journal_files(run: Path, *, strict: bool = False) -> list[Path]:
    """Return a run's journals, including packed ones; if both exist, the unpacked one. Links are not followed.

    A folder that cannot be read counts as empty unless `strict`, which raises. A folder that is a link counts as empty.
    """
    folder = f"{run}/journal"
    if is_link(folder):
        return []
    try:
        with os.scandir(folder) as entries:
            names = [entry.path for entry in entries
                     if entry.name.endswith((SUFFIX, PACKED)) and entry.is_file(follow_symlinks=False)]  # fmt: skip
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError:
        if strict:
            raise
        return []
    # In reverse order the packed file comes first, and is then replaced by the unpacked one.
    found = {name[: -len(SUFFIX)]: Path(name) for name in sorted(names, reverse=True)}
    return sorted(found.values())


def run_directories(root: Path, project: str | None = None) -> Iterator[Path]:
    """Yield the directories of all runs below `root`, of one project or of all projects."""
    return (run for run in run_folders(root, project) if is_run(run))


def is_run(path: Path) -> bool:
    """Return whether a directory is a run: it contains a folder of journals, not a link to one."""
    return is_folder(f"{path}/journal")


def check_folders(run: Path) -> None:
    """Raise RunError if one of a run's own folders is a link: files written for the run would end up elsewhere."""
    for name in FOLDERS:
        if is_link(run / name):
            raise RunError(
                f"{run / name} is a link, and a run's own folders never are. Nothing was read or written through it. "
                "Remove the link, or copy what it points to."
            )


def check_place(run: Path) -> None:
    """Raise RunError if a run to be written, or its project, is a link: readers follow none, and it may lead anywhere."""
    for path in (run.parent, run):
        if is_link(path):
            raise RunError(
                f"{path} is a link, and links below a directory of runs are not followed. The run was not started. Remove the "
                "link, or name the directory it leads to with fanfold.init(dir=…) or FANFOLD_DIR."
            )


def make_root(root: Path) -> None:
    """Create the private directory of all runs, unless there is one; others may be doing the same, or put a link into it."""
    if not root.exists():
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileExistsError), create(root / ".gitignore") as file:
            file.write(b"*\n")  # runs do not belong in a repository


def make_run(path: Path) -> None:
    """Create a private directory for a run, and its project's, in which strangers can replace no run, whatever the umask."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o775)
    path.mkdir(exist_ok=True, mode=0o700)
    root = path.parent.parent
    if owner := stranger_of(path, root):
        raise RunError(
            f"the run {path} belongs to another user ({owner}), who would decide with which config and at which step it "
            "continues. The run was not started. Choose another id or project, or set "
            f"FANFOLD_SAFE_DIRECTORY={root} if you trust all users."
        )


def stranger_of(run: Path, root: Path) -> str:
    """Return the other user that a run belongs to, if any: see `settings.stranger`.

    Some network filesystems give what root or anybody creates to one user; there, what looks like ours is ours.
    """
    owner = stranger(run, root)
    if owner:
        probe = root / f".{os.getpid()}-{os.urandom(4).hex()}"
        with contextlib.suppress(OSError):
            probe.mkdir(mode=0o700)
            try:
                return "" if probe.stat().st_uid == run.lstat().st_uid else owner
            finally:
                probe.rmdir()
    return owner


def run_folders(root: Path, project: str | None = None, *, failed: dict[Path, str] | None = None) -> Iterator[Path]:
    """Yield the directories at run level, without checking that each is a run; callers that open each find out anyway.

    `root` may be a link; links below it are not followed, not even a project given by name.
    `failed` receives the folders that cannot be read, and why.
    """
    projects = (
        _folders(root, failed) if project is None else [path for path in [root / encode_name(project)] if not is_link(path)]
    )
    return (run for folder in projects for run in _folders(folder, failed))


def same_id(root: Path, run_id: str) -> list[Path]:
    """Return the folders of runs with an id, in any project."""
    name = encode_name(run_id)
    return [path for folder in _folders(root, None) if is_folder(path := _path(f"{folder}/{name}"))]


def is_link(path: Path | str) -> bool:
    """Return whether a folder is a link; one that cannot be examined counts as none, and fails when it is read."""
    return os.path.islink(path)  # noqa: PTH114 - called hundreds of times


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
    """Return the same object for the same name: with thousands of runs, parsing paths costs more than reading the files."""
    return Path(name)


def read_header(path: Path) -> Header | None:
    """Read only a journal's first frame; None if it is incomplete or damaged."""
    from . import packed
    from .bodies import Header
    from .walker import Record, Walker

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
    """Return the highest step near the end of a journal, reading a longer tail only if the first one contains no step."""
    from . import packed

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
    """Yield the steps of the valid frames in part of a journal; a row's step can be read without its shape."""
    from . import bodies
    from .walker import all_spans

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
