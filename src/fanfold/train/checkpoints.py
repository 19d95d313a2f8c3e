"""Checkpoint folders: their names, which are complete, which are removed; and the note that names the run and the data position.

A checkpoint is complete once its `trainer_state.json` exists: it is written last, so a kill while saving leaves a folder that is
never resumed from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingError, logger

STATE_FILE = "trainer_state.json"
NOTE_FILE = "fanfold.json"
_NAME = re.compile(r"checkpoint-(\d+)")


def folder_for(output_dir: str | os.PathLike[str], step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return Path(output_dir) / f"checkpoint-{step}"


def checkpoints(output_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    root = Path(output_dir)
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found) if (path / STATE_FILE).is_file()]


def choose(output_dir: str | os.PathLike[str], asked: bool | str | os.PathLike[str] | None) -> Path | None:
    """Return the checkpoint to resume from: None for none, the latest complete one for True, or the named folder."""
    if asked is None or asked is False:
        return None
    if asked is not True:
        folder = Path(asked)
        if not (folder / STATE_FILE).is_file():
            raise SettingError(
                f"{folder} holds no whole checkpoint: there is no {STATE_FILE} in it. Nothing was trained. "
                "Name another folder, or pass True for the latest whole one."
            )
        return folder
    whole = checkpoints(output_dir)
    if not whole:
        raise SettingError(
            f"there is no whole checkpoint in {output_dir}. Nothing was trained. Name a checkpoint's folder, or leave it out to "
            "start from the beginning."
        )
    return whole[-1]


def rotate(output_dir: str | os.PathLike[str], limit: int | None, best: str | None) -> None:
    """Remove the oldest checkpoints beyond `limit`. The best and the latest are kept, whatever the limit."""
    if limit is None:
        return
    whole = checkpoints(output_dir)
    keep = {path.name for path in whole[-1:]} | ({Path(best).name} if best else set())
    old = [path for path in whole if path.name not in keep]
    for path in old[: max(0, len(whole) - max(limit, len(keep)))]:
        (path / STATE_FILE).unlink(missing_ok=True)  # first: a partially removed checkpoint must not count as one
        shutil.rmtree(path, ignore_errors=True)
        logger.debug("removed %s: save_total_limit=%s", path, limit)


def write_note(folder: Path, note: Mapping[str, Any]) -> None:
    """Write the note that names the run and the data position."""
    (folder / NOTE_FILE).write_text(json.dumps(dict(note)), encoding="utf-8")


def read_note(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's note; empty if the checkpoint was not written by fanfold."""
    try:
        note = json.loads((folder / NOTE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}
