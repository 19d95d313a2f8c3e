"""Runs in another project: moved or copied as whole folders. A run belongs to the project whose folder it is in."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import FanfoldError, RunError, RunNotFound
from ..journal.directory import REPORTS, check_folders, decode_name, encode_name, is_link, is_run, run_path
from ..journal.liveness import is_locked
from ..journal.origin import origin_of, spool_roots
from ..journal.spool import recover
from .catalogue import forget
from .changes import COPYING, check_alone, check_place
from .run import StoredRun

if TYPE_CHECKING:
    from .query import Store

# Folders that say where the original is delivered to: a copy is sent nowhere unless it is told to.
DELIVERY = ("relay", "forward", "trackers")


def move(runs: Sequence[StoredRun], root: Path, project: str, *, force: bool = False) -> list[Path]:
    """Move runs to another project of the same directory, each by one rename; return where they are.

    If one of them cannot go there, none is moved. A run that is there already stays: a second try completes an interrupted one.
    """
    targets = check_move(runs, root, project, force=force)
    for run, target in {run.path: (run, target) for run, target in zip(runs, targets, strict=True)}.values():
        if run.path != target:
            _rename(run, target, project)
    return targets


def check_move(runs: Sequence[StoredRun], root: Path, project: str, *, force: bool = False) -> list[Path]:
    """Return the folder that each run will have; raise if one of them cannot be moved."""
    _check_name(project, "moved")
    away = {run.path: run for run in runs if not _is_in(run, root, project)}
    targets = dict(zip(away, _checked(list(away.values()), root, project, force=force, done="moved"), strict=True))
    for run in away.values() if not force else ():
        _check_undelivered(run)
    return [targets.get(run.path, run.path) for run in runs]


def found(find: Callable[[str], StoredRun], word: str, project: str, store: Store) -> StoredRun:
    """Open a run that is to be moved. If PROJECT/ID names none, an earlier try may have moved it already: look there, too."""
    try:
        return find(word)
    except RunNotFound:
        old, _, id = word.rpartition("/")
        with contextlib.suppress(FanfoldError):
            run = find(f"{project}/{id}")
            if old and store.was_in(old, run):
                return run
        raise


def copy(runs: Sequence[StoredRun], root: Path, project: str, *, force: bool = False) -> list[Path]:
    """Copy runs to another project of the same directory; return where the copies are. Each appears once it is complete."""
    _check_name(project, "copied")
    for run in runs:
        if _is_in(run, root, project):
            raise RunError(f"{_named(run)} is in project {project} already. Nothing was copied. Name another project.")
    targets = _checked(runs, root, project, force=force, done="copied")
    for run, target in zip(runs, targets, strict=True):
        _copy(run, target, root)
    return targets


def _check_name(project: str, done: str) -> None:
    if not isinstance(project, str) or not project.strip():
        raise RunError(f"a project needs a name. Nothing was {done}. Name the project.")
    if decode_name(encode_name(project)) != project:  # the folder is the only place that records it
        raise RunError(
            f"the name {project[:40]!r}… cannot be the name of a folder. Nothing was {done}. Choose another: it may be too long."
        )


def _is_in(run: StoredRun, root: Path, project: str) -> bool:
    folder = root / encode_name(project)
    return folder.is_dir() and not is_link(folder) and folder.samefile(run.path.parent)


def _checked(runs: Sequence[StoredRun], root: Path, project: str, *, force: bool, done: str) -> list[Path]:
    """Return the folder that each run will have; raise if one of them must not go there, or not now."""
    recover(*spool_roots(), runs=root)  # what killed processes left in a spool would later be copied to the old folder
    targets = [_check(run.refresh(), root, project, force=force, done=done) for run in runs]
    for run in runs:
        check_alone(run, runs, done)
    return targets


def _check(run: StoredRun, root: Path, project: str, *, force: bool, done: str) -> Path:
    if not run.path.exists():
        raise RunError(f"{_named(run)} is not at {run.path} any more. Nothing was {done}. Another process moved or deleted it.")
    if not force and run.status in ("running", "lost"):
        word = "is still being written" if run.status == "running" else "may still be written on another node"
        raise RunError(f"{_named(run)} {word}. Nothing was {done}. Stop it first, or pass force.")
    check_place(run.path, root, done)
    check_folders(run.path)
    for journal in run.journals:
        home = origin_of(journal.path, journal.header)
        if not force and home is not None and home != journal.path and home.exists():
            raise RunError(f"{_named(run)} is not copied from {home} completely yet. Nothing was {done}. Try again later.")
    target = run_path(root, project, run.id)
    if is_link(target.parent) or is_link(target):
        raise RunError(f"{target.parent} is a link. Nothing was {done}. Remove it, or choose another project.")
    if is_run(target) or os.path.lexists(target):
        raise RunError(
            f"project {project} has another run {run.id} already. Nothing was {done}. Choose another project, or delete that run "
            f"first: fanfold rm {project}/{run.id}"
        )
    return target


def _check_undelivered(run: StoredRun) -> None:
    """Raise if a relay is at work: it keeps its cursor in this folder, and would not know what it has sent."""
    for lock in sorted([*run.path.glob("relay/*.lock"), *run.path.glob(f"{REPORTS}/*/*/relay/*.lock")]):
        if is_locked(lock):
            raise RunError(
                f"{_named(run)} is still being delivered ({lock.stem}). Nothing was moved. Wait until it is delivered, or pass "
                "force: then `fanfold sync` delivers the rest, and may repeat the last points."
            )


def _rename(run: StoredRun, target: Path, project: str) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o775)  # as for a run that starts there: others may use it, too
        run.path.rename(target)
    except OSError as error:
        other = error.errno == errno.EXDEV
        hint = (
            "Copy it with `fanfold cp`, then delete it here." if other else "Check the path and its permissions, and try again."
        )
        raise RunError(f"{_named(run)} was not moved to {project}: {error.strerror or error}. {hint}") from error
    forget(run.path)


def _copy(run: StoredRun, target: Path, root: Path) -> None:
    aside = target.with_name(f"{COPYING}{os.getpid()}-{secrets.token_hex(6)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o775)
        shutil.copytree(run.path, aside, symlinks=True, ignore=_delivery_of(run.path))
        aside.rename(target)
    except (shutil.Error, OSError) as error:  # copytree goes on after each file that fails, and lists them all
        why = str(error.args[0][0][2]).partition(": ")[0] if isinstance(error, shutil.Error) else error.strerror or error
        raise RunError(
            f"{_named(run)} could not be copied: {why}. There is no copy, and the run is as it was. Make room in {root}, or "
            "check the permissions, and copy it again."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _named(run: StoredRun) -> str:
    return f"run {run.name} ({run.id})"


def _delivery_of(folder: Path) -> Callable[[str, list[str]], set[str]]:
    def ignored(place: str, names: list[str]) -> set[str]:
        locks = {name for name in names if name.endswith(".alive")}
        whole_run = Path(place) == folder or Path(place).parent.parent == folder / REPORTS
        return locks | (set(DELIVERY) & set(names) if whole_run else set())

    return ignored
