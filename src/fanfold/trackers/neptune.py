"""Neptune (legacy client): series below paths. What its types do not take has a place beside them, so that nothing is lost.

An offline run is a folder of operations for `neptune sync`. It cannot be opened again: each start makes a new folder,
and all of one run's folders are given one container id, by which `neptune sync` makes one run of them.
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
from ..media import Media
from .base import Adapter, Identity, Point, flat_config, on_main_process
from .tools import content_of, copied

LONGEST_TEXT = 1000  # of a string series; the client cuts the rest off
LONGEST_PARAMETER = 16384
LARGEST_IMAGE = 15_000_000  # the client skips larger ones
LONGEST_ID = 36
OURS = ("sys", "fanfold", "parameters", "artifacts", "monitoring", "source_code")
_QUIET: dict[str, Any] = {
    "capture_stdout": False,
    "capture_stderr": False,
    "capture_hardware_metrics": False,
    "capture_traceback": False,
    "source_files": [],
    "git_ref": False,
}
_KINDS = {"LogFloats": "number", "LogStrings": "text", "LogImages": "image", "UploadFile": "file"}


class NeptuneTracker(Adapter):
    """Log to a Neptune run; arguments go to `neptune.init_run`. `run_name` is the project when it reads workspace/project."""

    name: ClassVar[str] = "neptune"
    delivery: ClassVar[str] = "readable"
    delivery_online: ClassVar[str | None] = "at least once"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        super().__init__()
        self.run_name = run_name
        self.init_kwargs = kwargs
        self._directory: Path | None = None
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

    def adopt(self, identity: Identity) -> None:
        self._directory = identity.directory
        own: dict[str, Any] = {**_QUIET, "name": identity.name}
        if "with_id" not in self.init_kwargs:
            short = len(identity.run_id) <= LONGEST_ID
            own["custom_run_id"] = identity.run_id if short else str(uuid.uuid5(uuid.NAMESPACE_OID, identity.run_id))
        self.init_kwargs = own | self.init_kwargs

    @on_main_process
    def start(self) -> None:
        import neptune

        kwargs = dict(self.init_kwargs)
        if "/" in self.run_name:
            kwargs.setdefault("project", self.run_name)
        else:
            kwargs.setdefault("name", self.run_name)
        if self._directory is None:
            self.run = neptune.init_run(**kwargs)
            return
        self._gather()
        with _data_directory(self._directory):
            self.run = neptune.init_run(**kwargs)
        for owner, path in self._names().items():
            self._own(owner, path)

    @property
    def tracker(self) -> Any:
        return self.run

    @property
    def remote(self) -> str:
        return str(self.init_kwargs.get("with_id") or self.init_kwargs.get("custom_run_id"))

    def resume(self, remote: str) -> None:
        if "with_id" not in self.init_kwargs:
            self.init_kwargs["custom_run_id"] = remote

    @property
    def _offline(self) -> bool:
        return (self.init_kwargs.get("mode") or os.environ.get("NEPTUNE_MODE")) == "offline"

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep each value below `parameters`; types a field cannot have become text."""
        self._assign("parameters", values)

    def set_summary(self, values: Mapping[str, Any]) -> None:
        """Keep each value below `summary`."""
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

    def add(self, key: str, value: Any, point: Point) -> None:
        items = value if isinstance(value, list) else [value]
        for i, item in enumerate(items):
            text = item.text if getattr(item, "kind", "") == "text" else item
            if isinstance(text, (bool, int, float)):
                self._append_number(key, float(text), point)
            elif isinstance(text, str) and len(text) <= LONGEST_TEXT:
                self._append(self._path(key, "text"), text, point)
            elif isinstance(text, str):
                self._say_beside(key, "long", f"Neptune cuts texts at {LONGEST_TEXT} characters; longer ones are files")
                self._upload(key, "long", text, "txt", point, i)
            elif not isinstance(item, Media):  # an object of Neptune's own
                self._append(self._path(key, "image"), item, point)
            else:
                self._add_media(key, item, point, f"{i + 1} of {len(items)}" if len(items) > 1 else None, i)

    def _append_number(self, key: str, number: float, point: Point) -> None:
        if math.isfinite(number):
            self._append(self._path(key, "number"), number, point)
            return
        self._say_beside(key, "nonfinite", "Neptune's number series take neither NaN nor infinity; these are texts")
        self._append(self._path(key, "nonfinite"), str(number), point)

    def _append(self, path: str, value: Any, point: Point, **words: Any) -> None:
        self.run[path].append(value, step=point.step, timestamp=point.time, **words, **point.kwargs)

    def _say_beside(self, key: str, kind: str, what: str) -> None:
        notices.once(f"neptune:{kind}:{key}", f"{what}, at {self._path(key, kind)!r}. Nothing is lost; look for it there.")

    def _add_media(self, key: str, value: Any, point: Point, place: str | None, index: int) -> None:
        from neptune.types import File

        content, ext = _content(value)
        if ext == "png" and len(content) <= LARGEST_IMAGE:
            picture = File.from_content(content, extension="png")
            self._append(self._path(key, "image"), picture, point, name=getattr(value, "caption", None), description=place)
        else:
            self._upload(key, "file", content, ext, point, index)

    def _upload(self, key: str, kind: str, content: str | bytes, ext: str, point: Point, index: int) -> None:
        """Put a file below the key, one for each step; a second one of a step has a number."""
        from neptune.types import File

        path = f"{self._path(key, kind)}/step_{point.step}" + (f".{index}" if index else "")
        self._uploads[path] += 1
        again = f"_{self._uploads[path]}" if self._uploads[path] > 1 else ""
        self.run[path + again].upload(File.from_content(content, extension=ext))

    def _path(self, key: str, kind: str) -> str:
        """Return where a key's values of one kind live: a Neptune path is either a field of one type or a folder."""
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

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Append values to their series; Neptune's own objects (File) go to it as they are."""
        native = {key: value for key, value in values.items() if type(value).__module__.split(".")[0] == "neptune"}
        for key, value in native.items():
            self.run[key].append(value, step=step, **kwargs)
        super().log({key: value for key, value in values.items() if key not in native}, step, **kwargs)

    def settle(self) -> None:
        self.run.wait(disk_only=self._offline)

    def counts(self) -> dict[str, int] | None:
        """Count what the folders of this offline run hold; None online, where reading back costs a request per series."""
        if not self._offline or self._directory is None:
            return None
        names = {path: key for (key, _), path in self._names().items()}
        found: Counter[str] = Counter()
        for operation in operations(self._directory):
            path, count = _counted(operation)
            found[names.get(path, path)] += count
        return dict(+found)

    def _names(self) -> dict[tuple[str, str], str]:
        """Read which keys live under which paths: their own, unless it says otherwise."""
        if not self._offline or self._directory is None:
            return {}
        found: dict[str, tuple[str, str]] = {}
        for operation in operations(self._directory):
            path = operation["path"]
            if path[:2] == ["fanfold", "names"]:
                key, kind, place = json.loads(operation["value"])
                found[place] = (key, kind)
            elif operation["type"] in _KINDS and path[0] not in OURS:
                place = "/".join(path[:-1] if operation["type"] == "UploadFile" else path)
                found.setdefault(place, (place, _KINDS[operation["type"]]))
        return {owner: place for place, owner in found.items()}

    def artifact(self, path: Path, name: str) -> None:
        """Upload a copy: Neptune notes the path only, and the file must live until it is sent."""
        home = (self._directory or Path.cwd() / ".neptune") / "artifacts"
        self.run[self._path(f"artifacts/{name}", "parameter")].upload(str(copied(path, home, name).absolute()))

    @on_main_process
    def finish(self) -> None:
        self.run.stop()

    def close(self, status: str) -> None:
        self.run["fanfold/status"] = status
        self.run["sys/failed"] = status != "finished"
        self.finish()
        self._gather()

    def _gather(self) -> None:
        """Give all folders of this offline run one container id: `neptune sync` then makes one run of them."""
        if not self._offline or self._directory is None or "custom_run_id" not in self.init_kwargs:
            return
        wanted = str(uuid.uuid5(uuid.NAMESPACE_OID, self.init_kwargs["custom_run_id"]))
        for folder in (self._directory / "offline").glob("run__*"):
            kind, _, *rest = folder.name.split("__")
            folder.rename(folder.with_name("__".join([kind, wanted, *rest])))


class _data_directory:  # noqa: N801 - reads as a statement
    """Let Neptune keep its files in a folder of ours; it reads the place from the environment only."""

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
    """Read the operations of all offline folders, oldest first, each up to its torn end."""
    for file in sorted(folder.glob("offline/run__*/data-*.log"), key=_age):
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    yield dict(json.loads(line)["obj"])
                except ValueError:  # the last line of a relay that was killed
                    break


def _age(file: Path) -> tuple[str, int]:
    try:
        created = str(json.loads((file.parent / "metadata.json").read_text(encoding="utf-8"))["createdAt"])
    except (OSError, ValueError, KeyError):
        created = ""
    return created, int(file.stem.split("-")[1])


def _counted(operation: dict[str, Any]) -> tuple[str, int]:
    """Tell the path an operation adds points to, and how many: a list of images or files is one point."""
    kind, path = operation["type"], operation["path"]
    if kind in ("LogFloats", "LogStrings"):
        return "/".join(path), len(operation["values"])
    if kind == "LogImages":
        places = [value["value"].get("description") for value in operation["values"]]
        return "/".join(path), sum(place is None or place.startswith("1 of ") for place in places)
    if kind == "UploadFile" and path[0] not in ("artifacts", "source_code"):
        return "/".join(path[:-1]), int("." not in path[-1])
    return "", 0


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


def _content(value: Any) -> tuple[bytes, str]:
    """Return media as the content of a file, and its extension."""
    if value.kind == "histogram":
        return json.dumps({"edges": value.edges.tolist(), "counts": value.counts.tolist()}).encode(), "json"
    return content_of(value)
