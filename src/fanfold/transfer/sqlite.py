"""SQLite files of other tools, opened without writing to them and without trusting their schema."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..journal.files import open_regular

MAGIC = b"SQLite format 3\x00"
EACH = 100_000  # steps of SQLite's machine between two looks at what a database has cost
FREE_STEPS, STEPS = 10_000_000, 50  # how many it may take, and how many more for each of its bytes
BROKEN = (sqlite3.Error, OSError, ValueError, OverflowError)


class SQLiteFile:
    """A database that is only read: rows of its tables, by the columns its version has."""

    def __init__(
        self, execute: Callable[[str, Mapping[str, Any]], Iterator[tuple[Any, ...]]], tables: Mapping[str, set[str]]
    ) -> None:
        self.execute, self.tables = execute, tables

    def select(self, table: str, columns: tuple[str, ...], rest: str = "", **values: Any) -> Iterator[tuple[Any, ...]]:
        """Yield rows of a table; a column that this schema lacks is None. `rest` and the names are ours."""
        have = self.tables.get(table)
        if have is None:
            return iter(())
        chosen = ", ".join(f't."{name}"' if name in have or name == "rowid" else "NULL" for name in columns)
        return self.execute(f'SELECT {chosen} FROM "{table}" t {rest}', values)  # noqa: S608 - no text of the file is in it


def is_sqlite(path: Path) -> bool:
    """Return whether a file is a SQLite database, by its first bytes."""
    try:
        facts = path.lstat()
        return facts.st_size > len(MAGIC) and _begins(path, facts.st_mtime_ns, facts.st_size)
    except OSError:
        return False


@lru_cache(maxsize=64)
def _begins(path: Path, _changed: int, _size: int) -> bool:
    """Look at a file once, although several importers ask about it."""
    with open_regular(path) as file:
        return file.read(len(MAGIC)) == MAGIC


@contextlib.contextmanager
def opened(path: Path) -> Iterator[SQLiteFile]:
    """Open a SQLite file; raise one of BROKEN if it cannot be read."""
    if not is_sqlite(path):
        raise OSError("it is not a SQLite database")
    with contextlib.closing(_connected(path)) as found:
        listed = found.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'").fetchall()
        # Only tables that hold rows: a view or a virtual table of a hostile file could compute for ever.
        names = [name for name, sql in listed if isinstance(sql, str) and sql.lstrip().upper().startswith("CREATE TABLE")]
        quoted = {name: name.replace('"', '""') for name in names if isinstance(name, str)}
        tables = {name: {row[1] for row in found.execute(f'PRAGMA table_info("{safe}")')} for name, safe in quoted.items()}
        yield SQLiteFile(lambda query, values: iter(found.execute(query, values)), tables)


def _connected(path: Path) -> sqlite3.Connection:
    """Connect without leaving files beside the database, as SQLite does for one in WAL mode."""
    address = path.resolve().as_uri()
    with open_regular(path) as file:
        logged = file.read(19)[18:] == b"\x02"
    at_rest = logged and not _size(path.with_name(f"{path.name}-wal"))
    for options in ("mode=ro&immutable=1",) if at_rest else ("mode=ro", "mode=ro&immutable=1"):
        found = sqlite3.connect(f"{address}?{options}", uri=True, timeout=10)
        _bound(found, _size(path) + _size(path.with_name(f"{path.name}-wal")))
        try:
            found.execute("PRAGMA trusted_schema=OFF")
            found.execute("SELECT count(*) FROM sqlite_master").fetchall()
        except sqlite3.OperationalError:
            found.close()
        except sqlite3.Error:
            found.close()
            raise
        else:
            return found
    raise sqlite3.OperationalError("it cannot be opened")


def _bound(database: sqlite3.Connection, size: int) -> None:
    """Let a database cost no more than its size: pages that are linked several times can make a small file endless."""
    if sys.version_info >= (3, 11):
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(size, 1 << 20))
    left = [1 + (FREE_STEPS + STEPS * size) // EACH]

    def spent() -> bool:
        left[0] -= 1
        return left[0] < 0

    database.set_progress_handler(spent, EACH)


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def with_log(path: Path) -> tuple[Path, ...]:
    """Return the files that hold a database: new rows may be only in its log."""
    log = path.with_name(f"{path.name}-wal")
    return (path, log) if log.exists() else (path,)
