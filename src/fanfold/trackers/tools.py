"""Helpers shared by several adapters: media as files, file names, configs, waiting."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any


def until(done: Callable[[], bool], seconds: float, *, pause: float = 0.02) -> bool:
    """Wait for another thread or process to do something; return whether it happened in time."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


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


def file_of(media: Any, folder: Path) -> str:
    """Write encoded media to a new file, for a library that copies it when logging."""
    data, ext = content_of(media)
    path = folder / f"{uuid.uuid4().hex}.{ext}"
    path.write_bytes(data)
    return str(path)


def markdown(table: Any, *, most: int | None = None) -> str:
    """Return a table as Markdown, with at most `most` rows."""
    rows = [table.columns, ["---"] * len(table.columns), *table.rows[:most]]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


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


def replace(path: Path, text: str) -> None:
    """Replace a file atomically, so that a kill leaves either the old or the new one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.new")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def truthy(value: Any) -> bool:
    """Parse a yes/no setting; `"False"` means no."""
    return value.strip().lower() in ("1", "true", "yes", "y", "t", "on") if isinstance(value, str) else bool(value)
