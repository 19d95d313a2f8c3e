"""Rebuild of the derived tables (points, cells and so on) from the bytes of a run's journals, which are the record."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..fleet.wire import Piece
from ..journal.format import Kind, Shape
from . import schema
from .batch import InsertJob, tables_of
from .cells import roll
from .database import Database
from .decode import scan
from .names import look_up
from .profile import profile_of
from .run import FleetJournal, FleetRun, read

DERIVED = ("frames", "points", "cells", "rolled", "latest", "keys", "ops", "usage")
MOST_BYTES = 16 << 20


class StillGrowing(RunError):
    """Raised when data still arrives for a run, so that its derived rows cannot be rebuilt now."""


def rebuild(database: Database, project: str, id: str) -> int:
    """Rebuild a run's derived rows and return its number of points. Raise StillGrowing if more may arrive."""
    run = FleetRun(database, Path("/nowhere"), look_up(database, [(project, id)])[project, id])
    read([run])
    if any(journal.status() == "running" and not _ended(journal) for journal in run.found.values()):
        raise StillGrowing(f"run {id} is still growing. Nothing was rebuilt. Wait until it ends.")
    excess = _excess(database, run)
    for name in DERIVED:
        schema.delete(database, name, run.number)
    points = 0
    for jobs in _batches(run):
        tables = tables_of(jobs)
        token = secrets.token_hex(16)
        for name in ("keys", "frames", "points", "ops", "usage"):
            if name in tables:
                database.insert(name, tables[name], token=token)
        points += len(tables.get("points", {}).get("value", ()))
    roll(database, {(run.number, journal.number): journal.verified for journal in run.found.values()})
    if len(excess["journal"]):
        database.insert("mended", excess)
    return points


def _ended(journal: FleetJournal) -> bool:
    """Return whether a journal has an end frame. Check its bytes too, because the frames table may be what was lost."""
    if any(journal.records(Kind.END)):
        return True
    shapes: dict[int, Shape] = {}
    pieces = journal.owner.bytes_of(journal.number, 0)
    return any(other.kind == Kind.END for at, data in pieces for other in scan(data, at, journal.seed, shapes).others)


def _excess(database: Database, run: FleetRun) -> dict[str, Any]:
    """Return how many bytes of each journal are stored more than once. Once recorded, they do no harm."""
    import numpy as np

    found = database.ask(
        "SELECT journal, sum(end - start) - max(end) AS excess FROM pieces WHERE run = {run:UInt64} GROUP BY journal",
        run=run.number,
    )
    return {
        "run": np.full(len(found["journal"]), run.number, np.uint64),
        "journal": found["journal"].astype(np.uint64),
        "excess": found["excess"].astype(np.uint64),
    }


def _batches(run: FleetRun) -> Iterator[list[InsertJob]]:
    """Yield the run's bytes as jobs, each byte once, in batches of limited size."""
    jobs: list[InsertJob] = []
    size = 0
    for journal in run.found.values():
        shapes: dict[int, Shape] = {}
        rank, project, id = int(journal.path.stem.partition("-")[0]), run.project, run.id
        for at, data in run.bytes_of(journal.number, 0):
            scanned = scan(data, at, journal.seed, shapes)
            piece = Piece(id, journal.path.stem, at, 0, data)
            profile = profile_of(run.number, rank, scanned.others)
            jobs.append(InsertJob(project, piece, run.number, journal.number, rank, scanned, shapes, profile))
            size += len(data)
            if size > MOST_BYTES:
                yield jobs
                jobs, size = [], 0
    if jobs:
        yield jobs
