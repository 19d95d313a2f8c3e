"""MLflow's rules for names and files: valid, unique keys, and one path per logged text, image or table.

A path is derived from key, step, time and content, so that sending the same thing again writes the same file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from ..atomic import beside
from ..process import digest

if TYPE_CHECKING:
    from .destination import Item

LONGEST_NAME = 250
LONGEST_NEW_NAME = 230  # leaves room for the prefix of the tag that records the original key
LONGEST_FILE_NAME = 255  # bytes, as on most filesystems
LONGEST_PART = 120  # bytes of a key within a longer file name
_PARTS_THAT_RESOLVE = ("", ".", "..")


def of_this_thread() -> Any:
    """Return the list in which MLflow keeps this thread's active runs, or None if MLflow is not in use."""
    stack = _active_runs()
    return stack.get() if stack is not None else None


def show(runs: Any) -> None:
    """Share another thread's active runs with this thread, including when they end. Its own active runs take precedence."""
    stack = _active_runs()
    if runs and stack is not None and not stack.get():
        stack.set(runs)


def hide(run_id: str) -> None:
    """Forget an active run of this thread that is ended elsewhere: at exit MLflow would mark it finished."""
    runs = of_this_thread()
    if runs:
        runs[:] = [run for run in runs if run.info.run_id != run_id]


def _active_runs() -> Any:
    """Return MLflow's context variable. It is private, but MLflow has no other way to hand a run to a thread."""
    return getattr(sys.modules.get("mlflow.tracking.fluent"), "_active_run_stack", None)


def legal(key: str) -> str:
    """Return a key that MLflow accepts: other characters become `_`, an overlong key is cut and ends in a digest."""
    name = re.sub(r"[^/\w.\- :]", "_", key)
    name = "/".join("_" if part in _PARTS_THAT_RESOLVE else part for part in name.split("/"))
    return name if name == key and len(name) <= LONGEST_NAME else _short(name, key, LONGEST_NEW_NAME)


def _short(name: str, key: str, most: int) -> str:
    """Cut a name to `most` bytes; the digest of its key distinguishes it from others with the same beginning."""
    raw = name.encode()
    return name if len(raw) <= most else f"{raw[: most - 13].decode(errors='ignore')}_{digest(key)}"


class Names:
    """A unique name that MLflow accepts for every key.

    `known` are names assigned before, `stored` those the run already has. With `as_files` a name is a path on disk, where `loss`
    and `loss/train` cannot both exist.
    """

    def __init__(self, *, as_files: bool, known: Mapping[str, str] | None = None, stored: Iterable[str] = ()) -> None:
        self.as_files = as_files
        self.given = dict(known or {})
        self._owned = set(self.given.values())
        self._stored = set(stored)

    def __call__(self, key: str) -> str:
        name = self.given.get(key)
        if name is None:
            name = self.given[key] = self._new(key)
            self._owned.add(name)
        return name

    def _new(self, key: str) -> str:
        name = legal(key)
        taken = name in self._owned or (name != key and name in self._stored)
        if not taken and not (self.as_files and self._meets(name)):
            return name
        return f"{_short(name.replace('/', '.'), key, LONGEST_NEW_NAME - 13)}_{digest(key)}"

    def _meets(self, name: str) -> bool:
        if any(len(part.encode()) > LONGEST_FILE_NAME for part in name.split("/")):
            return True
        return any(other.startswith(f"{name}/") or name.startswith(f"{other}/") for other in self._owned | self._stored)


class RunFile(NamedTuple):
    """A file to store with the run: its path and content."""

    path: str
    data: bytes


_FOLDERS = {"text": "texts", "table": "tables", "histogram": "histograms", "figure": "figures", "plotly": "figures"}


def files_of(item: Item, ms: int) -> RunFile:
    """Return the file for one logged text or media object."""
    data, ext = item.content
    if item.kind == "table":
        data, ext = json.dumps({"columns": item.value.columns, "data": item.value.rows}, default=str).encode(), "json"
    mark = hashlib.blake2b(b"%d %s" % (item.at, data), digest_size=4).hexdigest()
    return RunFile(f"{_FOLDERS.get(item.kind, item.kind)}/{_path(item.key)}/{item.step or 0}-{ms}-{mark}.{ext}", data)


def pictures_of(item: Item, ms: int) -> list[RunFile]:
    """Return an image and its preview under the names by which MLflow's UI finds them."""
    key, step, picture = item.key, item.step or 0, item.value.pil()
    png, small = io.BytesIO(), io.BytesIO()
    picture.save(png, "PNG")
    preview = picture.convert("RGB")
    preview.thumbnail((256, 256))
    preview.save(small, "WEBP")
    mark = uuid.uuid5(uuid.NAMESPACE_OID, f"{key}/{step}/{ms}/{item.at}/{hashlib.blake2b(png.getvalue()).hexdigest()}")
    word = _short(re.sub(r"[^a-zA-Z0-9_. ~-]", "_", key.replace("/", "~")), key, LONGEST_PART)
    stem = f"images/{word}+step+{step}+timestamp+{ms}+{mark}"
    return [RunFile(f"{stem}.png", png.getvalue()), RunFile(f"{stem}+compressed.webp", small.getvalue())]


def _path(key: str) -> str:
    return "/".join(_short(part, key, LONGEST_PART) for part in legal(key).replace(":", "_").split("/"))


def safe_path(name: str) -> str:
    """Return a file name as an artifact path: no part that leads elsewhere, no character MLflow refuses."""
    return _path(re.sub(r"[#%\\]", "_", name))


def is_folder(uri: str) -> bool:
    """Return whether an address is a folder of files."""
    return urlsplit(uri).scheme in ("", "file") and not uri.startswith(("databricks", "uc"))


def absolute(uri: str) -> str:
    """Return a local address that is the same from any working directory."""
    if uri.startswith("sqlite:///") and not uri.startswith("sqlite:////") and ":memory:" not in uri:
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"
    if is_folder(uri) and not uri.startswith("file:"):
        return Path(uri).absolute().as_uri()
    return uri


def create_database(uri: str) -> None:
    """Create the SQLite file of an absolute address, made aside: MLflow cannot open one that a kill left half-made."""
    from mlflow import MlflowClient

    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:////") or "?" in uri or path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as aside:
        MlflowClient(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
        with contextlib.suppress(FileExistsError):  # another process was quicker
            os.link(aside, path)


def quoted(text: str) -> str:
    """Return a text that is safe between quotes in MLflow's filters."""
    return text.replace("'", "%27").replace('"', "%22").replace("`", "%60")
