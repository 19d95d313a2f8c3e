"""Deletion of a run: first hidden, then removed. Nothing outside the runs' directory is ever touched."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from ..errors import RunError
from .catalogue import forget
from .run import StoredRun

ASIDE = ".deleted-"  # hidden from every listing; prune removes leftovers of an interrupted deletion


def check_place(path: Path, root: Path) -> None:
    """Raise unless a directory is exactly `root/project/run` and not reached through a link."""
    inside = path.parent.parent == root or path.parent.parent.resolve() == root.resolve()
    linked = path.is_symlink() or path.parent.is_symlink()
    if not inside or linked or path.resolve().parent.parent != root.resolve():
        why = "is a link" if linked else f"is not in {root}"
        raise RunError(f"{path} {why}. Nothing was deleted. Name the runs' directory with --dir, or delete it by hand.")


def weight(path: Path) -> int:
    """Return the size of a directory in bytes; links are not followed."""
    total = 0
    for folder, _, files in os.walk(path):
        for name in files:
            total += os.lstat(os.path.join(folder, name)).st_size  # noqa: PTH118 - os.walk gives strings, by the thousand
    return total


def delete(run: StoredRun) -> int:
    """Hide a run, then delete it, so that an interruption leaves no partial run; return the number of bytes freed."""
    freed = weight(run.path)
    aside = run.path.with_name(f"{ASIDE}{secrets.token_hex(6)}")
    run.path.rename(aside)
    forget(run.path)
    shutil.rmtree(aside)
    return freed
