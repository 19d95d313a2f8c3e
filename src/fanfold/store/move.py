"""A run in another project: moved or copied as a whole folder. A run belongs to the project whose folder it is in."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from ..errors import RunError
from ..journal.directory import check_folders, is_link, is_run, run_path
from .catalogue import forget
from .changes import ASIDE, check_place
from .run import StoredRun

# Folders that say where the original is delivered to: a copy is sent nowhere unless it is told to.
DELIVERY = ("relay", "forward", "trackers")


def move(run: StoredRun, root: Path, project: str, *, force: bool = False) -> Path:
    """Move a run to another project of the same directory, by one rename; return where it is."""
    target = check(run, root, project, force=force, done="moved")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    run.path.rename(target)
    forget(run.path)
    return target


def copy(run: StoredRun, root: Path, project: str, *, force: bool = False) -> Path:
    """Copy a run to another project of the same directory; return where the copy is. It appears once it is complete."""
    target = check(run, root, project, force=force, done="copied")
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = target.with_name(f"{ASIDE}{secrets.token_hex(6)}")
    try:
        shutil.copytree(run.path, aside, symlinks=True, ignore=_delivery_of(run.path))
        aside.rename(target)
    except shutil.Error as error:  # it goes on after each file that fails, and lists them all
        why = str(error.args[0][0][2]).partition(": ")[0]
        raise RunError(
            f"run {run.name} ({run.id}) could not be copied: {why}. There is no copy, and the run is as it was. Make room in "
            f"{root}, or see to the permissions, and copy it again."
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def check(run: StoredRun, root: Path, project: str, *, force: bool, done: str) -> Path:
    """Return the folder that a run will have; raise if it must not go there, or not now."""
    if not project:
        raise RunError(f"a project needs a name. Nothing was {done}. Name the project.")
    if not force and run.status in ("running", "lost"):
        word = "is still being written" if run.status == "running" else "may still be written on another node"
        raise RunError(f"run {run.name} ({run.id}) {word}. Nothing was {done}. Stop it first, or pass force.")
    check_place(run.path, root)
    check_folders(run.path)
    target = run_path(root, project, run.id)
    if is_link(target.parent) or is_link(target):
        raise RunError(f"{target.parent} is a link. Nothing was {done}. Remove it, or choose another project.")
    if is_run(target) or os.path.lexists(target):
        raise RunError(f"project {project} has a run {run.id} already. Nothing was {done}. Delete it first: fanfold rm.")
    return target


def _delivery_of(folder: Path) -> Callable[[str, list[str]], set[str]]:
    def ignored(place: str, names: list[str]) -> set[str]:
        locks = {name for name in names if name.endswith(".alive")}
        return locks | (set(DELIVERY) & set(names) if Path(place) == folder else set())

    return ignored
