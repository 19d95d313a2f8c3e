"""Neptune (legacy client): series under paths. Values its types cannot hold are stored next to them, so that nothing is lost.

An offline run is a folder of operations for `neptune sync`. It cannot be reopened: each start creates a new folder, and all
folders of one run get one container id, from which `neptune sync` creates one run.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ..errors import notices
from ._neptune_offline import OURS, counted, data_directory, gather, names_in, operations
from .base import Identity, Point, Refusal, flat_config
from .destination import Destination, Item
from .face import Tracker
from .tools import copied

LONGEST_TEXT = 1000  # of a string series; the client cuts the rest off
LONGEST_PARAMETER = 16384
LARGEST_IMAGE = 15_000_000  # the client skips larger ones
LONGEST_ID = 36
ASSIGN = "fanfold_assign"  # in a point's kwargs: its numbers are single values, of which the latest counts, not series
_QUIET: dict[str, Any] = {
    "capture_stdout": False, "capture_stderr": False, "capture_hardware_metrics": False, "capture_traceback": False,
    "source_files": [], "git_ref": False,
}  # fmt: skip


class Neptune(Destination):
    """Log to a Neptune run; arguments go to `neptune.init_run`. `run_name` is the project if it reads workspace/project."""

    name: ClassVar[str] = "neptune"
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "at least once"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._home: Path | None = None  # of our run
        self._folder: Path | None = None  # the same if offline
        self._run_id: str | None = None
        self._paths: dict[tuple[str, str], str] = {}
        self._fields: dict[str, tuple[str, str]] = {}
        self._uploads: Counter[str] = Counter()
        self._parameters: dict[str, type] = {}

    @classmethod
    def unusable(cls) -> str | None:
        if os.environ.get("NEPTUNE_MODE") in ("offline", "debug"):
            return None
        missing = [name for name in ("NEPTUNE_API_TOKEN", "NEPTUNE_PROJECT") if not os.environ.get(name)]
        return f"{' and '.join(missing)} not set; set them, or NEPTUNE_MODE=offline" if missing else None

    # Opening and closing

    def open(self, identity: Identity | None, remote: str | None = None) -> None:
        if self.given is not None:
            self.run = self.given
            return
        import neptune

        arguments = dict(self.init_kwargs) if identity is None else {**_QUIET, "name": identity.name, **self.init_kwargs}
        arguments.setdefault("project" if "/" in self.run_name else "name", self.run_name)
        if "with_id" not in arguments and (remote is not None or identity is not None):
            arguments["custom_run_id"] = remote or arguments.get("custom_run_id") or _short(identity.run_id if identity else "")
        self._run_id = arguments.get("with_id") or arguments.get("custom_run_id")
        if identity is None:
            self.run = neptune.init_run(**arguments)
            return
        self._home = identity.directory
        offline = (arguments.get("mode") or os.environ.get("NEPTUNE_MODE")) == "offline"
        self._folder = identity.directory if offline else None
        self._gather()
        with data_directory(identity.directory):
            self.run = neptune.init_run(**arguments)
        for owner, path in (names_in(self._folder) if self._folder else {}).items():
            self._own(owner, path)

    @property
    def remote(self) -> str:
        return str(self._run_id)

    def close(self, status: str) -> None:
        self.run["fanfold/status"] = status
        self.run["sys/failed"] = status != "finished"
        self.finish()
        self._gather()

    def finish(self) -> None:
        self.run.stop()

    def _gather(self) -> None:
        if self._folder is not None and self._run_id is not None and "with_id" not in self.init_kwargs:
            gather(self._folder, self._run_id)

    # Config, description and files

    def set_config(self, values: dict[str, Any]) -> None:
        """Store each value under `parameters`; types a field cannot have become text."""
        self._assign("parameters", values)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store each value under `summary`."""
        self._assign("summary", values)

    def _assign(self, folder: str, values: Mapping[str, Any]) -> None:
        for key, value in flat_config(values).items():
            path, kept = self._path(f"{folder}/{key}", "parameter"), _parameter(value)
            if self._parameters.setdefault(path, type(kept)) is not type(kept):
                self.run.pop(path)  # a field keeps its first type
                self._parameters[path] = type(kept)
            self.run[path] = kept

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        if name:
            self.run["sys/name"] = name
        if notes:
            self.run["sys/description"] = notes
        if tags:
            self.run["sys/tags"].add(list(tags))
        if group:
            self.run["sys/group_tags"].add([group])

    def artifact(self, path: Path, name: str) -> None:
        """Upload a copy: Neptune records only the path, and the file must exist until it is sent."""
        home = (self._home or Path.cwd() / ".neptune") / "artifacts"
        self.run[self._path(f"artifacts/{name}", "parameter")].upload(str(copied(path, home, name).absolute()))

    # Values

    def number(self, key: str, value: float, point: Point) -> None:
        if ASSIGN in point.kwargs:
            self.run[self._path(key, "parameter")] = float(value)
        elif math.isfinite(value):
            self._append(self._path(key, "number"), float(value), point)
        else:
            self._warn_beside(key, "nonfinite", "Neptune's number series take neither NaN nor infinity; these are texts")
            self._append(self._path(key, "nonfinite"), str(float(value)), point)

    def take_text(self, item: Item) -> None:
        if len(item.text) <= LONGEST_TEXT:
            self._append(self._path(item.key, "text"), item.text, item.point)
            return
        self._warn_beside(item.key, "long", f"Neptune cuts texts at {LONGEST_TEXT} characters; longer ones are files")
        self._upload(item, "long", item.text, "txt")

    def take_native(self, item: Item) -> None:
        self._append(self._path(item.key, "image"), item.value, item.point)

    def take_file(self, item: Item) -> None:
        from neptune.types import File

        content, ext = item.content
        if ext == "png" and len(content) <= LARGEST_IMAGE:
            picture = File.from_content(content, extension="png")
            place = f"{item.at + 1} of {item.of}" if item.of > 1 else None
            self._append(self._path(item.key, "image"), picture, item.point, name=item.caption, description=place)
        else:
            self._upload(item, "file", content, ext)

    def _append(self, path: str, value: Any, point: Point, **words: Any) -> None:
        self.run[path].append(value, step=point.step, timestamp=point.time, **words, **point.kwargs)

    def _upload(self, item: Item, kind: str, content: str | bytes, ext: str) -> None:
        """Store a file under the key, one per step; a second one at a step gets a number."""
        from neptune.types import File

        path = f"{self._path(item.key, kind)}/step_{item.step}" + (f".{item.at}" if item.at else "")
        self._uploads[path] += 1
        again = f"_{self._uploads[path]}" if self._uploads[path] > 1 else ""
        self.run[path + again].upload(File.from_content(content, extension=ext))

    def _warn_beside(self, key: str, kind: str, what: str) -> None:
        self.warn(f"{kind}:{key}", f"{what}, at {self._path(key, kind)!r}. Nothing is lost; look for it there.")

    def _path(self, key: str, kind: str) -> str:
        """Return the path for a key's values of one kind: a Neptune path is either a field of one type or a folder."""
        if (key, kind) not in self._paths:
            base = "/".join(part for part in key.split("/") if part) or "unnamed"
            if kind != "parameter" and base.split("/")[0] in OURS:
                base = f"logged/{base}"
            base += f"_{kind}" if kind in ("nonfinite", "long") else ""
            path = next(name for name in _spellings(base, kind) if self._free(name))
            self._own((key, kind), path)
            if path != key:
                self.run[f"fanfold/names/{len(self._paths)}"] = json.dumps([key, kind, path])
        return self._paths[key, kind]

    def _own(self, owner: tuple[str, str], path: str) -> None:
        self._paths[owner], self._fields[path] = path, owner

    def _free(self, path: str) -> bool:
        parts = path.split("/")
        above = any("/".join(parts[:i]) in self._fields for i in range(1, len(parts) + 1))
        return not above and not any(field.startswith(f"{path}/") for field in self._fields)

    def record(self, values: Mapping[str, Any], step: int | None, kwargs: Mapping[str, Any]) -> Sequence[Refusal]:
        """Append values to their series; Neptune's own objects (File) are passed on unchanged."""
        native = {key: value for key, value in values.items() if type(value).__module__.split(".")[0] == "neptune"}
        for key, value in native.items():
            self.run[key].append(value, step=step, **kwargs)
        return super().record({key: value for key, value in values.items() if key not in native}, step, kwargs)

    def settle(self) -> None:
        mode = self.init_kwargs.get("mode") or os.environ.get("NEPTUNE_MODE")
        self.run.wait(disk_only=mode == "offline")

    def counts(self) -> dict[str, int] | None:
        """Count points in the folders of this offline run; None online, where reading back costs a request per series."""
        if self._folder is None:
            return None
        names = {path: key for (key, _), path in names_in(self._folder).items()}
        found: Counter[str] = Counter()
        for operation in operations(self._folder):
            path, count = counted(operation)
            found[names.get(path, path)] += count
        return dict(+found)


class NeptuneTracker(Tracker):
    """Log to a Neptune run; arguments go to `neptune.init_run`. `run_name` is the project if it reads workspace/project."""

    destination_class = Neptune


def _short(run_id: str) -> str:
    return run_id if len(run_id) <= LONGEST_ID else str(uuid.uuid5(uuid.NAMESPACE_OID, run_id))


def _spellings(base: str, kind: str) -> Iterator[str]:
    yield base
    yield f"{base}_{kind}"
    yield base.replace("/", ".")
    i = 2
    while True:
        yield f"{base.replace('/', '.')}_{i}"
        i += 1


def _parameter(value: Any) -> bool | int | float | str:
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) < 1 << 31):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    text = value if isinstance(value, str) else str(value)
    if len(text) > LONGEST_PARAMETER:
        notices.once(
            "neptune:parameter", f"Neptune cuts parameters at {LONGEST_PARAMETER} characters. The journal has them whole."
        )
    return text
