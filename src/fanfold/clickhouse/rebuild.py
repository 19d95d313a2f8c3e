"""Making what is derived anew: from the bytes of a run's journals, which are the record, to points, rollups and all the rest."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..fleet.wire import Piece
from ..journal.format import Shape
from . import schema
from .batch import Job, tables_of
from .database import Database
from .decode import scan
from .run import FleetRun, read

DERIVED = ("frames", "points", "rollups", "latest", "keys", "ops", "usage")
MOST_BYTES = 16 << 20


def rebuild(database: Database, project: str, id: str) -> int:
    """Make a run's derived rows anew; return how many points it has. A run that still grows is left as it is."""
    run = FleetRun(database, Path("/nowhere"), project, id)
    read([run])
    if any(journal.status() == "running" and not list(journal.records(10)) for journal in run.journals):
        raise RunError(f"run {id} still grows. Nothing was rebuilt. Wait until it ends.")
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
    if len(excess["journal"]):
        database.insert("mended", excess)
    return points


def _excess(database: Database, run: FleetRun) -> dict[str, Any]:
    """Return how many bytes of each journal are there more than once: from now on that is known, and harmless."""
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


def _batches(run: FleetRun) -> Iterator[list[Job]]:
    """Yield the run's bytes as jobs, each byte once, in batches of bearable size."""
    jobs: list[Job] = []
    size = 0
    for journal in run.found.values():
        shapes: dict[int, Shape] = {}
        rank, project, id = int(journal.path.stem.partition("-")[0]), *run.names
        for at, data in run.bytes_of(journal.number, 0):
            scanned = scan(data, at, journal.seed, shapes)
            piece = Piece(id, journal.path.stem, at, 0, data)
            jobs.append(Job(project, piece, run.number, journal.number, rank, scanned, dict(shapes)))
            size += len(data)
            if size > MOST_BYTES:
                yield jobs
                jobs, size = [], 0
    if jobs:
        yield jobs
