"""Neptune's offline folders: their location, their operations, and the points those add to each path."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OURS = ("sys", "fanfold", "parameters", "artifacts", "monitoring", "source_code")  # folders that never hold user keys
_KINDS = {"LogFloats": "number", "LogStrings": "text", "LogImages": "image", "UploadFile": "file"}


class data_directory:  # noqa: N801 - reads as a statement
    """A context manager that makes Neptune store its files in our folder; it reads the location only from the environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        self.before = os.environ.get("NEPTUNE_DATA_DIRECTORY")
        os.environ["NEPTUNE_DATA_DIRECTORY"] = str(self.folder)

    def __exit__(self, *_error: object) -> None:
        if self.before is None:
            del os.environ["NEPTUNE_DATA_DIRECTORY"]
        else:
            os.environ["NEPTUNE_DATA_DIRECTORY"] = self.before


def operations(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the operations of all offline folders, oldest first, each up to a torn end."""
    for file in sorted(folder.glob("offline/run__*/data-*.log"), key=_age):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    yield dict(json.loads(line)["obj"])
                except ValueError:  # the last line of a killed relay
                    break


def _age(file: Path) -> tuple[str, int]:
    try:
        created = str(json.loads((file.parent / "metadata.json").read_text(encoding="utf-8"))["createdAt"])
    except (OSError, ValueError, KeyError):
        created = ""
    return created, int(file.stem.split("-")[1])


def counted(operation: dict[str, Any]) -> tuple[str, int]:
    """Return the path an operation adds points to, and how many: a list of images or files is one point."""
    kind, path = operation["type"], operation["path"]
    if kind in ("LogFloats", "LogStrings"):
        return "/".join(path), len(operation["values"])
    if kind == "LogImages":
        places = [value["value"].get("description") for value in operation["values"]]
        return "/".join(path), sum(place is None or place.startswith("1 of ") for place in places)
    if kind == "UploadFile" and path[0] not in ("artifacts", "source_code"):
        return "/".join(path[:-1]), int("." not in path[-1])
    return "", 0


def names_in(folder: Path) -> dict[tuple[str, str], str]:
    """Return the path of each (key, kind): its own, unless a recorded name says otherwise."""
    found: dict[str, tuple[str, str]] = {}
    for operation in operations(folder):
        path = operation["path"]
        if path[:2] == ["fanfold", "names"]:
            key, kind, place = json.loads(operation["value"])
            found[place] = (key, kind)
        elif operation["type"] in _KINDS and path[0] not in OURS:
            place = "/".join(path[:-1] if operation["type"] == "UploadFile" else path)
            found.setdefault(place, (place, _KINDS[operation["type"]]))
    return {owner: place for place, owner in found.items()}


def gather(folder: Path, run_id: str) -> None:
    """Give all folders of an offline run one container id, so that `neptune sync` creates one run from them."""
    wanted = str(uuid.uuid5(uuid.NAMESPACE_OID, run_id))
    for one in (folder / "offline").glob("run__*"):
        kind, _, *rest = one.name.split("__")
        target = one.with_name("__".join([kind, wanted, *rest]))
        while target != one and target.exists():  # left by an earlier start in the same process
            target = target.with_name(f"{target.name}0")
        one.rename(target)
