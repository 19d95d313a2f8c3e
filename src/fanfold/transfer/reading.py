"""What importers of plain files share: bounded reading, points gathered into columns, and reading on from a position."""

from __future__ import annotations

import json
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from ..errors import outcome
from ..journal.files import is_folder, open_inside, open_regular
from ..media import Audio, Html, Image, Media, Text, Video
from ..plain import plain
from .events import Alert, Artifact, Console, Definition, Event, Left, Mark, Rows, Start, Values

MOST_ROWS = 1 << 14  # points held in memory
MOST_LINE = 64 << 20  # bytes of one line
MOST_DOCUMENT = 1 << 30  # bytes of a file that is read as a whole
MOST_YAML = 4 << 20  # bytes of a YAML document: parsing it is slow
MOST_MEDIA = 256 << 20  # bytes of one image, sound or video
REST_SECONDS = 60.0  # a file that is older is complete
ROOM = 16 << 20  # bytes that any archive may unpack to
RATIO = 100  # beyond that: times its own size; text compresses less than this
UNREADABLE = (OSError, ValueError, RecursionError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError)
_TYPES = {float: np.float64, int: np.int64, bool: np.bool_}
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_I64 = range(-(1 << 63), 1 << 63)

Number = float | int | bool


class Account:
    """What could not be carried, counted by kind and reason."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._examples: dict[tuple[str, str], str] = {}

    def leave(self, what: str, why: str, example: object = "", count: int = 1) -> None:
        why = why or "it cannot be read"  # some errors have no words
        self._counts[what, why] += count
        self._examples.setdefault((what, why), str(example)[:200])

    def all_or_none(self, events: Iterable[Event], what: str, example: object = "") -> list[Event]:
        """Return what can be read of one thing: all of its events, or none and a line here."""
        found, error = outcome(list, events)
        if error is not None:
            self.leave(what, f"cannot be read: {str(error)[:200]}", example)
        return found or []

    def events(self) -> Iterator[Left]:
        for (what, why), count in self._counts.items():
            yield Left(what=what, why=why, count=count, example=self._examples[what, why])
        self._counts.clear()


class Gather:
    """Points one by one become columns of many rows. The points of a key keep their order."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Any, ...], list[tuple[int, int, tuple[Number, ...]]]] = {}
        self._group_of: dict[str, tuple[Any, ...]] = {}
        self._rows = 0

    def add(
        self, step: int | None, time_ns: int | None, values: Mapping[str, Number], *, rank: int = 0, system: bool = False
    ) -> Iterator[Rows]:
        """Add the numbers of one call, and yield what is held if it must go out first."""
        if not values:
            return
        step = None if step is None or step not in _I64 else step
        time_ns = None if time_ns is None or time_ns not in _I64 else time_ns
        types = tuple(map(type, values.values()))
        group = (tuple(values), types, step is None, time_ns is None, rank, system)
        if self._rows >= MOST_ROWS or any(self._group_of.get(key, group) != group for key in values):
            yield from self.flush()
        if group not in self._groups:
            self._groups[group] = []
            self._group_of.update(dict.fromkeys(values, group))
        self._groups[group].append((step or 0, time_ns or 0, tuple(values.values())))
        self._rows += 1

    def flush(self) -> Iterator[Rows]:
        """Yield everything held."""
        groups, self._groups, self._group_of, self._rows = self._groups, {}, {}, 0
        for (keys, types, stepless, timeless, rank, system), rows in groups.items():
            steps, times, values = zip(*rows, strict=True)
            columns: dict[str, np.ndarray[Any, Any]] = {
                key: np.array(column, _TYPES[kind])
                for key, kind, column in zip(keys, types, zip(*values, strict=True), strict=True)
            }
            yield Rows(
                steps=None if stepless else np.array(steps, np.int64), times=None if timeless else np.array(times, np.int64),
                columns=columns, rank=rank, system=system,
            )  # fmt: skip


def number(value: Any) -> Number | None:
    """Return a value that JSON or YAML gave as a number we can hold: a float, a 64-bit integer or a bool; None for others."""
    kind = type(value)
    if kind is float or kind is bool:
        return value  # type: ignore[no-any-return]
    if kind is int:
        return value if value in _I64 else float(value) if value.bit_length() < 1024 else None
    return None


def number_in(text: str) -> Number | None:
    """Return the number that a text spells; whole numbers are integers. None if it is not one."""
    text = text.strip()
    if len(text) > 400 or "_" in text:  # Python would read 1_000, no other tool does
        return None
    if text in ("True", "False"):
        return text == "True"
    try:
        return number(int(text))
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def step_of(value: Any) -> int | None:
    """Return a value as a step if it is a whole number of 64 bits."""
    if isinstance(value, str):
        value = number_in(value)
    if isinstance(value, float) and abs(value) < 1 << 53 and value == int(value):
        value = int(value)
    return value if type(value) is int and value in _I64 else None


def nanoseconds(moment: Any) -> int | None:
    """Return a datetime, or its ISO text, in nanoseconds since 1970: without a time zone it is UTC. None for anything else."""
    if isinstance(moment, str):
        try:
            moment = datetime.fromisoformat(moment.replace("Z", "+00:00"))
        except ValueError:
            return None
    if not isinstance(moment, datetime):
        return None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)) - _EPOCH
    return since // timedelta(microseconds=1) * 1000 if since > timedelta(0) else None


def signature_of(files: Iterable[tuple[str, Path]]) -> list[list[Any]]:
    """Return the name, size and date of each file that is there: they change when there is something new to read."""
    facts = [(name, outcome(path.lstat)[0]) for name, path in files]
    return [[name, fact.st_size, fact.st_mtime_ns] for name, fact in facts if fact is not None]


def at_rest(path: Path) -> bool:
    """Return whether nobody has written to a file for a while."""
    return time.time() - path.stat().st_mtime > REST_SECONDS


def read_document(path: Path) -> bytes:
    """Read a whole file; raise OSError if it is not a regular file, or too large."""
    with open_regular(path) as file:
        return _whole(file, path)


def _whole(file: IO[bytes], name: object) -> bytes:
    data = file.read(MOST_DOCUMENT + 1)
    if len(data) > MOST_DOCUMENT:
        raise OSError(f"{name} is larger than {MOST_DOCUMENT >> 30} GiB")
    return data


def media_bytes(data: bytes) -> bytes:
    """Return the bytes of an image, a sound or a video; raise ValueError if they are too many."""
    if len(data) > MOST_MEDIA:
        raise ValueError(f"it is larger than {MOST_MEDIA >> 20} MiB")
    return data


def read_media(path: Path) -> bytes:
    """Read the file of an image, a sound or a video; raise ValueError if it is too large."""
    with open_regular(path) as file:
        return media_bytes(file.read(MOST_MEDIA + 1))


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it cannot be read."""
    try:
        return json.loads(read_document(path))
    except UNREADABLE:
        return None


def read_yaml(data: bytes) -> Any:
    """Return the plain data of a YAML document; objects in it stay unread. Raise ValueError if it cannot be parsed."""
    if len(data) > MOST_YAML:
        raise ValueError(f"it is YAML of more than {MOST_YAML >> 20} MiB")
    try:
        import yaml
    except ImportError as error:
        raise ValueError("it is YAML: pip install pyyaml, then import again") from error

    class Loader(yaml.SafeLoader):  # type: ignore[misc, unused-ignore]
        """Builds plain data only: a tag that would create a Python object gives a text with its name."""

        def flatten_mapping(self, node: Any) -> None:
            """Leave `<<` as it is: merges of merges can grow without bound."""

    def unknown(loader: Any, suffix: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return loader.construct_sequence(node, deep=True)
        return loader.construct_scalar(node) or f"<{suffix}>"

    Loader.add_multi_constructor("", unknown)
    try:
        return plain(yaml.load(data, Loader))  # noqa: S506 - derived from SafeLoader
    except (yaml.YAMLError, TypeError, RecursionError, AttributeError) as error:
        raise ValueError(f"it is not valid YAML: {str(error).splitlines()[0] if str(error) else type(error).__name__}") from error


def text_lines(file: IO[bytes], account: Account, what: str) -> Iterator[bytes]:
    """Yield the complete lines of a file; a last line without an end is still being written, or was torn."""
    while line := file.readline(MOST_LINE):
        if not line.endswith(b"\n"):
            if len(line) == MOST_LINE:
                account.leave(what, f"a line is longer than {MOST_LINE >> 20} MiB; the rest of the file was not read")
            elif line.strip():
                account.leave(what, "the last line is incomplete", line[:80].decode("utf-8", "replace"))
            return
        yield line


def json_lines(file: IO[bytes], account: Account, what: str) -> Iterator[Any]:
    """Yield what the lines of a file hold, one JSON value each; a line that is not JSON is counted."""
    for line in text_lines(file, account, what):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            account.leave(what, f"a line is not JSON ({type(error).__name__})", line[:80].decode("utf-8", "replace"))


def file_inside(folder: Path, name: str, *, below: str = "") -> Path:
    """Return a file in a folder, or in the one `below` it; raise ValueError or OSError if its name or a link leads elsewhere."""
    parts = (*([below] if below else []), *parts_of(name))
    open_inside(folder, *parts).close()
    return folder.joinpath(*parts)


def parts_of(name: str) -> tuple[str, ...]:
    """Return the parts of a file's name that somebody else wrote; raise ValueError if it leads out of its folder."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError("its name leads out of its folder")
    return path.parts


class Archive:
    """A zip file of somebody else: members are read by name, never unpacked by it, and only up to a bound."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)
        size = path.stat().st_size
        try:
            self._zip = zipfile.ZipFile(self._file)
        except UNREADABLE:
            self._file.close()
            raise
        self._left = ROOM + RATIO * size
        self.names = set(self._zip.namelist())

    def open(self, name: str) -> IO[bytes]:
        """Open a member for reading; raise ValueError if it is missing or would unpack to too much."""
        try:
            info = self._zip.getinfo(name)
        except KeyError as error:
            raise ValueError(f"the archive has no {name}") from error
        if info.file_size > self._left:
            raise ValueError(f"it would unpack to more than {RATIO} times the archive's size")
        self._left -= info.file_size
        return self._zip.open(info)

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return file.read()

    def unpack(self, name: str, target: Path) -> Path:
        """Write a member to a file whose name we choose."""
        with self.open(name) as source, target.open("xb") as file:
            while part := source.read(1 << 20):
                file.write(part)
        return target

    def close(self) -> None:
        self._zip.close()
        self._file.close()

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


class Folder:
    """The files of a folder, read as an archive's; no link in it is followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names = {file.name for file in path.iterdir() if file.is_file()}

    def parts(self, name: str) -> tuple[str, ...]:
        return parts_of(name)

    def open(self, name: str) -> IO[bytes]:
        return open_inside(self.path, *self.parts(name))

    def read(self, name: str) -> bytes:
        with self.open(name) as file:
            return _whole(file, name)

    def unpack(self, name: str, target: Path) -> Path:
        """Return the file itself: it needs no copy at `target`."""
        del target
        self.open(name).close()
        return self.path.joinpath(*self.parts(name))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_error: object) -> None:
        """Nothing is held open."""


Files = Archive | Folder


def opened_files(path: Path) -> Files:
    """Open a folder, or a zip file of one."""
    return Folder(path) if is_folder(path) else Archive(path)


_MEDIA: dict[str, type[Media]] = {
    **dict.fromkeys(("png", "jpg", "jpeg", "gif", "webp", "bmp", "tif", "tiff"), Image),
    **dict.fromkeys(("wav", "mp3", "flac", "ogg"), Audio),
    **dict.fromkeys(("mp4", "webm"), Video),
}


def media_of(data: bytes, ext: str, **facts: Any) -> Media:
    """Return a media file as the object that log() takes; raise ValueError if it is none we know."""
    ext = ext.lower().lstrip(".")
    if ext in ("html", "htm"):
        return Html(f"{data.decode('utf-8', 'replace')}\n")  # a text that ends in .html would be taken for a path
    if ext in ("txt", "md"):
        return Text(data.decode("utf-8", "replace"))
    kind = _MEDIA.get(ext)
    if kind is None:
        raise ValueError(f"files of type {ext or 'unknown'} are not media")
    found, error = outcome(kind, data, **facts)
    if found is None:
        raise ValueError(str(error))
    return found


class StepAxis:
    """Makes a metric with the exact steps the x axis of others: steps that are not whole numbers have one."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._defined: set[str] = set()

    def of(self, keys: Iterable[str]) -> Iterator[Definition]:
        """Yield the definitions of the keys that have none yet."""
        for key in keys:
            if key not in self._defined:
                self._defined.add(key)
                yield Definition(key=key, options={"x": self.key})


def reread(read: Callable[[], Iterable[Event]], position: Any) -> Iterator[Event]:
    """Yield what `resumed` does, for a source that another run may replace.

    If its first points are others than before, it was replaced: that becomes a new attempt, from its beginning.
    """
    known = position if isinstance(position, dict) else {}
    counts, first = (known[name] if isinstance(known.get(name), dict) else {} for name in ("counts", "first"))
    attempt = known["attempt"] if isinstance(known.get("attempt"), str) else ""
    if first and _replaced(read(), first):
        counts, first, attempt = {}, {}, f"{attempt}+"
    for event in resumed(_noted(read(), first, attempt), counts):
        yield Mark(position={"counts": event.position, "first": first, "attempt": attempt}) if isinstance(event, Mark) else event


def _noted(events: Iterable[Event], first: dict[str, Any], attempt: str) -> Iterator[Event]:
    """Note the first point of each key, and name the attempt."""
    for event in events:
        if isinstance(event, Rows):
            first.update({mark: value for mark, value in _first(event) if mark not in first})
        yield Start(time_ns=event.time_ns, attempt=attempt) if isinstance(event, Start) and not event.attempt else event


def resumed(events: Iterable[Event], position: Any) -> Iterator[Event]:
    """Yield the events that come after a position, and at the end the new position.

    It counts the points of each key, and everything else by kind. Sources that only grow keep these counts stable.
    """
    before = position if isinstance(position, dict) else {}
    skip = Counter({key: count for key, count in before.items() if isinstance(key, str) and type(count) is int})
    seen: Counter[str] = Counter()
    for event in events:
        if isinstance(event, Rows):
            yield from _after(event, skip, seen)
            continue
        counted = _counted(event)
        seen[counted] += counted != ""
        if not counted or seen[counted] > skip[counted]:
            yield event
    yield Mark(position={**before, **{key: max(count, skip[key]) for key, count in seen.items() if key}})


def _first(rows: Rows) -> Iterator[tuple[str, list[Any]]]:
    """Yield the first point of each column, as plain data that equals itself."""
    for key, column in rows.columns.items():
        yield f"{rows.rank}:{key}", [None if rows.steps is None else int(rows.steps[0]), repr(column[0].item())]


def _replaced(events: Iterable[Event], first: dict[str, Any]) -> bool:
    """Return whether a known key begins with another point than before."""
    missing = set(first)
    for event in events:
        if isinstance(event, Rows):
            for mark, value in _first(event):
                if mark in missing:
                    missing.discard(mark)
                    if value != first[mark]:
                        return True
        if not missing:
            return False
    return False


def _counted(event: Event) -> str:
    if isinstance(event, Values):
        return "v:" + "\0".join(event.values)
    return f"e:{type(event).__name__}" if isinstance(event, (Artifact, Console, Alert)) else ""


def _after(rows: Rows, skip: Counter[str], seen: Counter[str]) -> Iterator[Rows]:
    """Yield the part of some rows that was not read before; keys of which a different number is known go by themselves."""
    size = len(next(iter(rows.columns.values())))
    parts: dict[int, list[str]] = {}
    for key in rows.columns:
        counted = f"r:{rows.rank}:{key}"
        parts.setdefault(min(size, max(0, skip[counted] - seen[counted])), []).append(key)
        seen[counted] += size
    for start, keys in parts.items():
        if start < size:
            steps, times = (None if column is None else column[start:] for column in (rows.steps, rows.times))
            columns = {key: rows.columns[key][start:] for key in keys}
            yield Rows(steps=steps, times=times, columns=columns, rank=rows.rank, system=rows.system)
