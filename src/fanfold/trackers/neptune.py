"""Neptune (legacy client): series under paths. Values its types cannot hold are stored next to them, so that nothing is lost.

An offline run is a folder of operations for `neptune sync`. It cannot be reopened: each start creates a new folder, and all
folders of one run get one container id, from which `neptune sync` creates one run.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ._neptune_offline import Paths, begun_lists, counted, field_value, gather, names_in, operations, short_id
from .base import Identity, Point, flat_config
from .destination import Destination, Item
from .face import Tracker
from .tools import copied, environment

LONGEST_TEXT = 1000  # of a string series; the client cuts the rest off
LARGEST_IMAGE = 15_000_000  # the client skips larger ones
ASSIGN = "fanfold_assign"  # in a point's kwargs: its numbers are single values, of which the latest counts, not series
_QUIET: dict[str, Any] = {
    "capture_stdout": False, "capture_stderr": False, "capture_hardware_metrics": False, "capture_traceback": False,
    "source_files": [], "git_ref": False,
}  # fmt: skip


class Neptune(Destination):
    """Log to a Neptune run; arguments go to `neptune.init_run`. `run_name` is the project if it reads workspace/project."""

    name = "neptune"
    ends_with = "stop"
    delivery = "readable"
    delivery_online = "at least once"
    _run_id: str | None = None

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self._paths = Paths()
        self._uploads: Counter[str] = Counter()
        self._begun: dict[str, int] = {}  # by path: images of a list that were sent before a kill
        self._parameters: dict[str, type] = {}

    @classmethod
    def unusable(cls) -> str | None:
        if os.environ.get("NEPTUNE_MODE") in ("offline", "debug"):
            return None
        missing = [name for name in ("NEPTUNE_API_TOKEN", "NEPTUNE_PROJECT") if not os.environ.get(name)]
        return f"{' and '.join(missing)} not set; set them, or NEPTUNE_MODE=offline" if missing else None

    def begin(self, identity: Identity | None, remote: str | None) -> Any:
        import neptune

        arguments = {**({} if identity is None else {**_QUIET, "name": identity.name}), **self.init_kwargs}
        arguments.setdefault("project" if "/" in self.run_name else "name", self.run_name)
        if identity is None:
            return neptune.init_run(**arguments)
        if "with_id" not in arguments:
            arguments["custom_run_id"] = remote or arguments.get("custom_run_id") or short_id(identity.run_id)
        self._run_id = arguments.get("with_id") or arguments["custom_run_id"]
        self._gather(identity)
        with environment("NEPTUNE_DATA_DIRECTORY", str(identity.directory)):
            run = neptune.init_run(**arguments)
        run["fanfold/run"], run["fanfold/project"] = identity.run_id, identity.project  # by which `fanfold import` recognises it
        self._paths.update(names_in(identity.directory) if self._offline else {})
        return run

    @property
    def _offline(self) -> bool:
        return (self.init_kwargs.get("mode") or os.environ.get("NEPTUNE_MODE")) == "offline"

    @property
    def remote(self) -> str | None:
        return self._run_id

    def close(self, status: str) -> None:
        self.run["fanfold/status"] = status
        self.run["sys/failed"] = status != "finished"
        self.finish()
        if self.identity is not None:
            self._gather(self.identity)

    def _gather(self, identity: Identity) -> None:
        if self._offline and "with_id" not in self.init_kwargs:
            gather(identity.directory, str(self._run_id))

    def set_config(self, values: dict[str, Any]) -> None:
        """Store each value under `parameters`; types a field cannot have become text."""
        self._assign("parameters", values)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Store each value under `summary`."""
        self._assign("summary", values)

    def _assign(self, folder: str, values: Mapping[str, Any]) -> None:
        for key, value in flat_config(values).items():
            path, kept = self._path(f"{folder}/{key}", "parameter"), field_value(value)
            if self._parameters.setdefault(path, type(kept)) is not type(kept):
                self.run.pop(path)  # a field keeps its first type
                self._parameters[path] = type(kept)
            self.run[path] = kept

    def describe(self, *, name: str | None, tags: Sequence[str], notes: str | None, group: str | None) -> None:
        for field, text in (("name", name), ("description", notes)):
            if text:
                self.run[f"sys/{field}"] = text
        for field, words in (("tags", list(tags)), ("group_tags", [group] if group else [])):
            if words:
                self.run[f"sys/{field}"].add(words)

    def artifact(self, path: Path, name: str) -> None:
        """Upload a copy: Neptune records only the path, and the file must exist until it is sent."""
        home = (self.identity.directory if self.identity else Path.cwd() / ".neptune") / "artifacts"
        self.run[self._path(f"artifacts/{name}", "parameter")].upload(str(copied(path, home, name).absolute()))

    def numbers(self, place: str, rows: Sequence[tuple[float, int, float]]) -> None:
        """Extend a series: one operation for a hundred numbers, not one for each."""
        values, steps, times = zip(*rows, strict=True)
        self.run[self._path(place, "number")].extend(list(values), steps=list(steps), timestamps=list(times))

    def number(self, key: str, value: float, point: Point) -> None:
        if not point.kwargs and math.isfinite(value) and point.step is not None and point.time is not None:
            self._path(key, "number")  # its name is recorded before its values
            self.wait(key, (float(value), point.step, point.time))
            return
        self.send_waiting(key)
        if ASSIGN in point.kwargs:
            self.run[self._path(key, "parameter")] = float(value)
        elif math.isfinite(value):
            self._append(self._path(key, "number"), float(value), point)
        else:
            self._warn_beside(key, "nonfinite", "Neptune's number series take neither NaN nor infinity; these are texts")
            self._append(self._path(key, "nonfinite"), str(float(value)), point)

    def take(self, item: Item) -> Any:
        self.send_waiting(item.key)
        return super().take(item)

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
            path = self._path(item.key, "image")
            if item.at < self._begun.get(path, 0):  # a killed relay had begun this list
                return
            self._begun.pop(path, None)
            place = f"{item.at + 1} of {item.of}" if item.of > 1 else None
            self._append(path, picture, item.point, name=item.caption, description=place)
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
        """Return the path for a key's values of one kind; a path other than the key is recorded for the next start."""
        new = (key, kind) not in self._paths
        path = self._paths[key, kind]
        if new and path != key:
            self.run[f"fanfold/names/{len(self._paths)}"] = json.dumps([key, kind, path])
        return path

    def settle(self) -> None:
        self.run.wait(disk_only=self._offline)

    def counts(self) -> dict[str, int] | None:
        """Count points in the folders of this offline run; None online, where reading back costs a request per series."""
        if self.identity is None or not self._offline:
            return None
        names = {path: key for (key, _), path in names_in(self.identity.directory).items()}
        found: Counter[str] = Counter()
        for path, count in map(counted, operations(self.identity.directory)):
            found[names.get(path, path)] += count
        self._begun = begun_lists(self.identity.directory)
        return dict(+found)


class NeptuneTracker(Tracker):
    destination_class = Neptune
