"""ClearML's offline sessions: a folder or zip with task.json, metrics.jsonl, log.jsonl and the files of `data`.

Each line of the two `.jsonl` files is a list of events. A scalar has a title and a series: `loss` and `train` become
`loss/train`, unless fanfold itself sent the run there, which gets its own keys back.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import outcome
from ..journal.files import is_folder
from ..media import Figure, Media, Table, Text
from ..plain import plain
from ..trackers._clearml_session import METRICS, TAG
from ..trackers.clearml import LISTED, RUN, SECTION, STATUS, key_of
from ..values import LONG_TEXT
from .events import Artifact, Console, End, Event, Facts, Found, Start, Values
from .reading import (
    UNREADABLE,
    Account,
    Files,
    Gather,
    json_lines,
    media_bytes,
    media_of,
    number,
    number_in,
    opened_files,
    reread,
    step_of,
)

TASK, LOG = "task.json", "log.jsonl"
_NAME = re.compile("offline-[0-9a-f]{32}")  # of a session
SINGLE = -(1 << 31)  # the iteration of a value without one
_SUMMARY = "Summary"  # ClearML's title for such values
_PACKAGE = re.compile(r"(?:^|\\n|\n)([A-Za-z0-9_.-]+) == ([^\s\\'\"]+)")


class ClearMLImporter:
    """Offline sessions of ClearML."""

    kind = "clearml"
    title = "ClearML"
    says_end = True

    def find(self, path: Path) -> Iterator[Found]:
        if path.suffix == ".zip" and is_folder(path.with_suffix("")) and (path.with_suffix("") / TASK).is_file():
            path = path.with_suffix("")  # ClearML leaves the folder beside the zip that it made of it
        task = _task(path)
        if task is None:
            return
        project, name = task.get("project_name") or task.get("project"), task.get("name")
        yield Found(
            kind=self.kind, id=str(task["id"]), paths=(path.absolute(),), project=str(project) if project else "imported",
            name=str(name) if name else "", fanfold_id=_our_run(task),
        )  # fmt: skip

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        yield from reread(lambda: _Reading(found).events(), position)


def _task(path: Path) -> dict[str, Any] | None:
    """Return the task of a session; None if the path is not one."""
    if not (is_folder(path) and (path / TASK).is_file()) and not (path.suffix == ".zip" and path.is_file()):
        return None
    unreadable = {"id": path.stem} if _NAME.fullmatch(path.stem) else None  # still a session: its run gets an account of it
    try:
        with opened_files(path) as files:
            task = json.loads(files.read(TASK)) if TASK in files.names else None
    except UNREADABLE:
        return unreadable
    if not isinstance(task, dict) or not isinstance(task.get("id"), str) or not isinstance(task.get("type"), str):
        return unreadable
    return task if "offline_folder" in task or task["id"].startswith("offline-") else None


def _our_run(task: dict[str, Any]) -> str | None:
    """Return the id of the fanfold run that was sent there: a property of a session, a tag of a task from a server."""
    tags = task.get("tags")
    ours = [tag for tag in tags if isinstance(tag, str) and tag.startswith(TAG)] if isinstance(tags, list) else []
    return str(_properties(task).get(RUN) or "") or (ours[0].removeprefix(TAG) if ours else None)


def _properties(task: dict[str, Any]) -> dict[str, Any]:
    sections = task.get("hyperparams")
    found = sections.get("properties") if isinstance(sections, dict) else None
    items = found.items() if isinstance(found, dict) else ()
    return {str(name): one.get("value") for name, one in items if isinstance(one, dict)}


class _Reading:
    """One pass over a session."""

    def __init__(self, found: Found) -> None:
        self.path, self.ours = found.paths[0], found.fanfold_id is not None
        self.left, self.gather = Account(), Gather()
        self.task: dict[str, Any] = _task(self.path) or {}
        self.single: dict[str, Any] = {}
        self.lists: dict[tuple[str, int | None], list[Media | str]] = {}
        self.last: int | None = None

    def events(self) -> Iterator[Event]:
        try:
            files = opened_files(self.path)
        except UNREADABLE as error:
            self.left.leave("session", f"it cannot be read ({error})", self.path)
            yield from self.left.events()
            return
        if "type" not in self.task:
            self.left.leave("task", f"its {TASK} cannot be read", self.path)
        with files, tempfile.TemporaryDirectory(prefix="fanfold-import-") as scratch:
            yield Start(time_ns=self._first_time(files))
            yield from self._description()
            for event in self._lines(files, METRICS):
                yield from self._metric(event, files)
            yield from self.gather.flush()
            for event in self._lines(files, LOG):
                yield from self._printed(event)
            yield from self._artifacts(files, Path(scratch))
        if self.single:
            yield Facts(summary=plain(self.single))
        status = _properties(self.task).get(STATUS)
        if status or self.path.suffix == ".zip" or self.path.with_suffix(".zip").is_file():
            yield End(status=str(status or "finished"), time_ns=self.last)
        yield from self.left.events()

    def _lines(self, files: Files, name: str) -> Iterator[dict[str, Any]]:
        if name not in files.names:
            return
        try:
            with files.open(name) as file:
                for line in json_lines(file, self.left, "event"):
                    for event in line if isinstance(line, list) else [line]:
                        if isinstance(event, dict):
                            yield event
                        else:
                            self.left.leave("event", "it is not one of ClearML's", str(event)[:80])
        except UNREADABLE as error:
            self.left.leave("file", f"it cannot be read further ({error})", name)

    def _first_time(self, files: Files) -> int | None:
        times, before = [], self.left
        self.left = Account()  # what is left out is counted when the files are read
        for name in (METRICS, LOG):
            first = next(_Reading._lines(self, files, name), None) if name in files.names else None
            if first is not None and (at := _time(first)) is not None:
                times.append(at)
        self.left = before
        return min(times, default=None)

    # Metrics

    def _metric(self, event: dict[str, Any], files: Files) -> Iterator[Event]:
        title, series, kind = str(event.get("metric")), str(event.get("variant")), event.get("type")
        step, when = step_of(event.get("iter")), self._time(event)
        if kind in ("training_stats_scalar", "training_stats_vector"):
            yield from self._scalar(title, series, step, when, event)
            return
        try:
            if kind == "plot":
                media: Media | str = plot(event.get("plot_str"))
            elif kind == "training_debug_image":
                inner = self._inner(event.get("url"))
                media = media_of(media_bytes(files.read(inner)), PurePosixPath(inner).suffix)
                if self.ours and isinstance(media, Text) and len(media.text) <= LONG_TEXT:
                    media = media.text
            else:
                self.left.leave("event", f"events of type {kind} have no place in a run", f"{title}/{series}")
                return
        except UNREADABLE as error:
            self.left.leave("plot" if kind == "plot" else "media", str(error), f"{title}/{series}")
            return
        yield from self._media(title, series, None if step == SINGLE else step, when, media)

    def _scalar(self, title: str, series: str, step: int | None, when: int | None, event: dict[str, Any]) -> Iterator[Event]:
        value = number(event.get("value"))
        if value is None:
            self.left.leave("value", "it is not a number", f"{title}/{series}")
        elif step == SINGLE or step is None:
            self.single[series if title == _SUMMARY else self._key(title, series)] = value
        else:
            yield from self.gather.add(step, when, {self._key(title, series): value})

    def _key(self, title: str, series: str) -> str:
        if self.ours:
            return key_of(title, series) or title
        return title if title == series else f"{title}/{series}"

    def _media(self, title: str, series: str, step: int | None, when: int | None, media: Media | str) -> Iterator[Event]:
        """Yield media; the items of a list that fanfold sent have numbered series."""
        listed = LISTED.fullmatch(series) if self.ours and title != series else None
        if listed is None:
            yield Values(step=step, time_ns=when, values={self._key(title, series): media})
            return
        key = f"{listed[1]}/{title}"
        held = self.lists.setdefault((key, step), [])
        held.append(media)
        if listed[2] == listed[3]:
            yield Values(step=step, time_ns=when, values={key: self.lists.pop((key, step))})

    def _time(self, event: dict[str, Any]) -> int | None:
        found = _time(event)
        if found is not None:
            self.last = max(self.last or 0, found)
        return found if found is not None else self.last

    def _printed(self, event: dict[str, Any]) -> Iterator[Event]:
        if isinstance(event.get("msg"), str):
            stream = "stderr" if event.get("level") in ("error", "critical") else "stdout"
            yield Console(text=f"{event['msg']}\n", time_ns=self._time(event), stream=stream)

    # The task

    def _description(self) -> Iterator[Event]:
        task, properties = self.task, _properties(self.task)
        tags: list[Any] = task["tags"] if isinstance(task.get("tags"), list) else []
        config = self._config()
        sent = [name for name in properties if self.ours and (name == "group" or name.startswith(("summary.", "fanfold_")))]
        known = {name: properties.pop(name) for name in sent}
        if properties:
            config["properties"] = properties
        summary = {name.removeprefix("summary."): value for name, value in known.items() if name.startswith("summary.")}
        yield Facts(
            name=str(task["name"]) if task.get("name") else None, notes=str(task["comment"]) if task.get("comment") else None,
            tags=[str(tag) for tag in tags if not str(tag).startswith(TAG)] or None, config=plain(config) or None,
            group=str(known["group"]) if "group" in known else None, summary=plain(summary) or None,
            facts=plain(_facts(task)) or None,
        )  # fmt: skip

    def _section(self, name: str) -> dict[str, Any]:
        found = self.task.get(name)
        return found if isinstance(found, dict) else {}

    def _config(self) -> dict[str, Any]:
        """Return hyperparameters and configurations. General is ClearML's section for those without one."""
        texts = {name: one for name, one in self._section("configuration").items() if isinstance(one, dict)}
        if self.ours and SECTION in texts:
            exact, _ = outcome(json.loads, texts[SECTION].get("value") or "")
            if isinstance(exact, dict):
                return exact
        config: dict[str, Any] = {}
        for section, entries in self._section("hyperparams").items():
            if section == "properties" or not isinstance(entries, dict):
                continue
            target = config if section == "General" else config.setdefault(section, {})
            for name, one in entries.items():
                if isinstance(one, dict):
                    _place(target, str(name).split("/"), _typed(one.get("value"), one.get("type")))
        for name, one in texts.items():
            value, _ = outcome(json.loads, one.get("value") or "")
            config.setdefault(name, one.get("value") if value is None else value)
        return config

    def _artifacts(self, files: Files, scratch: Path) -> Iterator[Event]:
        listed = self._section("execution").get("artifacts")
        for one in listed if isinstance(listed, list) else ():
            if not isinstance(one, dict):
                continue
            key, seconds = str(one.get("key")), step_of(one.get("timestamp"))
            when = seconds * 10**9 if seconds is not None and 0 <= seconds < 1 << 33 else self.last
            try:
                inner = self._inner(one.get("uri"))
                path = files.unpack(inner, scratch / str(len(list(scratch.iterdir()))))
            except UNREADABLE as error:
                self.left.leave("artifact", str(error), key)
                continue
            yield Artifact(
                name=key, files=[(PurePosixPath(inner).name, path)], type="dataset" if one.get("type") == "dataset" else "file",
                metadata={"type": one.get("type")}, time_ns=when,
            )  # fmt: skip
        yield from self._code(scratch)
        models = self.task.get("offline_output_models")
        if isinstance(models, list) and models:
            self.left.leave("model", "ClearML keeps it outside of the session", str(models[0])[:80], len(models))

    def _code(self, scratch: Path) -> Iterator[Event]:
        script = self._section("script")
        diff = script.get("diff")
        if not isinstance(diff, str) or not diff:
            return
        name = "changes.patch" if script.get("repository") else PurePosixPath(str(script.get("entry_point") or "script.py")).name
        path = scratch / "code"
        path.write_text(diff, encoding="utf-8", errors="backslashreplace")
        yield Artifact(name="code", files=[(name, path)], type="code", time_ns=self.last)

    def _inner(self, address: Any) -> str:
        """Return where a file is inside the session, whichever machine wrote its address."""
        _, mark, inner = str(address).partition(f"{self.task.get('id')}/")
        if not mark:
            raise ValueError("the session has only its address")
        return inner


def _time(event: dict[str, Any]) -> int | None:
    found = step_of(event.get("timestamp"))
    return found * 10**6 if found is not None and 0 <= found < 1 << 43 else None


def _facts(task: dict[str, Any]) -> dict[str, Any]:
    script = task.get("script")
    script = script if isinstance(script, dict) else {}
    git = {"commit": script.get("version_num"), "branch": script.get("branch"), "remote": script.get("repository")}
    packages = dict(_PACKAGE.findall(str(script.get("requirements") or "")))
    found = {
        "git": {name: value for name, value in git.items() if value},
        "packages": packages,
        "script": script.get("entry_point"),
    }
    return {name: value for name, value in found.items() if value}


def _typed(value: Any, kind: Any) -> Any:
    """Return a hyperparameter in the type it declares: ClearML stores all of them as text."""
    if not isinstance(value, str) or kind in (None, "str"):
        return None if value == "" and kind is None else value
    if kind in ("int", "float", "bool"):
        found = number_in(value)
        return value if found is None else float(found) if kind == "float" else found
    found, _ = outcome(json.loads, value)
    return value if found is None else found


def _place(target: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        inner = target.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = target[part] = {"": inner}
        target = inner
    target[parts[-1]] = value


def plot(text: Any) -> Media:
    """Return a plotly figure; a figure that is only a table becomes a table."""
    found = json.loads(text) if isinstance(text, str) else None
    data = found.get("data") if isinstance(found, dict) else None
    if not isinstance(data, list):
        raise OSError("it is not a plotly figure")
    if len(data) == 1 and isinstance(data[0], dict) and data[0].get("type") == "table":
        table, _ = outcome(_table, data[0])
        if table is not None:
            return table
    figure, error = outcome(lambda: Figure.decode({}, str(text).encode()))
    if figure is None:
        raise ValueError(str(error))
    return figure


def _table(trace: dict[str, Any]) -> Table:
    names, cells = trace["header"]["values"], trace["cells"]["values"]
    return Table([str(name) for name in names], [[plain(cell) for cell in row] for row in zip(*cells, strict=True)])
