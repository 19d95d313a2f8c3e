"""Neptune's paths and offline folders: where a key is, and the operations that add points to it."""

from __future__ import annotations

import itertools
import json
import math
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import notices
from .tools import read_json

OURS = ("sys", "fanfold", "parameters", "artifacts", "monitoring", "source_code")  # folders that never hold user keys
LONGEST_ID = 36
LONGEST_FIELD = 16384
_KINDS = {"LogFloats": "number", "LogStrings": "text", "LogImages": "image", "UploadFile": "file"}


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
    created = (read_json(file.parent / "metadata.json") or {}).get("createdAt", "")
    return str(created), int(file.stem.split("-")[1])


def counted(operation: dict[str, Any]) -> tuple[str, int]:
    """Return the path an operation adds points to, and how many: a list of images or files is one point."""
    kind, path = operation["type"], operation["path"]
    if kind in ("LogFloats", "LogStrings"):
        return "/".join(path), len(operation["values"])
    if kind == "LogImages":
        return "/".join(path), sum(at == of for at, of in _places(operation))
    if kind == "UploadFile" and path[0] not in ("artifacts", "source_code"):
        return "/".join(path[:-1]), int("." not in path[-1])
    return "", 0


def _places(operation: dict[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield where each image of an operation stands in its list: (1, 1) if it is by itself."""
    for value in operation["values"]:
        at, of, last = str(value["value"].get("description")).partition(" of ")
        yield (int(at), int(last)) if of and at.isdecimal() and last.isdecimal() else (1, 1)


def begun_lists(folder: Path) -> dict[str, int]:
    """Return, by path, how many images of a list a killed relay had sent."""
    found: dict[str, int] = {}
    for operation in operations(folder):
        for at, of in _places(operation) if operation["type"] == "LogImages" else ():
            found["/".join(operation["path"])] = at if at < of else 0
    return found


class Paths(dict[tuple[str, str], str]):
    """The path of each key and kind of value: in Neptune a path is either a field of one type, or a folder."""

    def __missing__(self, owner: tuple[str, str]) -> str:
        key, kind = owner
        base = "/".join(part for part in key.split("/") if part) or "unnamed"
        if kind != "parameter" and base.split("/")[0] in OURS:
            base = f"logged/{base}"
        base += f"_{kind}" if kind in ("nonfinite", "long") else ""
        dotted = base.replace("/", ".")
        spellings = itertools.chain((base, f"{base}_{kind}", dotted), (f"{dotted}_{i}" for i in itertools.count(2)))
        self[owner] = path = next(name for name in spellings if self._is_free(name))
        return path

    def _is_free(self, path: str) -> bool:
        return not any(f"{path}/".startswith(f"{one}/") or one.startswith(f"{path}/") for one in self.values())


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


def short_id(run_id: str) -> str:
    """Return a run's id within Neptune's limit."""
    return run_id if len(run_id) <= LONGEST_ID else str(uuid.uuid5(uuid.NAMESPACE_OID, run_id))


def field_value(value: Any) -> bool | int | float | str:
    """Return a config value as a field can hold it: types it does not have become text."""
    if isinstance(value, (bool, int, float)) and (abs(value) < 1 << 31 if isinstance(value, int) else math.isfinite(value)):
        return value
    if len(str(value)) > LONGEST_FIELD:
        notices.once("neptune:parameter", f"Neptune cuts parameters at {LONGEST_FIELD} characters. The journal has them whole.")
    return str(value)
