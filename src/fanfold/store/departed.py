"""Runs that left a project of a gateway's directory: of each deleted or moved run, a record next to the projects."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from ..journal import directory
from ..journal.files import open_regular

DELETED = ".deleted"  # next to the projects: one small file per deleted or moved run
TO, BACK = "to", "back"  # in the record of a moved run: its new project, and that it comes back
MOST_RECORD = 1 << 16


def record_file(root: Path, project: str, run: str) -> Path:
    return directory.run_path(root / DELETED, project, run) / "by.json"


def record_of(root: Path, project: str, run: str) -> dict[str, Any] | None:
    """Return what is recorded of a run that was deleted or moved; without content, a kill interrupted the writing."""
    try:
        with open_regular(record_file(root, project, run)) as file:
            text = file.read(MOST_RECORD)
    except (FileNotFoundError, NotADirectoryError):
        return None
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        return found if isinstance(found, dict) else {}
    return {}


def place_now(root: Path, project: str, run: str) -> Path | None:
    """Return the folder of the run that was in a project, wherever it was moved to since; None if it is gone.

    Without a record, such as after `fanfold mv` in the directory itself, it is the only run of this id that began in the project.
    """
    names: list[str] = []
    while project not in names:
        names.append(project)
        folder = directory.run_path(root, project, run)
        if _is_there(folder):
            return folder
        try:
            known = record_of(root, project, run)
        except OSError:  # only the gateway's user may read the records
            known = None
        if known is None:
            found = [one for one in directory.same_id(root, run) if _is_there(one) and _began_in(one, names)]
            return found[0] if len(found) == 1 else None
        project = str(known.get(TO, project))  # without it, the run was deleted
    return None


def _is_there(folder: Path) -> bool:
    return not directory.is_link(folder.parent) and not directory.is_link(folder) and directory.is_run(folder)


def _began_in(folder: Path, projects: list[str]) -> bool:
    """Return whether a run began in one of some projects, or was resumed there: its lowest rank's journals say so."""
    files = directory.journal_files(folder)
    ranks = [file.name.partition("-")[0] for file in files]
    headers = (directory.read_header(file) for file, rank in zip(files, ranks, strict=True) if rank == ranks[0])
    return any(header is not None and header.project in projects for header in headers)
