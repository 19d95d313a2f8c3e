"""Blobs in ClickHouse: the pieces as received, and a last, empty one that marks the content as verified against its name."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..fleet.intake import check_blob
from ..fleet.wire import Conflict, Rejected
from ..journal import blobs as files
from .database import Database
from .schema import delete

_NAME = re.compile(r"[0-9a-f]{64}")
_OF = "FROM blobs FINAL WHERE run = {run:UInt64} AND name = {name:String}"


def _checked(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Rejected(400, f"{str(name)[:80]!r} is not the name of a blob (64 hexadecimal digits). Nothing was stored.")
    return name


def missing(database: Database, run: int, names: list[str]) -> dict[str, int]:
    """Return the blobs that are not complete here, and how many bytes of each are."""
    wanted = [_checked(name) for name in names]
    found = database.ask(
        "SELECT name, sum(length(data)) AS have, countIf(offset = total) AS whole FROM blobs FINAL "
        "WHERE run = {run:UInt64} AND name IN {names:Array(String)} GROUP BY name",
        run=run, names=wanted,
    )  # fmt: skip
    known = {name.decode(): (int(have), bool(whole)) for name, have, whole in zip(*found.values(), strict=True)}
    return {name: known.get(name, (0, False))[0] for name in wanted if not known.get(name, (0, False))[1]}


def keep(database: Database, run: int, name: str, *, offset: int, total: int, data: bytes, limit: int) -> int:
    """Store a piece and return the new offset. After the last piece, the whole content must match the blob's name."""
    _checked(name)
    check_blob(offset, total, data, limit)
    left = missing(database, run, [name])
    if not left:
        return total
    if left[name] != offset:
        raise Conflict(left[name])
    if data:
        _insert(database, run, name, offset, total, data)
    if offset + len(data) == total:
        _complete(database, run, name, total)
    return offset + len(data)


def _insert(database: Database, run: int, name: str, offset: int, total: int, data: bytes) -> None:
    import numpy as np

    row: dict[str, Any] = {"run": np.array([run], np.uint64), "name": [name], "offset": np.array([offset], np.uint64),
           "total": np.array([total], np.uint64), "data": [data]}  # fmt: skip
    database.insert("blobs", row)


def _complete(database: Database, run: int, name: str, total: int) -> None:
    digest = hashlib.sha256()
    for chunk in pieces(database, run, name):
        digest.update(chunk)
    if digest.hexdigest() != name:
        delete(database, "blobs", run, name=name)
        raise Rejected(422, f"the content does not match its name {name}. It was not stored. Send it again.")
    _insert(database, run, name, total, total, b"")


def pieces(database: Database, run: int, name: str) -> Iterator[bytes]:
    """Yield a blob's content, a piece at a time."""
    offsets = database.ask(f"SELECT offset {_OF} AND offset < total ORDER BY offset", run=run, name=name)["offset"]
    for offset in offsets:
        found = database.ask(f"SELECT data {_OF} AND offset = {{at:UInt64}}", run=run, name=name, at=int(offset))
        yield from found["data"][:1]


def names_of(database: Database, run: int) -> list[str]:
    """Return the blobs of a run that are complete here."""
    found = database.ask("SELECT DISTINCT name FROM blobs WHERE run = {run:UInt64} AND offset = total", run=run)
    return [name.decode() for name in found["name"]]


def fetch(database: Database, number: int, run: Path, name: str) -> bool:
    """Download a blob into a run's cache folder; return whether it exists."""
    if files.path_of(run, name).exists():
        return True
    if missing(database, number, [name]):
        return False
    files.put_pieces(run, pieces(database, number, name), name)
    return True
