"""DVCLive's files: metric tables, metrics.json and params.yaml, repaired after a kill, and keys as file names."""

from __future__ import annotations

import csv
import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from .base import Refused
from .tools import cut_torn_end, read_json

ITSELF = "_"  # in metrics.json: the metric `a` next to a group `a/…`
_LONGEST = 240  # bytes of a file name without its extension


def mend(folder: Path) -> None:
    """Remove torn data left by a kill: Live cannot continue from it. Config is resent; the summary is rebuilt from tables."""
    from dvclive.serialize import YAMLError, load_yaml

    for path in _tables(folder).values():
        if cut_torn_end(path, quoted=True) == 0:  # long texts are written in pieces
            path.unlink()  # Live writes a table's header only if there is no file
    params, summary = folder / "params.yaml", folder / "metrics.json"
    if params.exists():
        try:
            sound = isinstance(load_yaml(params), dict)
        except YAMLError:
            sound = False
        if not sound:
            params.unlink()
    if summary.exists() and read_json(summary) is None:
        replace_json(summary, _latest(folder))


def _latest(folder: Path) -> dict[str, Any]:
    """Return the last value of every table, grouped as metrics.json groups them."""
    found: dict[str, Any] = {}
    step = 0
    for name, path in _tables(folder).items():
        head, *body = _read_table(path)
        for row in body[-1:]:
            step = max(step, int(row[head.index("step")]))
            summarise(found, name.split("/"), _number(row[-1]))
    return {**found, "step": step}


def _number(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (int, float)) else text


def rows(folder: Path) -> dict[str, int]:
    """Return how many rows each table has."""
    return {name: len(_read_table(path)) - 1 for name, path in _tables(folder).items()}


def _read_table(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t"))


def _tables(folder: Path) -> dict[str, Path]:
    """Return name → file of every metric's table."""
    base = folder / "plots" / "metrics"
    found = (path for path in sorted(base.rglob("*.tsv")) if path.is_file())
    return {path.relative_to(base).as_posix().removesuffix(".tsv"): path for path in found}


def append_rows(table: Path, found: Sequence[tuple[int, float]]) -> None:
    """Append rows to a metric's table as `Metric.dump` does, but all at once."""
    try:
        with table.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file, delimiter="\t", lineterminator=os.linesep).writerows(found)
    except OSError:
        cut_torn_end(table, quoted=True)  # the disk is full: what is sent again must not go on in half a row
        raise


def summarise(summary: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    """Insert a latest value into metrics.json's groups; a key that is both metric and group is stored as `_` in the group."""
    for part in parts[:-1]:
        inner = summary.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = summary[part] = {ITSELF: inner}
        summary = inner
    if isinstance(summary.get(parts[-1]), dict):
        summary[parts[-1]][ITSELF] = value
    else:
        summary[parts[-1]] = value


def clashes(summary: Any, parts: Sequence[str]) -> bool:
    """Return whether metrics.json has a number where this name needs a group, or the reverse."""
    for part in parts[:-1]:
        summary = summary.get(part, {})
        if not isinstance(summary, dict):
            return True
    return isinstance(summary.get(parts[-1]), dict)


@functools.lru_cache(maxsize=10_000)
def file_name(key: str) -> str:
    """Return a key as a file path: parts that are empty or would lead out of the folder are escaped."""
    parts = [_escaped(part) for part in key.split("/")]
    if any(len(part.encode()) > _LONGEST for part in parts):
        raise Refused(f"DVCLive keeps it in a file of that name, and {len(key)} characters are too many for one")
    return "/".join(parts)


def _escaped(part: str) -> str:
    if part in ("", ".", ".."):
        return part.replace(".", "%2E") or "%_"
    if re.fullmatch("step_*", part):
        return f"{part}_"  # a value column named `step` would replace DVCLive's own
    return re.sub(r"%(?=[0-9A-F]{2}|_)", "%25", part).replace("\0", "%00")


def key_of(name: str) -> str:
    """Return the key that `file_name` turned into a path."""
    return "/".join(_unescaped(part) for part in name.split("/"))


def _unescaped(part: str) -> str:
    if part == "%_":
        return ""
    if re.fullmatch("step_+", part):
        return part[:-1]
    return re.sub("%(2E|25|00)", lambda found: chr(int(found[1], 16)), part)


def replace_json(path: Path, content: Any, **options: Any) -> None:
    """Replace a JSON file atomically."""
    replace_text(path, json.dumps(content, indent=4, **options) + "\n")
