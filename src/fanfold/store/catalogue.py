"""The catalogue: one row of facts per run in SQLite, so that a thousand runs list in a moment. Derived, deletable.

It lives in the user's cache folder, never beside the runs: SQLite's locks and network filesystems do not mix. A row
holds as long as the run's journals have the sizes it was made from.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import JournalError, RunError, notices
from ..journal import directory
from ..journal import format as fmt
from ..settings import cache_directory, find_directory
from .attempts import UNFINISHED
from .run import StoredRun, not_found

VERSION = 1
_SCHEMA = "CREATE TABLE IF NOT EXISTS runs (path TEXT PRIMARY KEY, signature TEXT NOT NULL, row BLOB NOT NULL) WITHOUT ROWID"


def _connect() -> sqlite3.Connection:
    """Open the catalogue; where that cannot be (no cache folder, a damaged file), work with one in memory."""
    folder = cache_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"catalogue-{VERSION}.db"
        connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute(_SCHEMA)
        except sqlite3.DatabaseError:
            connection.close()
            path.unlink(missing_ok=True)  # derived: made anew
            connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
            connection.execute(_SCHEMA)
    except (OSError, sqlite3.Error):
        connection = sqlite3.connect(":memory:", isolation_level=None)
        connection.execute(_SCHEMA)
    return connection


def signature(run: Path) -> str:
    """Return what a run's row depends on: the names and sizes of its journals."""
    parts = []
    with contextlib.suppress(OSError), os.scandir(run / "journal") as entries:
        parts = sorted(f"{e.name}:{e.stat(follow_symlinks=False).st_size}" for e in entries if e.name.endswith(fmt.SUFFIX))
    return "\n".join(parts)


def runs(
    project: str | None = None,
    *,
    dir: str | os.PathLike[str] | None = None,
    progress: Callable[[Iterable[Path], int], Iterable[Path]] | None = None,
) -> list[StoredRun]:
    """Return the stored runs, newest first: of one project, or of all."""
    root = find_directory(dir)
    folders = list(directory.run_directories(root, project))
    with contextlib.closing(_connect()) as connection:
        known = _known(connection, folders)
        found = [run for folder in (progress(folders, len(folders)) if progress else folders)
                 if (run := _entry(connection, folder, known.get(str(folder)))) is not None]  # fmt: skip
    return sorted(found, key=lambda run: run.started, reverse=True)


def _known(connection: sqlite3.Connection, folders: list[Path]) -> dict[str, tuple[str, bytes]]:
    if not folders:
        return {}
    roots = {str(folder.parent.parent) for folder in folders}
    rows: dict[str, tuple[str, bytes]] = {}
    for root in roots:
        query = "SELECT path, signature, row FROM runs WHERE path >= ? AND path < ?"
        rows.update({path: (sign, row) for path, sign, row in connection.execute(query, (root + "/", root + "0"))})
    return rows


def _entry(connection: sqlite3.Connection, folder: Path, known: tuple[str, bytes] | None) -> StoredRun | None:
    """Return a run from its row while that holds; else read the run and renew the row."""
    now = signature(folder)
    if not now:
        return None
    if known is not None and known[0] == now:
        row = fmt.unpack(known[1])
        if row["verdict"]["status"] not in ("running", "lost"):  # those two can change without a byte being written
            return StoredRun.from_row(folder, row)
    try:
        run = StoredRun(folder)
        row = run.row()
    except JournalError as error:  # of a newer format, say: the others are still listed
        notices.once(f"unreadable:{folder}", f"{folder} cannot be listed: {error}")
        return None
    except OSError:  # deleted while we looked
        return None
    with contextlib.suppress(sqlite3.Error):
        connection.execute("INSERT OR REPLACE INTO runs VALUES (?, ?, ?)", (str(folder), now, fmt.pack(row)))
    return StoredRun.from_row(folder, row)


def forget(folder: Path) -> None:
    """Drop a deleted run's row."""
    with contextlib.closing(_connect()) as connection, contextlib.suppress(sqlite3.Error):
        connection.execute("DELETE FROM runs WHERE path = ?", (str(folder),))


def open_run(path: Path) -> StoredRun:
    """Open the run in a directory."""
    if not (path / "journal").is_dir():
        raise not_found(str(path), path.parent)
    return StoredRun(path).refresh()


def open(
    id_or_path: str | os.PathLike[str], *, dir: str | os.PathLike[str] | None = None, project: str | None = None
) -> StoredRun:
    """Open one stored run by its id, the beginning of its id, its name, or its directory. `-` is the newest run."""
    if isinstance(id_or_path, os.PathLike) or _is_run(id_or_path):
        return open_run(Path(id_or_path))
    root = find_directory(dir)
    word = str(id_or_path)
    exact = [folder for folder in directory.run_directories(root, project) if directory.decode_name(folder.name) == word]
    if len(exact) == 1:
        return open_run(exact[0])
    matches = list(_matching(word, runs(project, dir=root)))
    if len(matches) > 1:
        names = ", ".join(f"{run.id} ({run.name}, {run.project})" for run in matches[:6])
        raise RunError(f"{word!r} names {len(matches)} runs: {names}. None was opened. Give more of the id, or --project.")
    if not matches:
        raise not_found(word, root)
    return open_run(matches[0].path)


def _is_run(word: str) -> bool:
    try:
        return (Path(word) / "journal").is_dir()
    except (OSError, ValueError):  # too long for a path, or with a NUL: a name, then
        return False


def _matching(word: str, found: list[StoredRun]) -> Iterator[StoredRun]:
    if word == "-":
        yield from found[:1]
        return
    named = [run for run in found if word in (run.id, run.name)]
    yield from named or [run for run in found if run.id.startswith(word)]


def find_unfinished(root: Path, project: str, *, name: str | None, ignore_attempt: str) -> str | None:
    """Return the id of the newest run that an earlier attempt left unfinished. Our own attempt does not count: ranks agree."""
    for run in runs(project, dir=root):
        row: dict[str, Any] = run.row()  # from the catalogue: no journal is opened
        earlier = [attempt for attempt in row["attempts"] if not attempt[0].startswith(ignore_attempt)]
        if earlier and earlier[-1][1] in UNFINISHED and name in (None, run.name):
            return run.id
    return None
