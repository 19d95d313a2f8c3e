"""Folders of Neptune's 1.x client: operations as JSON lines, which are replayed. They were waiting to be sent.

`<folder>/run__<id>__<pid>__<word>/data-<n>.log`; a run that was started several times has several folders with one id.
"""

from __future__ import annotations

import base64
import itertools
import re
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

from ..errors import outcome
from ..journal.directory import is_link
from ..journal.files import open_regular
from ..media import Image
from ..plain import from_json
from .events import Artifact, Console, Event, Found, Start, Values
from .neptune_run import MONITORING, STEP_KEY, Attributes, file_event
from .reading import Account, Gather, StepAxis, json_lines, nanoseconds, number, read_json, resumed

REST_SECONDS = 600.0  # a folder has no status: one that has not grown for this long belongs to a run that has ended
FIRST = 200  # operations that are read to know what a run is called
MICRO = 6  # decimals of Neptune's steps
_LOG = re.compile(r"data-([0-9]{1,9})\.log$")
_CLEARS = {"ClearFloatLog", "ClearStringLog", "ClearImageLog", "DeleteAttribute"}
_ASSIGNS = {"AssignFloat", "AssignInt", "AssignBool", "AssignString", "AssignDatetime"}
_LOGS = {"LogFloats", "LogStrings", "LogImages"}


def is_run(path: Path) -> bool:
    """Return whether this is the folder of one start of a run."""
    return (path / "metadata.json").is_file() and bool(_logs(path)) and isinstance(read_json(path / "metadata.json"), dict)


def is_home(path: Path) -> bool:
    """Return whether this folder has such folders."""
    return any(is_run(folder) for folder in path.glob("run__*"))


def _logs(folder: Path) -> list[Path]:
    found = [path for path in (*folder.glob("data-*.log"), *folder.glob("exec-*/data-*.log")) if _LOG.match(path.name)]
    return sorted(found, key=lambda path: (path.parent.name, int(path.stem.partition("-")[2])))


def find(path: Path) -> Iterator[Found]:
    """Yield the run of a folder, or the runs of the folders in it."""
    starts: dict[str, list[tuple[str, Path]]] = {}
    for folder in [path] if is_run(path) else sorted(path.glob("run__*")):
        about = read_json(folder / "metadata.json") if is_run(folder) else None
        if isinstance(about, dict):
            parts = folder.name.split("__")
            run = str(about.get("containerId") or (parts[1] if len(parts) > 1 else folder.name))
            run = parts[1] if len(parts) > 1 and parts[0] == "run" else run  # fanfold gives all starts of a run one id there
            starts.setdefault(run, []).append((str(about.get("createdAt") or ""), folder))
    for run, found in starts.items():
        folders = tuple(folder for _, folder in sorted(found))
        replay = Replay(folders)
        replay.survey(most=FIRST)
        values = replay.attributes.values
        ours = values.get("fanfold/run")
        yield Found(
            kind="neptune", id=run, paths=folders, project=str(values.get("fanfold/project") or "neptune"),
            name=str(values.get("sys/name") or run), fanfold_id=str(ours) if ours else None,
        )  # fmt: skip


def read(found: Found, position: Any) -> Iterator[Event]:
    """Yield a run's events."""
    replay = Replay(found.paths)
    replay.survey()
    yield from resumed(replay.events(), position)


class Replay:
    """The operations of one run's folders, in order."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self.folders = folders
        self.account = Account()
        self.attributes = Attributes()
        self.cleared: dict[str, int] = {}  # path → the last operation that emptied it
        self.decimals = 0
        self.gather = Gather()
        self.steps: dict[str, float] = {}
        self.axis = StepAxis(STEP_KEY)
        self.last: int | None = None
        self.names: dict[str, str] = {}

    def _operations(self, account: Account) -> Iterator[tuple[int, Path, dict[str, Any], str, int | None]]:
        """Yield each operation with its place, folder, path and time."""
        place = 0
        for folder in self.folders:
            for log in _logs(folder):
                try:
                    with open_regular(log) as file:
                        for line in json_lines(file, account, "operations"):
                            place += 1
                            entry = line.get("obj") if isinstance(line, dict) else None
                            path = entry.get("path") if isinstance(entry, dict) else None
                            if entry is None or not isinstance(path, list):
                                account.leave("operations", "they have no path", str(line)[:80])
                                continue
                            yield place, folder, entry, "/".join(map(str, path)), _seconds(line.get("at"))
                except OSError as error:
                    account.leave("operations", f"cannot be read: {error.strerror}", log.name)

    def survey(self, most: int | None = None) -> None:
        """Replay the single values, and see which series were emptied and how fine the steps are."""
        values = self.attributes.values
        for place, _, entry, path, _ in itertools.islice(self._operations(Account()), most):
            kind = entry.get("type")
            if kind in _ASSIGNS:
                values[path] = _assigned(str(kind), entry.get("value"))
            elif kind in ("AddStrings", "RemoveStrings", "ClearStringSet"):
                have = values.get(path)
                words = set(have) if isinstance(have, list) and kind != "ClearStringSet" else set()
                given = {str(word) for word in entry.get("values") or ()}
                values[path] = sorted(words | given if kind == "AddStrings" else words - given)
            elif kind in _CLEARS:
                self.cleared[path] = place
                values.pop(path, None)
            elif kind in _LOGS:
                for point in entry.get("values") or ():
                    self._see_step(point)

    def _see_step(self, point: Any) -> None:
        step = point.get("step") if isinstance(point, dict) else None
        if isinstance(step, float) and abs(step) < 1 << 40 and not step.is_integer():
            exponent = Decimal(repr(step)).normalize().as_tuple().exponent
            self.decimals = max(self.decimals, min(MICRO, -int(exponent)))

    def events(self) -> Iterator[Event]:
        """Yield everything."""
        self.names = self.attributes.names() if self.attributes.ours else {}
        start, *facts = self.attributes.began()
        seen: Path | None = None
        for place, folder, entry, path, moment in self._operations(self.account):
            if folder != seen:
                seen = folder
                yield from self.gather.flush()
                yield Start(time_ns=self._created(folder) or getattr(start, "time_ns", None) or moment, attempt=folder.name)
                yield from facts
                facts = []
            self.last = max(self.last or 0, moment or 0) or None
            made, error = outcome(list, self._operation(place, folder, entry, path, moment))
            if error is not None:
                self.account.leave("operations", f"cannot be read: {type(error).__name__}", path)
            yield from made or ()
        yield from self.gather.flush()
        yield from self.account.events()
        if "fanfold/status" in self.attributes.values or time.time() - (self.last or 0) / 1e9 > REST_SECONDS:
            yield from self.attributes.ended(self.last)

    @staticmethod
    def _created(folder: Path) -> int | None:
        about = read_json(folder / "metadata.json")
        return nanoseconds(about.get("createdAt")) if isinstance(about, dict) else None

    def _operation(self, place: int, folder: Path, entry: dict[str, Any], path: str, moment: int | None) -> Iterator[Event]:
        kind = entry.get("type")
        if place < self.cleared.get(path, 0) or kind in _CLEARS | _ASSIGNS:
            return
        if kind in _LOGS:
            for point in entry["values"]:
                yield from self._point(str(kind), path, point)
        elif kind in ("UploadFile", "UploadFileContent"):
            yield from self._upload(folder, entry, path, moment)
        elif kind == "UploadFileSet":
            if entry.get("file_globs"):
                self.account.leave("sets of files", "Neptune only recorded their patterns", path)
        elif kind not in ("AddStrings", "RemoveStrings", "ClearStringSet", "ConfigFloatSeries"):
            self.account.leave(f"operations {kind}", "they need Neptune's server", path)

    # Series

    def _point(self, kind: str, path: str, point: Any) -> Iterator[Event]:
        step, time_ns, value = self._step(path, point.get("step")), _seconds(point.get("ts")), point.get("value")
        whole = None if step is None else round(step * 10**self.decimals)
        key = self.names.get(path, path)
        if kind == "LogFloats":
            made = number(from_json(value))
            if made is None:
                self.account.leave("points", "they are not numbers", f"{path}: {value!r}"[:80])
                return
            yield from self._number(key, path, float(made), step, whole, time_ns)
        elif kind == "LogStrings":
            yield from self.gather.flush()
            if path.startswith(MONITORING) and path.rpartition("/")[2] in ("stdout", "stderr"):
                yield Console(text=str(value), time_ns=time_ns, stream=path.rpartition("/")[2])
            elif self.attributes.ours and path.endswith("_nonfinite") and path in self.names:
                yield from self._number(key, path, float(value), step, whole, time_ns)
            else:
                yield Values(step=whole, time_ns=time_ns, values={key: str(value)})
        else:
            picture = base64.b64decode(value["data"], validate=True)
            words = [word for word in (value.get("name"), value.get("description")) if word]
            caption = (value.get("name") if self.attributes.ours else ": ".join(words)) or None
            yield Values(step=whole, time_ns=time_ns, values={key: Image(picture, caption=caption)})

    def _number(
        self, key: str, path: str, value: float, step: float | None, whole: int | None, time_ns: int | None
    ) -> Iterator[Event]:
        if path.startswith(MONITORING):
            yield from self.gather.add(None, time_ns, {key: value}, system=True)
            return
        columns: dict[str, Any] = {key: value}
        if self.decimals and step is not None:
            yield from self.axis.of([key])
            columns[STEP_KEY] = float(step)
        yield from self.gather.add(whole, time_ns, columns)

    def _step(self, path: str, step: Any) -> float | None:
        """Return a step; without one, Neptune counts on from the last."""
        if step is None:
            step = self.steps.get(path, -1.0) + 1
        if not isinstance(step, (int, float)) or not abs(step) < 1 << 40:
            return None
        self.steps[path] = step
        return step

    # Files

    def _upload(self, folder: Path, entry: dict[str, Any], path: str, moment: int | None) -> Iterator[Event]:
        ext = re.sub(r"[^A-Za-z0-9.]", "", str(entry.get("ext") or "bin"))[:20]
        if "file_content" in entry:
            self.account.leave("files", "they are inside the log, as older clients wrote them", path)
            return
        place = self._place(folder, entry)
        if place is None:
            self.account.leave("files", "Neptune only recorded where they were, and that is outside of its folder", path)
            return
        home, _, last = path.rpartition("/")
        step = re.match(r"step_(-?[0-9]{1,18})", last) if self.attributes.ours else None
        if step is None:
            name = path.removeprefix("artifacts/") if self.attributes.ours else path
            yield Artifact(name=name, files=[(f"{name.rpartition('/')[2]}.{ext}", place)], time_ns=moment)
            return
        key = self.names.get(home, home)
        if ext == "txt":
            yield Values(step=int(step[1]), time_ns=moment, values={key: place.read_text("utf-8", "replace")})
        else:
            yield file_event(key, place, int(step[1]), moment)

    def _place(self, folder: Path, entry: dict[str, Any]) -> Path | None:
        """Return where an uploaded file is, if that is inside Neptune's folder, or beside a folder named .neptune."""
        name, path = entry.get("tmp_file_name"), entry.get("file_path")
        data = folder.parent.parent
        allowed = (folder / "upload_path" if name else data.parent if data.name == ".neptune" else data).resolve()
        place = folder / "upload_path" / str(name) if name else Path(str(path))
        resolved = place.resolve()
        if not (name or path) or is_link(folder / "upload_path") or not resolved.is_relative_to(allowed):
            return None
        hidden = any(part.startswith(".") for part in resolved.relative_to(allowed).parts)  # such as keys in a home folder
        return resolved if resolved.is_file() and (name or not hidden) else None


def _seconds(value: Any) -> int | None:
    found = number(value)
    return int(found * 1e6) * 1000 if found is not None and 0 < found < 1 << 33 else None


def _assigned(kind: str, value: Any) -> Any:
    if kind == "AssignDatetime":
        made, _ = outcome(lambda: datetime.fromtimestamp(value / 1000, timezone.utc))
        return made or value
    return from_json(value) if kind == "AssignFloat" else value
