"""Helpers shared by several adapters: media as files, file names, configs, waiting."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

OWNERS = {  # the tracker that gets the objects of a library
    "aim": "aim", "neptune": "neptune", "pyecharts": "swanlab", "swanlab": "swanlab", "trackio": "trackio", "wandb": "wandb",
}  # fmt: skip


def library_of(value: Any) -> str:
    """Return the library that this object, or list of objects, belongs to."""
    one = value[0] if isinstance(value, (list, tuple)) and value else value
    return type(one).__module__.partition(".")[0]


def until(done: Callable[[], bool], seconds: float, *, pause: float = 0.02) -> bool:
    """Wait for another thread or process to do something; return whether it happened in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


class GrowingFile:
    """A file of lines that a library appends to; each `read` returns the complete lines added since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0

    def read(self) -> list[bytes]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self.at += len(whole)
        return whole.splitlines()


def cut_torn_end(path: Path, *, quoted: bool = False) -> int:
    """Truncate a file after its last complete line, since a kill may leave half of one; return its size.

    With `quoted`, a line ends only where quotes are balanced, as in CSV.
    """
    data = path.read_bytes() if path.exists() else b""
    whole = data.rfind(b"\n") + 1
    while quoted and whole and data.count(b'"', 0, whole) % 2:
        whole = data.rfind(b"\n", 0, whole - 1) + 1
    if whole < len(data):
        os.truncate(path, whole)
    return whole


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a library that has no other setting for it."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if before is None else {name: before})


def mapped(value: Any, change: Callable[[Any], Any], *, key: Callable[[str], str] = str) -> Any:
    """Return a config with each leaf, and each key, converted for a system."""
    if isinstance(value, dict):
        return {key(name): mapped(item, change, key=key) for name, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change, key=key) for item in value]
    return change(value)


def content_of(media: Any) -> tuple[bytes, str]:
    """Return media as the bytes of a file and its extension: tables as CSV, interactive figures as HTML, histograms as JSON."""
    if media.kind == "histogram":
        return json.dumps({"edges": media.edges.tolist(), "counts": media.counts.tolist()}).encode(), "json"
    if media.kind == "text":
        return media.text.encode(), "txt"
    if media.kind == "html" or (media.kind == "figure" and not media.png):
        return media.html.encode(), "html"
    if media.kind == "figure":
        return bytes(media.png), "png"
    if media.kind == "table":
        out = io.StringIO()
        csv.writer(out).writerows([media.columns, *media.rows])
        return out.getvalue().encode(), "csv"
    encoded = media.encode()
    return bytes(encoded.data), str(encoded.ext)


def markdown(table: Any, *, most: int | None = None) -> str:
    """Return a table as Markdown, with at most `most` rows."""
    rows = [table.columns, ["---"] * len(table.columns), *table.rows[:most]]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def small_integer(value: Any, most: int = (1 << 63) - 1) -> Any:
    """Return a config value, as text if it is an integer that a system with 64 bits cannot hold."""
    return str(value) if isinstance(value, int) and not -(1 << 63) <= value <= most else value


def text_of(value: Any) -> str:
    """Return a config value as text: texts unchanged, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def cell_of(cell: Any) -> Any:
    """Return a table's cell for a library that takes numbers and texts only."""
    return cell if isinstance(cell, (bool, int, float, str)) else "" if cell is None else str(cell)


def plain_name(name: str) -> str:
    """Return a name of letters, digits and `_.-`, valid for artifacts."""
    return "".join(sign if sign.isascii() and (sign.isalnum() or sign in "_.-") else "-" for sign in name)


def copied(path: Path, home: Path, name: str) -> Path:
    """Copy a file to `name` inside `home`, never outside it: for libraries that record a path and read it later."""
    target = home / re.sub(r"(^|/)\.\.?(?=/|$)", "_", name).strip("/")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)
    return target


def named(path: Path, folder: Path, name: str) -> Path:
    """Return a file under another name in `folder`: a link, or a copy if links are not supported."""
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        target.symlink_to(path.resolve())
    except OSError:
        shutil.copyfile(path, target)
    return target


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a file with one JSON object; return None if it is missing or torn."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def truthy(value: Any) -> bool:
    """Parse a yes/no setting; `"False"` means no."""
    return value.strip().lower() in ("1", "true", "yes", "y", "t", "on") if isinstance(value, str) else bool(value)
