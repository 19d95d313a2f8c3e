"""The catalogue: one row of facts per run in SQLite, so that a thousand runs are listed instantly. Derived, deletable.

It is in the user's cache folder, never beside the runs, because SQLite's locks fail on network filesystems. A row is valid as
long as the run's journals have the sizes it was built from.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import msgspec

from ..errors import FanfoldError, RunError, outcome
from ..journal import directory, packed
from ..journal import format as fmt
from ..settings import cache_directory
from . import deadline, forks
from .rows import LIVE, RunRow
from .run import Runs, StoredRun

VERSION = 5  # part of the file name; a change that breaks older readers starts a new file
SETTLED_SECONDS = 60.0
_UNUSABLE = (sqlite3.Error, UnicodeDecodeError)  # the latter if sqlite reports damage with bytes that are not UTF-8
MOST_OPEN = 16_384  # journals at once: each is mapped, and Linux allows a process about 65,000 maps
_rows, _statistics = msgspec.msgpack.Decoder(RunRow), msgspec.msgpack.Decoder(dict[str, Any])
Progress = Callable[[Iterable[Any], int], Iterable[Any]]  # shows the progress of a listing
_TOGETHER = 256  # rows written in one transaction
_Kept = TypeVar("_Kept")


# Created where they are missing. They only ever get more columns and tables, so that an older fanfold can share the file.
_TABLES = {
    "runs": "path TEXT PRIMARY KEY, signature TEXT NOT NULL, row BLOB NOT NULL, seen REAL NOT NULL",
    "stats": "path TEXT, key TEXT, signature TEXT NOT NULL, row BLOB NOT NULL, PRIMARY KEY (path, key)",
}


def _with_tables(connection: sqlite3.Connection) -> sqlite3.Connection:
    for name, columns in _TABLES.items():
        connection.execute(f"CREATE TABLE IF NOT EXISTS {name} ({columns}) WITHOUT ROWID")
    return connection


def _file() -> Path:
    return cache_directory() / f"catalogue-{VERSION}.db"


def _connect() -> sqlite3.Connection:
    """Open the catalogue, or one in memory if that fails (no cache folder, a damaged file)."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            return _opened(path)
        except sqlite3.OperationalError:
            raise  # locked, or the disk is full: no reason to delete it
        except _UNUSABLE:
            _discard()
            return _opened(path)
    except (OSError, *_UNUSABLE):
        return _with_tables(sqlite3.connect(":memory:", isolation_level=None))


def _discard() -> None:
    """Delete a damaged catalogue. All of it is derived and rebuilt from the journals."""
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            Path(f"{_file()}{suffix}").unlink()


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=OFF")
        return _with_tables(connection)
    except _UNUSABLE:
        connection.close()
        raise


class _Session:
    """One reader's use of the catalogue. New rows are written many at a time: a transaction costs more than a row."""

    def __init__(self) -> None:
        self.connection = _connect()
        self._new: list[tuple[Any, ...]] = []

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        self.connection.close()

    def keep(self, folder: Path, signature: str, row: RunRow) -> None:
        """Write a run's row, sooner or later."""
        self._new.append((str(folder), signature, _sealed(row, str(folder), signature), row.seen))
        if len(self._new) >= _TOGETHER:
            self._write()

    def _write(self) -> None:
        new, self._new = self._new, []
        if not new:
            return
        with contextlib.suppress(*_UNUSABLE):
            self.connection.execute("BEGIN IMMEDIATE")
            with self.connection:  # commits, or rolls back
                query = "INSERT OR REPLACE INTO runs (path, signature, row, seen) VALUES (?, ?, ?, ?)"
                self.connection.executemany(query, new)


def _ask(connection: sqlite3.Connection, query: str, *given: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query; none if the catalogue is damaged."""
    try:
        return connection.execute(query, given).fetchall()
    except _UNUSABLE as error:
        if not isinstance(error, sqlite3.OperationalError) or "no such" in str(error):
            _discard()
        return []


def _sealed(content: Any, *place: str) -> bytes:
    """Pack content with a checksum over it and its key, because sqlite has none."""
    data = fmt.pack(content)
    return _sum(data, place) + data


def _unsealed(kept: object, decoder: msgspec.msgpack.Decoder[_Kept], *place: object) -> _Kept | None:
    """Return the content stored for a key; None if it is damaged, belongs to another key, or another version wrote it."""
    if not isinstance(kept, bytes) or kept[:4] != _sum(kept[4:], place):
        return None
    try:
        return decoder.decode(kept[4:])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _sum(data: bytes, place: tuple[object, ...]) -> bytes:
    return crc32(data, crc32(repr(place).encode("utf-8", "surrogatepass"))).to_bytes(4, "little")


def signature(run: Path) -> str:
    """Return what a run's row depends on: the names and sizes of its journals, the same whether packed or not."""
    parts: set[str] = set()
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(f"{run}/journal") as entries:
        parts = {_part(entry) for entry in entries if _is_journal(entry)}
    return "\n".join(sorted(parts))


def _is_journal(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith((fmt.SUFFIX, fmt.PACKED)) and entry.is_file(follow_symlinks=False)


def _part(entry: os.DirEntry[str]) -> str:
    if entry.name.endswith(fmt.PACKED):
        return f"{entry.name.removesuffix(fmt.PACKED)}{fmt.SUFFIX}:{packed.raw_size(Path(entry.path))}"
    return f"{entry.name}:{entry.stat(follow_symlinks=False).st_size}"


class Shelf:
    """The state a long-lived reader keeps between listings: rows with their signatures, and its open runs.

    Threads may share it. A run is read by one thread at a time, and reading one run does not block another.
    """

    def __init__(self) -> None:
        self.rows: dict[Path, tuple[str, StoredRun]] = {}
        self.opened: dict[Path, StoredRun] = {}
        self.settled: dict[Path, int] = {}  # folder mtime of runs that ended a while ago
        self.whole: dict[Path, int | None] = {}  # that mtime when an open run was last read
        self.files: dict[Path, int] = {}  # number of journals of each open run
        self._locks: dict[Path, threading.RLock] = {}
        self._opening = threading.Lock()

    def reading(self, folder: Path) -> threading.RLock:
        """Return the lock of one run."""
        return self._locks.setdefault(folder, threading.RLock())

    def unchanged(self, folder: Path, date: int) -> StoredRun | None:
        """Return a run that cannot have changed: it ended a while ago, and no journal was added or removed since."""
        kept = self.rows.get(folder)
        return kept[1] if kept is not None and date and self.settled.get(folder) == date else None

    def settle(self, folder: Path, date: int, run: StoredRun) -> None:
        """Remember that a run is no longer written to, after a delay because some exit handlers log after the end."""
        if run.status not in LIVE and time.time() - touched(folder) > SETTLED_SECONDS:
            self.settled[folder] = date

    def run(self, folder: Path) -> StoredRun:
        """Return a run in its current state. Objects returned earlier stay unchanged for their readers."""
        with self.reading(folder):
            date = self.settled.get(folder)  # taken before reading: a run that settles later is read once more
            run = self.opened.get(folder)
            fresh = run is None or date is None or self.whole.get(folder) != date or date_of(folder) != date
            if run is None or fresh:
                run = StoredRun(folder).refresh() if run is None else run.reopened()
                run.kin = partial(forks.in_directory, folder.parent.parent, self.run)
                self.whole[folder] = date
            self._keep(folder, run, count=fresh)
            return run

    def _keep(self, folder: Path, run: StoredRun, *, count: bool) -> None:
        """Keep a run open as the most recently used one; with too many journals, close the least recently used runs."""
        with self._opening:
            self.opened.pop(folder, None)
            self.opened[folder] = run
            if not count:
                return
            self.files[folder] = len(run.journals)
            if sum(self.files.values()) > MOST_OPEN:
                self._close_oldest()

    def _close_oldest(self) -> None:
        self.files = {folder: self.files.get(folder, 0) for folder in self.opened}
        over = sum(self.files.values()) - MOST_OPEN
        for folder in list(self.opened)[:-1]:
            if over <= 0:
                return
            over -= self.files.pop(folder)
            del self.opened[folder]

    def close(self, folder: Path) -> None:
        """Close a run's journals; its row is kept."""
        with self._opening:
            self.opened.pop(folder, None)
            self.files.pop(folder, None)


def listed(root: Path, project: str | None = None, *, shelf: Shelf | None = None, progress: Progress | None = None) -> Runs:
    """Return all runs below a directory, newest first, from their rows if those are valid; `unreadable` lists failures."""
    failed: dict[Path, str] = {}
    dates = {folder: date for folder in directory.run_folders(root, project, failed=failed) if (date := date_of(folder))}
    folders = list(dates)
    shelf = Shelf() if shelf is None else shelf
    with _Session() as session:
        if not all(folder in shelf.rows for folder in folders):
            shelf.rows.update(
                {f: kept for f, kept in _known(session.connection, root, folders, project is None).items() if f not in shelf.rows}
            )
        found = []
        for folder in progress(folders, len(folders)) if progress else folders:
            deadline.check()
            run = _entry(session, folder, dates[folder], shelf, failed)
            found += [] if run is None else [run]
    unreadable = [{"path": _printable(path), "reason": reason} for path, reason in sorted(failed.items())]
    return Runs(sorted(found, key=lambda run: run.started, reverse=True), unreadable)


def _printable(path: Path) -> str:
    """Return a path as printable text, whatever bytes its name contains."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def unreadable_text(unreadable: list[dict[str, str]], shown: int = 3) -> str:
    """Return the message about runs that could not be read: how many, which, and why."""
    lines = [f"  {one['path']}: {one['reason']}" for one in unreadable[:shown]]
    more = [f"  and {len(unreadable) - shown} more"] if len(unreadable) > shown else []
    count = f"{len(unreadable)} run{'' if len(unreadable) == 1 else 's'}"
    return "\n".join([f"{count} could not be read, and no list or query includes them:", *lines, *more])


def last_signs(root: Path, shelf: Shelf) -> Iterator[tuple[Path, float]]:
    """Yield each run's folder and when it was last active, without decoding its row, which is slow for wide runs."""
    with _Session() as session:
        query = "SELECT path, signature, seen FROM runs WHERE path >= ? AND path < ?"
        rows = _ask(session.connection, query, f"{root}/", f"{root}0")
        known = {path: (sign, seen) for path, sign, seen in rows if isinstance(seen, float)}
        for folder in directory.run_folders(root):
            date = date_of(folder)
            run = shelf.unchanged(folder, date)
            sign, seen = known.get(str(folder), ("", 0.0))
            if date and run is None and not (sign and _signature(folder) == sign):
                deadline.check()
                run = _entry(session, folder, date, shelf, {})
                sign = ""
            if run is not None or sign:
                yield folder, seen if run is None else run.seen


def _signature(folder: Path) -> str:
    """Return a run's signature, or an empty string if it cannot be read."""
    try:
        return signature(folder)
    except OSError:
        return ""


def _known(connection: sqlite3.Connection, root: Path, folders: list[Path], whole: bool) -> dict[Path, tuple[str, StoredRun]]:
    """Return the runs that have a row in the catalogue. If `whole`, delete the rows of runs that no longer exist."""
    rows: dict[Path, tuple[str, StoredRun]] = {}
    asked = {str(folder): folder for folder in folders}
    query = "SELECT path, signature, row FROM runs WHERE path >= ? AND path < ?"
    for path, sign, kept in _ask(connection, query, f"{root}/", f"{root}0"):
        if path not in asked:
            if whole and isinstance(path, str) and date_of(Path(path)) == 0:
                forget(Path(path))
        elif (row := _unsealed(kept, _rows, path, sign)) is not None:
            rows[asked[path]] = (sign, StoredRun(asked[path], row.whole(path)))
    return rows


def date_of(run: Path) -> int:
    """Return when a journal was last added or removed, for comparison only: 0 if there are none, -1 without permission."""
    try:
        found = os.lstat(f"{run}/journal")
        return found.st_mtime_ns if stat.S_ISDIR(found.st_mode) else 0
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except OSError:
        return -1


def touched(run: Path) -> float:
    """Return the newest mtime of a run's files, in seconds: a hint whether they change, not when the run was active."""
    try:
        with os.scandir(f"{run}/journal") as entries:
            ours = (entry for entry in entries if _is_journal(entry))
            return max((e.stat(follow_symlinks=False).st_mtime for e in ours), default=0.0)
    except OSError:
        return 0.0


def _entry(session: _Session, folder: Path, date: int, shelf: Shelf, failed: dict[Path, str]) -> StoredRun | None:
    """Return a run from its row if valid; else read the run and update the row. Record why it cannot be read in `failed`."""
    settled = shelf.unchanged(folder, date)
    if settled is not None:
        return settled
    with shelf.reading(folder):
        run, error = outcome(_current, session, folder, date, shelf)
    if isinstance(error, deadline.TookTooLong):
        raise error
    if error is not None and not isinstance(error, FileNotFoundError):  # else deleted meanwhile
        failed[folder] = reason_of(error)
    return run


def reason_of(error: Exception) -> str:
    """Return in one line why something cannot be read."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) if isinstance(error, FanfoldError) else f"{type(error).__name__}: {error}"


def _current(session: _Session, folder: Path, date: int, shelf: Shelf) -> StoredRun | None:
    now = signature(folder)
    if not now:
        return None
    if _printable(folder) != str(folder):
        raise RunError("the name of its folder is not UTF-8. Rename the folder.")
    kept = shelf.rows.get(folder)
    same = kept is not None and kept[0] == now
    if kept is not None and same and kept[1].status not in LIVE:
        shelf.settle(folder, date, kept[1])
        return kept[1]
    row = _read(folder, shelf)
    if not same or kept is None or kept[1].verdict != row.verdict:
        session.keep(folder, now, row)
    run = StoredRun(folder, row.whole(str(folder)))
    shelf.rows[folder] = (now, run)
    shelf.settle(folder, date, run)
    return run


def _read(folder: Path, shelf: Shelf) -> RunRow:
    kept = folder in shelf.opened
    row = shelf.run(folder).row()
    if row.status not in LIVE and not kept:
        shelf.close(folder)  # only its row is needed
    return row.slim()


def statistics(row: RunRow, key: str, *, run: StoredRun | None = None) -> dict[str, Any] | None:
    """Return min, max (and their steps), mean, first, last and count of a run's key; cached until the run grows."""
    folder = Path(row.path)
    now = signature(folder)
    with contextlib.closing(_connect()) as connection:
        query = "SELECT row FROM stats WHERE path = ? AND key = ? AND signature = ?"
        for (kept,) in _ask(connection, query, str(folder), key, now):
            found = _unsealed(kept, _statistics, str(folder), key, now)
            if found is not None and "min_step" in found:  # older versions stored no steps
                return found
        from .points import holders, points

        run = run or StoredRun(folder).refresh()
        ranks = holders(run, key, own=True)
        found = points(run, key, ranks[0], own=True).statistics() if ranks else _computed(run, key)
        if found is None:
            return None
        with contextlib.suppress(*_UNUSABLE):
            query = "INSERT OR REPLACE INTO stats (path, key, signature, row) VALUES (?, ?, ?, ?)"
            connection.execute(query, (str(folder), key, now, _sealed(found, str(folder), key, now)))
    return found


def _computed(run: StoredRun, key: str) -> dict[str, Any] | None:
    from . import goodput

    return goodput.statistics(run, key) if key.startswith(goodput.PREFIX) else None


def forget(folder: Path) -> None:
    """Delete everything derived from a deleted run."""
    from . import segments

    with contextlib.closing(_connect()) as connection, contextlib.suppress(*_UNUSABLE):
        for (sign,) in _ask(connection, "SELECT signature FROM runs WHERE path = ?", str(folder)):
            for journal in _journals(sign):
                segments.discard(cache_directory(), journal)
                packed.discard(cache_directory(), journal)
        for table in _TABLES:
            connection.execute(f"DELETE FROM {table} WHERE path = ?", (str(folder),))  # noqa: S608 - the two names above


def _journals(sign: str) -> Iterator[str]:
    """Yield the ids of the journals in a signature."""
    for line in sign.splitlines():
        yield line.rpartition(":")[0].removesuffix(fmt.SUFFIX).rpartition("-")[2]


def reindex(root: Path, *, progress: Progress | None = None) -> tuple[int, int]:
    """Rebuild every row below a directory, and delete data of runs that no longer exist; return both counts."""
    with contextlib.closing(_connect()) as connection:
        rows = connection.execute("SELECT path, signature FROM runs").fetchall()
        gone = [path for path, _ in rows if not directory.is_run(Path(path))]
        for path in gone:
            forget(Path(path))
        for table in _TABLES:
            span = (f"{root}/", f"{root}0")
            connection.execute(f"DELETE FROM {table} WHERE path >= ? AND path < ?", span)  # noqa: S608 - the two names above
    return len(listed(root, progress=progress)), len(gone)
