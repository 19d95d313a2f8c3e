"""Comet's offline experiments: zip archives of `messages.json` (one JSON message a line) and the files that messages name.

An experiment may have several archives, one for each process that logged to it; they are read as one run, in order of time. A
folder that a killed process left behind has the same files, without being archived.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import outcome
from ..facts.mask import mask_argv
from ..journal.files import is_folder, open_regular
from ..media import Figure, Histogram, Html, Media, Table, Text, decode
from ..media.files import sniff
from ..plain import from_json, plain
from ..trackers._comet_archives import MESSAGES
from ..trackers.comet import RUN, SETTLED, STATUS
from ..values import LONG_TEXT
from .events import Alert, Artifact, Console, End, Event, Facts, Found, Left, Start, Values
from .reading import (
    MOST_MEDIA,
    UNREADABLE,
    Account,
    Archive,
    Folder,
    Gather,
    json_lines,
    media_of,
    number,
    read_json,
    reread,
    step_of,
)

META = "experiment.json"
PICTURES = ("png", "jpg", "gif", "webp", "bmp", "tiff")
_NAME = re.compile(r"([0-9a-z]{32,50})(?:-[\w-]+)?")  # of an archive
_INTERNAL = frozenset({"offline_experiment", "hasNestedParams", "Created from", "Name", STATUS, SETTLED, RUN})
_COUNTERS = frozenset({"curr_step", "curr_epoch"})
_QUIET = frozenset("file_name os_packages cloud_details system_info ws_msg close log_dependency gpu_static_info".split())


class MessageFolder(Folder):
    """The files of a process that was killed before it archived them; its messages have the paths they had there."""

    def parts(self, name: str) -> tuple[str, ...]:
        return (PurePosixPath(name).name,)


Files = Archive | MessageFolder  # of one process


class CometImporter:
    """Offline archives of Comet."""

    kind = "comet_ml"
    title = "Comet"

    def find(self, path: Path) -> Iterator[Found]:
        meta = _meta(path)
        if meta is None:
            return
        key = str(meta.get("offline_id") or path.stem)
        parts = [path]
        if path.suffix == ".zip":
            zips = {other for other in path.parent.glob("*.zip") if other.name.startswith(key) and other != path}
            found = [(path, meta), *((other, inner) for other in zips if (inner := _meta(other)) and inner["offline_id"] == key)]
            parts = [one for one, _ in sorted(found, key=lambda one: (_milliseconds(one[1], "start_time"), one[0].name))]
        project, early = meta.get("project_name"), _early(parts)
        yield Found(
            kind=self.kind, id=key, paths=tuple(one.absolute() for one in parts),
            project=str(project) if project else "imported", name=early.get("Name", ""), fanfold_id=early.get(RUN),
        )  # fmt: skip

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        yield from reread(lambda: _Reading(found.paths).events(), position)


def _milliseconds(meta: dict[str, Any], name: str) -> int:
    found = step_of(meta.get(name))
    return found if found is not None and 0 < found < 1 << 43 else 0


def _opened(path: Path) -> Files:
    return MessageFolder(path) if is_folder(path) else Archive(path)


def _meta(path: Path) -> dict[str, Any] | None:
    """Return what an archive or folder says about its experiment; None if it is not one of Comet's."""
    if is_folder(path):
        if not (path / MESSAGES).is_file() or _first_type(path) is None:
            return None
        meta = read_json(path / META)
        return meta if isinstance(meta, dict) else {}
    if path.suffix != ".zip" or not path.is_file():
        return None
    named = _NAME.fullmatch(path.stem)
    unreadable = {"offline_id": named[1]} if named else None  # still an archive: its run gets an account of it
    try:
        with Archive(path) as archive:
            if not {MESSAGES, META} <= archive.names:
                return unreadable
            meta = json.loads(archive.read(META))
    except UNREADABLE:
        return unreadable
    return meta if isinstance(meta, dict) and isinstance(meta.get("offline_id"), str) else unreadable


def _first_type(folder: Path) -> str | None:
    """Return the type of the first message: other programs have files called messages.json, too."""
    try:
        with open_regular(folder / MESSAGES) as file:
            first = next(json_lines(file, Account(), ""), None)
    except UNREADABLE:
        return None
    if not isinstance(first, dict) or not isinstance(first.get("payload"), dict):
        return None
    return first["type"] if isinstance(first.get("type"), str) else None


def _early(parts: list[Path]) -> dict[str, str]:
    """Return the "other" values among the first messages: the run's name, and the id of a fanfold run that was sent there."""
    found: dict[str, str] = {}
    for path in parts:
        try:
            with _opened(path) as files, files.open(MESSAGES) as file:
                for message, _ in zip(json_lines(file, Account(), ""), range(200), strict=False):
                    payload = message.get("payload") if isinstance(message, dict) else None
                    key, value = (payload.get("key"), payload.get("value")) if isinstance(payload, dict) else (None, None)
                    if isinstance(key, str) and isinstance(value, str):
                        found[key] = value
        except UNREADABLE:
            continue
    return found


class _Reading:
    """One pass over the archives of an experiment."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self.paths = paths
        self.left, self.gather = Account(), Gather()
        self.config: dict[str, Any] = {}
        self.others: dict[str, Any] = {}
        self.texts: dict[str, str] = {}
        self.lists: dict[tuple[str, Any], list[Any]] = {}
        self.facts: dict[str, Any] = {}
        self.epoch: Any = None
        self.began: int | None = None
        self.last: int | None = None
        self.scratch = Path()

    def events(self) -> Iterator[Event]:
        metas = [_meta(path) for path in self.paths]
        known = [meta for meta in metas if meta]
        starts, stops = (
            [at * 10**6 for meta in known if (at := _milliseconds(meta, name))] for name in ("start_time", "stop_time")
        )
        yield Start(time_ns=min(starts, default=None))
        with tempfile.TemporaryDirectory(prefix="fanfold-import-") as scratch:
            self.scratch = Path(scratch)
            for path in self.paths:
                yield from self._part(path)
        yield from self.gather.flush()
        yield self._description(known)
        if known:
            yield self._end(known[-1], max(stops, default=self.last))
        yield from self.left.events()

    def _part(self, path: Path) -> Iterator[Event]:
        try:
            files = _opened(path)
        except UNREADABLE as error:
            self.left.leave("archive", f"it cannot be read ({error})", path.name)
            return
        try:
            with files, files.open(MESSAGES) as file:
                for message in json_lines(file, self.left, "message"):
                    yield from self._message(message, files)
        except UNREADABLE as error:
            self.left.leave("archive", f"it cannot be read further ({error})", path.name)

    def _message(self, message: Any, files: Files) -> Iterator[Event]:
        kind = message.get("type") if isinstance(message, dict) else None
        payload = message.get("payload") if isinstance(message, dict) else None
        if not isinstance(payload, dict) or not isinstance(kind, str):
            self.left.leave("message", "it is not one of Comet's", str(message)[:80])
            return
        take: Callable[[dict[str, Any], Files], Iterator[Event]] | None = getattr(self, f"_take_{kind.replace('-', '_')}", None)
        if take is not None:
            yield from take(payload, files)
        elif kind not in _QUIET:
            self.left.leave("message", f"messages of type {kind} have no place in a run", str(payload)[:80])

    # Numbers, parameters and facts

    def _take_metric_msg(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        metric, when = payload.get("metric"), self._time(payload)
        if not isinstance(metric, dict) or not isinstance(metric.get("metricName"), str):
            self.left.leave("message", "a metric without a name", str(payload)[:80])
            return
        name, value, step = metric["metricName"], from_json(metric.get("metricValue")), step_of(metric.get("step"))
        found = number(value)
        if found is None:
            if not isinstance(value, str):
                self.left.leave("value", f"it is a {type(value).__name__}, not a number", name)
                return
            yield from self.gather.flush()
            yield Values(step=step, time_ns=when, values={name: value})
            return
        if name == "process duration":  # Comet's own, at the end
            return
        if name.startswith("sys."):
            yield from self.gather.add(None, when, {f"system/{name[4:].replace('.', '/')}": found}, system=True)
            return
        yield from self.gather.add(step, when, {name: found})
        epoch = number(metric.get("epoch"))
        if epoch is not None and epoch != self.epoch and name != "epoch":
            self.epoch = epoch
            yield from self.gather.add(step, when, {"epoch": epoch})

    def _take_parameter_msg(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        given = payload.get("param") or payload.get("params")
        if not isinstance(given, dict) or not isinstance(given.get("paramName"), str):
            self.left.leave("message", "a parameter without a name", str(payload)[:80])
        elif not (given.get("source") == "auto-logged" and given["paramName"] in _COUNTERS):
            self.config[given["paramName"]] = given.get("paramValue")
        return iter(())

    def _take_log_other(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        self.others[str(payload.get("key"))] = payload.get("value")
        return iter(())

    def _take_system_details(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        names = {"hostname": "hostname", "os": "os", "machine": "machine", "os_release": "kernel"}
        self.facts["node"] = {ours: payload[theirs] for theirs, ours in names.items() if payload.get(theirs)}
        self.facts["python"] = {"version": payload.get("python_version"), "executable": payload.get("python_exe")}
        if isinstance(payload.get("command"), list):
            self.facts["command"] = mask_argv([str(word) for word in payload["command"]])
        if payload.get("user"):
            self.facts["user"] = payload["user"]
        return iter(())

    def _take_installed_packages(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        listed = payload.get("installed_packages")
        pairs = [str(one).partition("==") for one in listed] if isinstance(listed, list) else []
        self.facts["packages"] = {name: version for name, _, version in pairs}
        return iter(())

    def _take_git_metadata(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        git = payload.get("git_metadata")
        if isinstance(git, dict):
            found = {
                "commit": git.get("parent"),
                "branch": git.get("branch"),
                "remote": git.get("origin"),
                "root": git.get("root"),
            }
            self.facts["git"] = {name: value for name, value in found.items() if value}
        return iter(())

    def _take_standard_output(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        if isinstance(payload.get("output"), str):
            stream = "stderr" if payload.get("stderr") else "stdout"
            yield Console(text=payload["output"], time_ns=self._time(payload), stream=stream)

    def _take_html(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        if isinstance(payload.get("html"), str):
            yield Values(step=None, time_ns=self.last, values={"html": Html(f"{payload['html']}\n")})

    def _take_remote_file(self, payload: dict[str, Any], _files: Files) -> Iterator[Event]:
        yield Left(what="file", why="only its address is in the archive", example=str(payload.get("remote_uri"))[:200])

    def _time(self, payload: dict[str, Any]) -> int | None:
        at = step_of(payload.get("local_timestamp"))
        if at is None or not 0 <= at < 1 << 43:
            return self.last
        self.last = at * 10**6
        return self.last

    # Files

    def _take_file_upload(self, payload: dict[str, Any], files: Files) -> Iterator[Event]:
        about = payload.get("additional_params")
        about = about if isinstance(about, dict) else {}
        facts = payload.get("metadata")
        facts = facts if isinstance(facts, dict) else {}
        kind, step, when = str(payload.get("upload_type")), step_of(about.get("step")), self._time(payload)
        inner, name = payload.get("file_path"), str(about.get("figName") or about.get("fileName") or payload.get("file_path"))
        name = PurePosixPath(name).name if PurePosixPath(name).is_absolute() else name
        try:
            if not isinstance(inner, str):
                raise OSError("the message does not say where it is")
            if "alert" in facts and kind == "text-sample":
                yield self._alert(files.read(inner), facts, step, when)
                return
            media = self._media(files, inner, kind, about, facts)
            if media is None:
                copy = self.scratch / str(len(list(self.scratch.iterdir())))
                path = files.unpack(inner, copy)
                what = {"source_code": "code", "model-element": "model"}.get(kind, "file")
                ext = "" if PurePosixPath(name).suffix else f".{str(about.get('extension') or 'json').lstrip('.')}"
                yield Artifact(name=name, files=[(f"{PurePosixPath(name).name}{ext}", path)], type=what, step=step, time_ns=when)
                copy.unlink(missing_ok=True)
                return
        except UNREADABLE as error:
            self.left.leave("file", str(error), name)
            return
        key = facts.get("key")
        key = key if isinstance(key, str) else "text" if kind == "text-sample" else _stem(name)
        yield from self._value(key, media, step, when, facts)

    def _value(self, key: str, media: Any, step: int | None, when: int | None, facts: dict[str, Any]) -> Iterator[Event]:
        """Yield media; items that were logged as one list are collected first."""
        items = step_of(facts.get("items")) or 1
        held = self.lists.setdefault((key, step), [])
        held.append(media)
        if items > 1 and (step_of(facts.get("item")) or items) < items:
            return
        del self.lists[key, step]
        value = held if items > 1 else media
        if isinstance(value, str):
            self.texts[key] = value
        yield Values(step=step, time_ns=when, values={key: value})

    def _media(self, files: Files, inner: str, kind: str, about: dict[str, Any], facts: dict[str, Any]) -> Any:
        """Return a file as media or text; None if it is kept as a file."""
        ext = str(about.get("extension") or PurePosixPath(inner).suffix).lstrip(".").lower()
        ours = isinstance(facts.get("key"), str)
        caption = {"caption": facts["caption"]} if isinstance(facts.get("caption"), str) else {}
        if kind == "text-sample":
            text = files.read(inner).decode("utf-8", "replace")
            return text if (not ours or facts["key"] in self.others) and len(text) <= LONG_TEXT else Text(text)
        if kind == "histogram3d":
            return histogram(json.loads(files.read(inner)))
        if kind in ("visualization", "audio", "video") and ext != "svg":
            data = files.read(inner)
            if len(data) > MOST_MEDIA:
                return None
            ext = sniff(data, PICTURES) or ext  # Comet often leaves the type out
            rate = step_of(about.get("sampleRate"))
            more = {"sample_rate": rate} if kind == "audio" and rate else {}
            return outcome(media_of, data, ext, **caption, **more)[0]
        if ours and kind == "asset":
            return _ours(files.read(inner), ext)
        return None

    def _alert(self, data: bytes, facts: dict[str, Any], step: int | None, when: int | None) -> Alert:
        title, text = str(facts.get("title")), data.decode("utf-8", "replace")
        return Alert(
            title=title, text=text.removeprefix(title).removeprefix("\n"), level=str(facts["alert"]), step=step, time_ns=when
        )

    # The end

    def _description(self, metas: list[dict[str, Any]]) -> Facts:
        nested = bool(self.others.get("hasNestedParams"))
        tags = list(dict.fromkeys(str(tag) for meta in metas if isinstance(meta.get("tags"), list) for tag in meta["tags"]))
        ours = RUN in self.others
        notes, group = (str(self.others.pop(name)) if ours and name in self.others else None for name in ("notes", "group"))
        repeated = self.texts if ours else {}
        shown = {key: value for key, value in self.others.items() if key not in _INTERNAL}
        summary = {key: value for key, value in shown.items() if repeated.get(key) != value}
        name = self.others.get("Name")
        return Facts(
            name=str(name) if name else None, tags=tags or None, config=plain(_nested(self.config) if nested else self.config),
            summary=plain(summary) or None, facts=plain(self.facts) or None, notes=notes, group=group,
        )  # fmt: skip

    def _end(self, meta: dict[str, Any], stopped: int | None) -> End:
        status = self.others.get(STATUS)
        if isinstance(status, str):
            return End(status=status, time_ns=stopped)
        if meta.get("customer_error_reported"):
            return End(status="failed", time_ns=stopped, cause=str(meta.get("customer_error_message") or ""))
        return End(status="finished" if meta.get("stop_time") else "killed", time_ns=stopped)


def _stem(name: str) -> str:
    path = PurePosixPath(name)
    return path.with_suffix("").as_posix() if path.suffix and path.name else name


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    """Return parameters as they were before Comet joined the names of nested ones by `|`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        node, *parts = found, *name.split("|")
        for part in parts[:-1]:
            inner = node.setdefault(part, {})
            node = inner if isinstance(inner, dict) else node.setdefault(f"{part}|", {})
        node[parts[-1]] = value
    return found


def _ours(data: bytes, ext: str) -> Media | None:
    """Return media that fanfold sent as a file."""
    if ext == "html":
        return Html(data.decode("utf-8", "replace"))
    if ext == "csv":
        import csv
        import io

        columns, *rows = csv.reader(io.StringIO(data.decode("utf-8", "replace"), newline="")) or [[]]
        return Table(columns, rows)
    if ext != "json":
        return outcome(media_of, data, ext)[0]
    return outcome(Figure.decode, {}, data)[0] or outcome(decode, "histogram", {}, data)[0]


def histogram(found: Any) -> Histogram:
    """Return Comet's histogram: counts of bins whose edges grow by a factor, on both sides of an offset."""
    found = found if isinstance(found, dict) else {}
    low, high, factor, offset = (number(found.get(name)) for name in ("start", "stop", "step", "offset"))
    if low is None or high is None or factor is None or offset is None or not (0 < low < high < 1e300 and factor > 1.001):
        raise ValueError("its bins are not valid")
    count = int(math.log(max(high - offset, low) / low) / math.log(factor)) + 3
    above = [low * factor**n for n in range(count) if offset + low * factor**n <= high]
    edges = [-math.inf, *(offset - one for one in reversed(above)), offset, *(offset + one for one in above), math.inf]
    pairs = [pair for pair in found.get("index_values") or () if isinstance(pair, list) and len(pair) == 2]
    held = {at: n for at, n in pairs if type(at) is int and number(n) is not None and 1 <= at < len(edges) - 2}
    if not held:
        raise ValueError("it has no values within its bins")
    first, last = min(held), max(held)
    return Histogram(np_histogram=([held.get(at, 0) for at in range(first, last + 1)], edges[first : last + 2]))
