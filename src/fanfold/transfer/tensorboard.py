"""TensorBoard: event files, read without TensorBoard or TensorFlow. A folder with event files is a run.

A file that another process began after the last one ended is the next attempt; files written at the same time by several
processes are ranks. Folders that `add_hparams` makes belong to the run above them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import outcome
from ..journal.files import open_regular
from ..media import Audio, Histogram, Image, Table
from . import protobuf as pb
from .events import End, Event, Facts, Found, Left, Mark, Rows, Start, Values
from .reading import read_document, read_yaml, signature_of
from .record_log import CUT
from .tfrecord import RecordBatch, ScalarLayout, Scalars, is_record, nanoseconds, read_batch, scalars

_FILE: Final = re.compile(r"tfevents\.(\d+)\.(.*)")
_HPARAMS: Final = re.compile(r"\d{9,11}\.\d+")  # the folder that add_hparams makes
_COMMON: Final = re.compile(r"train|training|val|valid|validation|test|eval|evaluation|logs?|tb|tensorboard|version_\d+|\d+")
_MARK: Final = "fanfold.json"  # our tracker leaves it in a run's folder
_DTYPES: Final = {1: "<f4", 2: "<f8", 3: "<i4", 4: "u1", 5: "<i2", 6: "i1", 9: "<i8", 10: "?", 17: "<u2", 19: "<f2", 22: "<u4",
                  23: "<u8"}  # fmt: skip
_STRING: Final = 7
_NOT_SHOWN: Final = {"graphs": "graph", "projector": "embedding", "mesh": "3D mesh", "custom_scalars": "layout of custom charts"}
_PR: Final = ["threshold", "true_positives", "false_positives", "true_negatives", "false_negatives", "precision", "recall"]


class _Name(NamedTuple):
    """What the name of an event file says."""

    began: int
    process: str  # node and pid


class TensorBoardImporter:
    """Event files of TensorBoard, TensorFlow, PyTorch and tensorboardX."""

    kind = "tensorboard"
    title = "TensorBoard"

    def find(self, path: Path) -> Iterator[Found]:
        if path.is_dir():
            files = _event_files(path)
            inner = [file for folder in _hparams_folders(path) for file in _event_files(folder)] if files else []
        else:
            files, inner = [path] if _is_event_file(path) else [], []
        if not files:
            return
        folder = files[0].parent
        name, project = folder.name, folder.parent.name
        if _COMMON.fullmatch(name) and folder.parent.name:
            name, project = f"{folder.parent.name}/{name}", folder.parent.parent.name
        ids = [_id_of(file) for file in files]
        folders = tuple(dict.fromkeys(file.parent for file in inner))
        yield Found(kind=self.kind, id=ids[0], paths=(*files, *inner, *folders), project=project or self.kind,
                    name=name or self.kind, fanfold_id=_own_run(folder), earlier_ids=tuple(ids[1:]))  # fmt: skip

    def signature(self, found: Found) -> Any:
        return signature_of((path.name, path) for path in found.paths)

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        yield from _Reader(found, position).events()


def _id_of(file: Path) -> str:
    """Return what identifies an event file: its name and the time of its first event.

    A run is known by its first file. A file of another process may be sorted before it later, or it may be deleted.
    """
    with open_regular(file) as opened:
        return f"{file.name}@{opened.read(32)[12:21].hex()}"


def _event_files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if "tfevents" in entry.name and entry.is_file(follow_symlinks=False)]
    except OSError:
        return []
    files = [folder / name for name in names]
    return sorted((file for file in files if _is_event_file(file)), key=_order_of)


def _order_of(file: Path) -> tuple[int, list[tuple[bool, int, str]]]:
    """Return what sorts event files by their age: the tenth file of a process comes after its ninth."""
    words = [(not word.isdecimal(), int(word[:18]) if word.isdecimal() else 0, word) for word in file.name.split(".")]
    return _name_of(file).began, words


def _is_event_file(path: Path) -> bool:
    if "tfevents" not in path.name:
        return False
    try:
        with open_regular(path) as file:
            return is_record(file.read(12))
    except OSError:
        return False


def _hparams_folders(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _HPARAMS.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)]
        return sorted(folder / name for name in names)
    return []


def _name_of(path: Path) -> _Name:
    match = _FILE.search(path.name)
    if match is None:
        return _Name(0, path.name)
    words = match[2].split(".")
    numbers = [place for place, word in enumerate(words) if word.isdecimal()]
    return _Name(int(match[1][:12]), ".".join(words[: numbers[0] + 1] if numbers else words))


def _own_run(folder: Path) -> str | None:
    """Return the id of the run that fanfold wrote this folder from."""
    try:
        with open_regular(folder / _MARK) as file:
            run = json.loads(file.read(4096))["run"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return run if isinstance(run, str) and 0 < len(run) <= 200 and "\0" not in run else None


class _Reader:
    """The state of reading one run; `position` is all of it that the next reading needs."""

    def __init__(self, found: Found, position: Any) -> None:
        known = position if isinstance(position, dict) else {}
        self.files = [path for path in found.paths if "tfevents" in path.name]
        self.folder = self.files[0].parent
        self.places: dict[str, dict[str, Any]] = dict(known.get("files") or {})
        self.plugins: dict[str, str] = dict(known.get("plugins") or {})
        self.attempt = int(known.get("attempt") or 0)
        self.last = int(known.get("last") or 0)  # the newest time
        self.high = int(known.get("high", -1))
        self.documents: dict[str, int] = dict(known.get("documents") or {})
        self.documented = bool(known.get("documented"))  # the config is known in full: hparams are a flat form of it
        self.left: dict[tuple[str, str], list[Any]] = {}

    def events(self) -> Iterator[Event]:
        yield from self._documents()
        for path in self.files:
            yield from self._file(path)
        for (what, why), (count, example) in self.left.items():
            yield Left(what=what, why=why, count=count, example=example)
        yield self._mark()

    def _mark(self) -> Mark:
        return Mark(position={"files": {name: dict(place) for name, place in self.places.items()}, "plugins": dict(self.plugins),
                              "attempt": self.attempt, "last": self.last, "high": self.high, "documents": dict(self.documents),
                              "documented": self.documented})  # fmt: skip

    def _leave(self, what: str, why: str, example: str = "", count: int = 1) -> None:
        entry = self.left.setdefault((what, why), [0, example])
        entry[0] += count

    def _documents(self) -> Iterator[Event]:
        """Yield the config that Lightning, or fanfold, keeps beside the event files."""
        for path in (self.folder / "hparams.yaml", *(folder / "hparams.yml" for folder in _hparams_folders(self.folder))):
            facts, _ = outcome(path.lstat)
            name = f"{path.parent.name}/{path.name}"
            if facts is None or self.documents.get(name) == facts.st_mtime_ns or facts.st_size > 1 << 20:
                continue
            self.documents[name] = facts.st_mtime_ns
            try:
                config = read_yaml(read_document(path))
            except (OSError, ValueError) as error:
                self._leave("file", str(error), path.name)
                continue
            if isinstance(config, dict) and config:
                self.documented = True
                yield Facts(config={str(name): value for name, value in config.items()})

    # Files

    def _file(self, path: Path) -> Iterator[Event]:
        name = f"{path.parent.name}/{path.name}"
        place = self.places.get(name)
        try:
            file = open_regular(path)
        except OSError as error:
            self._leave("file", f"cannot be read: {error.strerror}", path.name)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            if place is not None and size < place["at"]:  # replaced under the same name
                self._leave("file", "it became shorter than what was imported of it; the rest is not read", path.name)
                return
            if place is not None and size == place["at"]:
                return
            if place is None:
                place = {"at": 0, "rank": 0, "process": _name_of(path).process, "last": 0}
            yield from self._batches(path, name, file, place)
            if place["at"] < size:
                self._leave("bytes", CUT, path.name, size - place["at"])

    def _batches(self, path: Path, name: str, file: BinaryIO, place: dict[str, Any]) -> Iterator[Event]:
        more = True
        while more:
            batch = read_batch(file, place["at"])
            if batch.damaged:
                self._leave("bytes", "they are damaged, and were skipped", path.name, batch.damaged)
            if len(batch.starts):
                if "attempt" not in place:
                    yield from self._begin(path, batch, place)
                self.places[name] = place
                yield from self._batch(batch, place)
            more = batch.more and batch.end > place["at"]
            place["at"] = batch.end
            if name in self.places:
                yield self._mark()

    def _begin(self, path: Path, batch: RecordBatch, place: dict[str, Any]) -> Iterator[Event]:
        """Decide whether a new file is the next attempt, another rank, or more of the same."""
        first = _time_of(batch.data(0))
        others = [one for one in self.places.values() if not one.get("inner")]
        if path.parent != self.folder:  # made by add_hparams: it has config, and metrics of this run
            place["inner"] = True
        elif others:
            latest = max(one["last"] for one in others)
            mine = [one for one in others if one["process"] == place["process"]]
            if first < latest and not mine:
                place["rank"] = max(one["rank"] for one in others) + 1
            elif first >= latest and (not mine or _purges(batch)):
                self.attempt += 1
                yield End(status="finished", time_ns=latest)
            elif mine:
                place["rank"] = mine[0]["rank"]
        place["attempt"] = str(self.attempt)
        yield Start(time_ns=first or None, attempt=place["attempt"], rank=place["rank"])

    # Records

    def _batch(self, batch: RecordBatch, place: dict[str, Any]) -> Iterator[Event]:
        many, others = scalars(batch, self._layout)
        by_tag: dict[str, list[Scalars]] = {}
        for one in many:
            if one.plugin:
                self.plugins.setdefault(one.tag, one.plugin)
            by_tag.setdefault(one.tag, []).append(one)
        rank = place["rank"]
        single: dict[str, list[tuple[int, int, int, Any]]] = {}
        rest: list[Event] = []
        for record in others.tolist():
            if not batch.intact(record):
                self._leave("records", "their checksum does not match")
                continue
            found, error = outcome(list, self._record(batch.data(record), record, single, rank))
            if error is not None:
                self._leave("records", f"they cannot be decoded: {type(error).__name__}")
            rest += found or []
        for tag, rows in self._rows(by_tag, single):
            steps, times, values = rows
            place["last"] = max(place["last"], int(times.max()))
            self.last, self.high = max(self.last, int(times.max())), max(self.high, int(steps.max()))
            yield Rows(steps=steps, times=times, columns={tag: values}, rank=rank)
        for event in rest:
            if isinstance(event, Values) and event.time_ns:
                place["last"], self.last = max(place["last"], event.time_ns), max(self.last, event.time_ns)
            yield event

    @staticmethod
    def _rows(many: dict[str, list[Scalars]], single: dict[str, list[tuple[int, int, int, Any]]]) -> Iterator[tuple[str, Any]]:
        """Yield each tag's points in the order of the file, however they were decoded."""
        for tag in dict.fromkeys((*many, *single)):
            places = [one.places for one in many.get(tag, [])]
            steps = [one.steps for one in many.get(tag, [])]
            times = [one.times for one in many.get(tag, [])]
            values: list[NDArray[Any]] = [one.values for one in many.get(tag, [])]
            if tag in single:
                where, step, when, value = zip(*single[tag], strict=True)
                places.append(np.array(where, np.int64))
                steps.append(np.array(step, np.int64))
                times.append(np.array(when, np.int64))
                values.append(np.array(value))
            if len(places) == 1:
                yield tag, (steps[0], times[0], values[0])
            else:
                order = np.argsort(np.concatenate(places), kind="stable")
                yield tag, tuple(np.concatenate(parts)[order] for parts in (steps, times, values))

    def _layout(self, data: bytes) -> ScalarLayout | None:
        """Return where a record with exactly one float32 scalar has it; None for any other record."""
        found = _single_value(data)
        if found is None or (found.plugin or self.plugins.get(found.tag, "")) not in ("", "scalars"):
            return None
        if found.as_tensor and "scalars" not in (found.plugin, self.plugins.get(found.tag)):
            return None
        return ScalarLayout(found.tag, found.plugin, found.at)

    def _record(
        self, data: bytes, record: int, single: dict[str, list[tuple[int, int, int, Any]]], rank: int
    ) -> Iterator[Event]:  # fmt: skip
        """Yield the events of one record; add its scalars to `single`."""
        event = pb.message(data)
        when, step = _time_of(data), pb.integer(event, 2)
        for number, what in ((4, "graph"), (9, "graph"), (8, "run metadata")):
            if number in event:
                self._leave(what, "fanfold does not show it")
        if 6 in event:
            self._leave("log message", "fanfold does not show it")
        for summary in pb.messages(event, 5):
            for value in pb.messages(summary, 1):
                tag, plugin = _tag(value), _plugin(value)
                if plugin:
                    self.plugins.setdefault(tag, plugin)
                yield from self._value(value, tag, self.plugins.get(tag, ""), (record, step, when), single, rank)

    def _value(
        self, value: pb.Message, tag: str, plugin: str, at: tuple[int, int, int], single: Any, rank: int
    ) -> Iterator[Event]:
        record, step, when = at
        if plugin == "hparams":
            yield from self._hparams(value)
        elif plugin in _NOT_SHOWN:
            self._leave(_NOT_SHOWN[plugin], "fanfold does not show it", tag)
        elif 2 in value:
            single.setdefault(tag, []).append((record, step, when, np.frombuffer(pb.raw(value, 2), "<f4")[0]))
        else:
            found, error = outcome(self._media, value, plugin)
            if isinstance(found, np.generic):
                single.setdefault(tag, []).append((record, step, when, found))
            elif found is not None:
                key = tag.removesuffix("/text_summary") if plugin == "text" else tag
                yield Values(step=step, time_ns=when or None, values={key: found}, rank=rank)
            else:
                self._leave(plugin or "value", f"cannot be read: {error}" if error else "of an unknown kind", tag)

    def _hparams(self, value: pb.Message) -> Iterator[Event]:
        start = pb.inner(pb.inner(pb.inner(pb.inner(value, 9), 1), 2), 3)
        config = {name: _plain_value(one) for name, one in pb.entries(start, 1)}
        group = pb.text(start, 4)
        if (config and not self.documented) or group:
            yield Facts(config=None if self.documented else config or None, facts={"hparams_group": group} if group else None)

    # Media

    def _media(self, value: pb.Message, plugin: str) -> Any:
        """Return a value as a scalar, a text or media; None if it is of no known kind."""
        if 4 in value:
            return Image(pb.raw(pb.inner(value, 4), 4))
        if 5 in value:
            return _histogram_proto(pb.inner(value, 5))
        if 6 in value:
            sound = pb.inner(value, 6)
            rate = int(np.frombuffer(pb.raw(sound, 1).ljust(4, b"\0"), "<f4")[0])
            return Audio(pb.raw(sound, 4), sample_rate=rate or None)
        if 8 not in value:
            return None
        tensor = pb.inner(value, 8)
        if pb.integer(tensor, 1) == _STRING:
            return _strings(tensor, plugin)
        array = _array(tensor)
        if array.size == 1 and plugin in ("", "scalars"):
            return array.reshape(-1)[0]
        if plugin == "histograms" and array.ndim == 2 and array.shape[1] == 3:
            return _histogram(array)
        if plugin == "pr_curves" and array.ndim == 2 and array.shape[0] == 6:
            thresholds = np.linspace(0.0, 1.0, array.shape[1])
            return Table(_PR, [[float(cell) for cell in row] for row in zip(thresholds, *array, strict=True)])
        return None


class _Single(NamedTuple):
    """A record's only value, four bytes long: where it is, and whether a tensor holds it."""

    tag: str
    plugin: str
    at: int
    as_tensor: bool


@lru_cache(maxsize=1 << 12)
def _single_value(data: bytes) -> _Single | None:
    """Return the only value of a record; None if it has another number of them, or a value of another size."""
    try:
        event = pb.message(data)
        if len(event.get(5, ())) != 1 or set(event) - {1, 2, 5}:
            return None
        summary = pb.message(pb.raw(event, 5))
        if len(summary.get(1, ())) != 1:
            return None
        value = pb.message(pb.raw(summary, 1))
        tag, plugin = _tag(value), _plugin(value)
        at = _span(data, 5, 1, 2)
        if at is None and pb.integer(pb.inner(value, 8), 1) == 1:
            at, as_tensor = _span(data, 5, 1, 8, 5) or _span(data, 5, 1, 8, 4), True
        else:
            as_tensor = False
    except ValueError:
        return None
    return _Single(tag, plugin, at[0], as_tensor) if at is not None and at[1] - at[0] == 4 else None


def _tag(value: pb.Message) -> str:
    return pb.text(value, 1) or "untitled"


def _plugin(value: pb.Message) -> str:
    return pb.text(pb.inner(pb.inner(value, 9), 1), 1) if 9 in value else ""


def _time_of(data: bytes) -> int:
    seconds = np.frombuffer(data[1:9], "<f8") if len(data) >= 9 and data[0] == 0x09 else np.zeros(1)
    return int(nanoseconds(seconds)[0])


def _span(data: bytes, *path: int) -> tuple[int, int] | None:
    """Return where the content of a field stands, given the numbers of the messages around it; None if it is not there."""
    start, end = 0, len(data)
    for number in path:
        found = None
        at = start
        while at < end:
            tag, at = pb.varint(data, at)
            kind = tag & 7
            if kind == 0:
                size = pb.varint(data, at)[1] - at
            elif kind == 2:
                size, at = pb.varint(data, at)
            else:
                size = 8 if kind == 1 else 4
            if tag >> 3 == number:
                found = at, at + size
            at += size
        if found is None or found[1] > end:
            return None
        start, end = found
    return start, end


def _purges(batch: RecordBatch) -> bool:
    """Return whether the first records say that the process started again, as SummaryWriter(purge_step=…) does."""
    for place in range(min(4, len(batch.starts))):
        found, _ = outcome(pb.message, batch.data(place))
        if found is not None and 7 in found and pb.integer(pb.inner(found, 7), 1) == 1:
            return True
    return False


def _plain_value(value: pb.Message) -> Any:
    """Return a google.protobuf.Value; whole numbers are integers, because a Value has no others."""
    if 2 in value:
        number = pb.double(value, 2)
        return int(number) if number.is_integer() and abs(number) < 1 << 53 else number
    if 3 in value:
        return pb.text(value, 3)
    if 4 in value:
        return bool(pb.integer(value, 4))
    if 6 in value:
        return [_plain_value(item) for item in pb.messages(pb.inner(value, 6), 1)]
    return None


def _array(tensor: pb.Message) -> NDArray[Any]:
    """Return a tensor's numbers in its shape."""
    dtype = _DTYPES.get(pb.integer(tensor, 1))
    if dtype is None:
        raise ValueError(f"a tensor of type {pb.integer(tensor, 1)}")
    sizes = [pb.integer(dim, 1) for dim in pb.messages(pb.inner(tensor, 2), 2)]
    count = 1
    for size in sizes:
        count *= size
    content = pb.raw(tensor, 4)
    if content:
        flat = np.frombuffer(content, dtype)
    else:
        flat = _listed(tensor, dtype)
        if len(flat) == 1 and 1 < count <= 1 << 20:
            flat = np.repeat(flat, count)
    if count != len(flat) or count < 0:
        raise ValueError(f"a tensor of {count} values has {len(flat)}")
    return flat.reshape(sizes)


def _listed(tensor: pb.Message, dtype: str) -> NDArray[Any]:
    field, packed = {"<f4": (5, "<f4"), "<f8": (6, "<f8")}.get(dtype, (0, ""))
    if field:
        return np.frombuffer(pb.packed(tensor, field), packed)
    numbers = [number for field in (7, 10, 11, 13, 16, 17) for number in pb.integers(tensor, field)]
    if dtype == "<f2":
        return np.array(numbers, np.uint16).view("<f2")
    return np.array(numbers).astype(dtype)


def _strings(tensor: pb.Message, plugin: str) -> Any:
    texts = [item for item in tensor.get(8, []) if isinstance(item, bytes)]
    if plugin == "images":
        images = [Image(item) for item in texts[2:]]  # width and height come first
        return images[0] if len(images) == 1 else images or None
    if plugin == "audio":
        sizes = [pb.integer(dim, 1) for dim in pb.messages(pb.inner(tensor, 2), 2)]
        step = 2 if len(sizes) == 2 and sizes[1] == 2 else 1  # each sound may have a label
        sounds = [Audio(item) for item in texts[::step]]
        return sounds[0] if len(sounds) == 1 else sounds or None
    return "\n\n".join(item.decode("utf-8", "replace") for item in texts)


def _histogram_proto(value: pb.Message) -> Histogram | None:
    """Return TensorBoard's old form of a histogram: upper limits of buckets, and the smallest and largest value."""
    limits = np.frombuffer(pb.raw(value, 6), "<f8")
    counts = np.frombuffer(pb.raw(value, 7), "<f8")
    if not len(limits) or len(limits) != len(counts):
        return None
    low, high = pb.double(value, 1), pb.double(value, 2)
    lowest = low if low < limits[0] else (limits[0] - (limits[1] - limits[0]) if len(limits) > 1 else limits[0] - 1.0)
    edges = np.concatenate(([max(lowest, -np.finfo(float).max)], np.clip(limits, -1.7e308, 1.7e308)))
    if edges[-1] > 1e300 and high > edges[-2]:
        edges[-1] = high
    return Histogram(np_histogram=(counts.tolist(), edges.tolist()))


def _histogram(array: NDArray[Any]) -> Histogram | None:
    """Return TensorBoard's newer form: left edge, right edge and count of each bucket."""
    if not len(array):
        return None
    rows = array.astype(np.float64)
    return Histogram(np_histogram=(rows[:, 2].tolist(), [*rows[:, 0].tolist(), float(rows[-1, 1])]))
