"""Forks: a run that continues another one from a step. Its curves begin with its parent's points up to that step.

A header is untrusted: it may name a run that is not there, that may not be seen, or that leads back to itself. A chain of forks
is followed up to MOST ancestors, each run once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import deadline
from .departed import place_now

if TYPE_CHECKING:
    from .run import StoredRun

MOST = 64  # ancestors that are read
FRESH_SECONDS = 1.0  # how long they are kept
Kin = Callable[[str, str], "StoredRun | None"]  # opens a run of the same store by project and id


class Ancestor(NamedTuple):
    """A run that another one continues, and the last of its steps that belongs to that one, too."""

    run: StoredRun
    last: int


def ancestors(run: StoredRun) -> list[Ancestor]:
    """Return the runs whose points come before a run's own, nearest first. They end where one is not found.

    They are looked up again after a second: an ancestor may be live, moved or deleted while the run itself does not change.
    """
    if run.fork is None:
        return []
    if run.lineage is None or time.monotonic() > run.lineage[0] + FRESH_SECONDS:
        run.lineage = (time.monotonic(), _followed(run))
    return run.lineage[1]


def _followed(run: StoredRun) -> list[Ancestor]:
    found: list[Ancestor] = []
    seen = {(run.project, run.id)}
    child, last = run, (1 << 63) - 1
    while child.fork is not None and len(found) < MOST:
        deadline.check()
        last = min(last, child.fork.step)
        parent = child.parent
        if parent is None or (parent.project, parent.id) in seen:
            break
        seen.add((parent.project, parent.id))
        found.append(Ancestor(parent, last))
        child = parent
    return found


def missing(run: StoredRun) -> str | None:
    """Return why some of a fork's curve is not shown; None if all of it is."""
    child = run
    for one in ancestors(run):
        child = one.run
    if child.fork is None:
        return None
    project, id, step = child.fork.project, child.fork.run, child.fork.step
    if isinstance(child.kin, Limited) and not child.kin.sees(project):
        return f"the run it was forked from is not in this store, or not open to you, so the curve begins after step {step}"
    if child.parent is not None:
        return f"the forks lead in a circle, or are more than {MOST}, so the curve begins at {child.project}/{child.id}"
    return f"run {project}/{id} is not in this store, so the curve begins after step {step}"


def in_directory(root: Path, open: Callable[[Path], StoredRun], project: str, id: str) -> StoredRun | None:
    """Open a run below a directory, in the project that it was moved to if it was."""
    folder = place_now(root, project, id)
    return None if folder is None else open(folder)


class Limited:
    """Opens the runs that others continue if they are, now, in projects that `sees` allows; so for their own ancestors."""

    def __init__(self, kin: Kin, sees: Callable[[str], bool]) -> None:
        self.kin, self.sees = kin, sees

    def __call__(self, project: str, id: str) -> StoredRun | None:
        parent = self.kin(project, id)
        return limited(parent, self.sees) if parent is not None and self.sees(parent.project) else None


def limited(run: StoredRun, sees: Callable[[str], bool]) -> StoredRun:
    """Return a run whose ancestors are found only in projects that `sees` allows; other callers may share the given one."""
    if run.fork is None:
        return run
    found = copy(run)
    found.forget_parents()
    found.kin = Limited(run.kin, sees)
    return found
