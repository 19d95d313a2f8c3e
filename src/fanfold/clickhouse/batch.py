"""A batch to be inserted: its jobs, and the columns they produce."""

from __future__ import annotations

import hashlib
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..fleet.wire import Piece
from ..journal.format import Kind, Shape
from .decode import PointBlock, Scanned, learn, run_number, series_number
from .profile import Profile, add_profile


@dataclass(slots=True)
class InsertJob:
    """One piece to be inserted into the tables."""

    project: str
    piece: Piece
    run: int
    journal: int
    rank: int
    scanned: Scanned
    shapes: MutableMapping[int, Shape]  # of the journal before it
    profile: Profile
    at: tuple[int, int] = field(init=False)  # run and journal
    start: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.at = (self.run, self.journal)
        self.start = self.piece.offset
        self.end = self.start + self.piece.gap + len(self.piece.data)

    @property
    def begins(self) -> bool:
        """Return whether it begins a journal under the name that its run has its number from."""
        return self.start == 0 and self.run == run_number(self.project, self.piece.run)


def u64(values: Sequence[int]) -> Any:
    import numpy as np

    return np.array(values, np.uint64)


def token_of(jobs: Sequence[InsertJob], once: str) -> str:
    """Return a token of the batch's journals, offsets and this try, so that an insert repeated by the network is stored once."""
    text = "".join([f"{job.journal:x}:{job.start}:{job.end};" for job in jobs])
    return hashlib.blake2b(f"{once}{text}".encode(), digest_size=16).hexdigest()


def tables_of(jobs: Sequence[InsertJob]) -> dict[str, dict[str, Any]]:
    """Return the columns of every table a batch writes to."""
    import numpy as np

    tables: dict[str, dict[str, Any]] = {
        "pieces": {
            "run": u64([job.run for job in jobs]),
            "journal": u64([job.journal for job in jobs]),
            "start": u64([job.start for job in jobs]),
            "gap": np.array([job.piece.gap for job in jobs], np.uint32),
            "end": u64([job.end for job in jobs]),
            "data": [job.piece.data for job in jobs],
        }
    }
    new = [job for job in jobs if job.begins]
    if new:
        tables["runs"] = {"run": u64([job.run for job in new]), "project": [job.project for job in new],
                          "id": [job.piece.run for job in new]}  # fmt: skip
    others = [(job, other) for job in jobs for other in job.scanned.others]
    if others:
        tables["frames"] = {
            "run": u64([job.run for job, _ in others]),
            "journal": u64([job.journal for job, _ in others]),
            "kind": np.array([other.kind for _, other in others], np.uint8),
            "flags": np.array([other.flags for _, other in others], np.uint8),
            "pos": u64([other.pos for _, other in others]),
            "body": [other.body for _, other in others],
        }
        _add_keys(tables, others)
    add_profile(tables, [job.profile for job in jobs])
    block = PointBlock()
    for job in jobs:
        block.add(job.run, job.journal, job.scanned)
    points = block.columns()
    if points:
        tables["points"] = points
    return tables


def _add_keys(tables: dict[str, dict[str, Any]], others: Sequence[tuple[InsertJob, Any]]) -> None:
    """Add the keys defined by shapes."""
    named: dict[tuple[int, str], None] = {}
    for job, other in others:
        if other.kind == Kind.SHAPE:
            shapes: dict[int, Shape] = {}
            learn(shapes, other.body)
            named.update({(job.run, key): None for shape in shapes.values() for key in shape.keys})
    if named:
        runs, keys = zip(*named, strict=True)
        tables["keys"] = {"run": u64(runs), "series": u64([series_number(key) for key in keys]), "key": list(keys)}
