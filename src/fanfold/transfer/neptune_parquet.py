"""Parquet files of neptune-exporter: `<project>/<run>_part_<n>.parquet`, one row for each value, and files in a folder beside."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingExtra, needed, outcome
from ..journal.directory import is_link
from ..journal.files import open_regular
from .events import Artifact, Console, Event, Found, Left, Rows, Values
from .neptune_run import MONITORING, STEP_KEY, Attributes, file_event, histogram
from .reading import Account, StepAxis, resumed

BATCH = 1 << 16
MOST_FOOTER = 16 << 20
MICRO = 1_000_000  # Neptune's steps have six decimals
MARKS = (b"attribute_path", b"attribute_type", b"histogram_value", b"float_value")
NEEDED = {"project_id", "run_id", "attribute_path", "attribute_type", "step", "timestamp"}
_PART = re.compile(r"(.+)_part_([0-9]{1,9})\.parquet$")
_SINGLE = {
    "float": "float_value", "int": "int_value", "string": "string_value", "bool": "bool_value", "datetime": "datetime_value",
    "string_set": "string_set_value",
}  # fmt: skip
_FILES = ("file", "file_set", "artifact", "file_series")


def find(path: Path) -> Iterator[Found]:
    """Yield the runs whose parts are in this folder."""
    runs: dict[str, list[tuple[int, Path]]] = {}
    for file in path.glob("*_part_*.parquet") if path.is_dir() else ():
        match = _PART.match(file.name)
        if match:
            runs.setdefault(match[1], []).append((int(match[2]), file))
    for _, parts in sorted(runs.items()):
        files = tuple(file for _, file in sorted(parts))
        if any(_is_export(file) for file in files):
            yield _found(files)


def _is_export(path: Path) -> bool:
    """Return whether a file is Parquet with the exporter's columns, by its last bytes: this needs no library."""
    try:
        with open_regular(path) as file:
            size = path.stat().st_size
            file.seek(max(0, size - 8))
            tail = file.read(8)
            length = int.from_bytes(tail[:4], "little")
            if tail[4:] != b"PAR1" or length > min(size, MOST_FOOTER):
                return False
            file.seek(size - 8 - length)
            footer = file.read(length)
    except OSError:
        return False
    return all(mark in footer for mark in MARKS)


def _found(files: tuple[Path, ...]) -> Found:
    """Return how a run is known: by the single values at the beginning of its first part that can be read."""
    values: dict[str, Any] = {}
    for file in files:
        found, error = outcome(_names, file)
        if isinstance(error, MissingExtra):
            raise error
        if found:
            values = found
            break
    project, run = str(values.get("project") or files[0].parent.name), str(values.get("run") or files[0].stem)
    ours = values.get("fanfold/run")
    name = str(values.get("sys/name") or run)
    home = project.rpartition("/")[2]
    return Found(kind="neptune", id=f"{project}/{run}", paths=files, project=home, name=name, fanfold_id=ours)


def _names(file: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    wanted = ["project_id", "run_id", "attribute_path", "string_value"]
    for batch in itertools.islice(_batches(file, wanted), 2):
        columns = [batch.column(i).to_pylist() for i in range(4)]
        for project, run, path, text in zip(*columns, strict=True):
            values.setdefault("project", project)
            values.setdefault("run", run)
            if path in ("sys/name", "fanfold/run"):
                values[path] = text
    return values


def _batches(path: Path, columns: list[str] | None = None) -> Iterator[Any]:
    with needed("pyarrow", "arrow", "Reading Neptune's export"):
        import pyarrow.parquet
    with pyarrow.parquet.ParquetFile(path) as file:
        if not set(file.schema_arrow.names) >= NEEDED:
            raise ValueError("it is not an export of Neptune")
        for batch in file.iter_batches(batch_size=BATCH, columns=columns):
            batch.validate(full=True)  # damage may leave texts that are not UTF-8
            yield batch


def read(found: Found, position: Any) -> Iterator[Event]:
    """Yield a run's events."""
    yield from resumed(_Export(found).events(), position)


class _Export:
    """One exported run."""

    def __init__(self, found: Found) -> None:
        self.found, self.account = found, Account()
        self.attributes = Attributes()
        self.readable = False
        self.scale = 1
        self.axis = StepAxis(STEP_KEY)
        self.last: int | None = None
        self.names: dict[str, str] = {}

    def events(self) -> Iterator[Event]:
        """Yield everything; a damaged part is counted, and the others are read."""
        yield from self._survey()
        if not self.readable:
            yield Left(what="runs", why="none of the export's parts can be read", example=self.found.paths[0].name)
            return
        yield from self.attributes.began()
        self.names = self.attributes.names() if self.attributes.ours else {}
        for part in self.found.paths:
            batches = self._guarded(part, None)
            for batch in batches:
                yield from self.account.all_or_none(self._series(batch), "parts of the export", part.name)
        yield from self.account.events()
        yield from self.attributes.ended(self.last)

    def _guarded(self, part: Path, columns: list[str] | None) -> Iterator[Any]:
        """Yield the batches of a part up to the first that is damaged."""
        batches = _batches(part, columns)
        while True:
            batch, error = outcome(next, batches, None)
            if error is not None and columns is None:
                self.account.leave("parts of the export", f"cannot be read: {str(error)[:200]}", part.name)
            if batch is None:
                return
            yield batch

    def _survey(self) -> Iterator[Left]:
        """Read the single values, and how fine the steps are."""
        finest = MICRO
        wanted = ["project_id", "run_id", "attribute_path", "attribute_type", "step", "timestamp", *_SINGLE.values()]
        for part in self.found.paths:
            for batch in self._guarded(part, wanted):
                self.readable = True
                looked, _ = outcome(self._first_look, batch, finest)
                finest = looked or finest
        for scale in (1, 10, 100, 1000, 10_000, 100_000, MICRO):
            if finest % (MICRO // scale) == 0:
                self.scale = scale
                break
        yield from self.account.events()

    def _first_look(self, batch: Any, finest: int) -> int:
        steps, valid = _steps(batch)
        self._single_values(batch)
        return int(np.gcd.reduce(steps[valid], initial=finest)) if valid.any() else finest

    def _single_values(self, batch: Any) -> None:
        kinds = batch.column("attribute_type").to_pylist()
        places = [i for i, kind in enumerate(kinds) if kind in _SINGLE]
        if not places:
            return
        chosen = batch.take(_indices(places))
        paths, columns = chosen.column("attribute_path").to_pylist(), {}
        for name in set(_SINGLE.values()) & set(chosen.schema.names):
            columns[name] = chosen.column(name).to_pylist()
        for i, (path, place) in enumerate(zip(paths, places, strict=True)):
            values = columns.get(_SINGLE[kinds[place]])
            if values is not None and path is not None and values[i] is not None:
                self.attributes.values[path] = values[i]

    # Series

    def _series(self, batch: Any) -> Iterator[Event]:
        kinds = batch.column("attribute_type").to_pylist()
        paths = batch.column("attribute_path").to_pylist()
        groups: dict[tuple[str, str], list[int]] = {}
        for i, (path, kind) in enumerate(zip(paths, kinds, strict=True)):
            if kind not in _SINGLE and path is not None:
                groups.setdefault((path, str(kind)), []).append(i)
        steps, stepped = _steps(batch)
        times, timed = _times(batch)
        if timed.any():
            self.last = max(self.last or 0, int(times[timed].max()))
        for (path, kind), places in groups.items():
            at = np.array(places)
            if kind == "float_series":
                yield from self._numbers(path, batch.take(_indices(places)), steps[at], stepped[at], times[at], timed[at])
            elif kind in ("string_series", "histogram_series", *_FILES):
                rows = batch.take(_indices(places))
                for i, place in enumerate(places):
                    step = int(steps[place]) // (MICRO // self.scale) if stepped[place] else None
                    yield from self._value(path, kind, rows, i, step, int(times[place]) if timed[place] else None)
            else:
                self.account.leave(f"attributes of type {kind}", "there is nothing like it in fanfold", path, len(places))

    def _numbers(self, path: str, rows: Any, steps: Any, stepped: Any, times: Any, timed: Any) -> Iterator[Event]:
        column = rows.column("float_value")
        values = np.array(column.to_numpy(zero_copy_only=False), np.float64)  # an empty cell is NaN
        key = self.names.get(path, path)
        if path.startswith(MONITORING):
            yield from _split({path: values}, None, times, timed, system=True)
            return
        columns = {key: values}
        if self.scale > 1:
            yield from self.axis.of([key])
            columns[STEP_KEY] = steps / MICRO
        whole = steps // (MICRO // self.scale)
        if stepped.all():
            yield from _split(columns, whole, times, timed)
        else:
            for have in (stepped, ~stepped):
                some = {name: value[have] for name, value in columns.items() if have is stepped or name != STEP_KEY}
                yield from _split(some, whole[have] if have is stepped else None, times[have], timed[have])

    def _value(self, path: str, kind: str, rows: Any, i: int, step: int | None, time_ns: int | None) -> Iterator[Event]:
        key = self.names.get(path, path)
        if kind == "string_series":
            text = rows.column("string_value")[i].as_py()
            if text is None:
                self.account.leave("texts", "they are empty", key)
            elif path.startswith(MONITORING) and path.rpartition("/")[2] in ("stdout", "stderr"):
                yield Console(text=text if text.endswith("\n") else f"{text}\n", time_ns=time_ns, stream=path.rpartition("/")[2])
            else:
                yield Values(step=step, time_ns=time_ns, values={key: text})
        elif kind == "histogram_series":
            made = histogram(key, rows.column("histogram_value")[i].as_py() or {}, self.account)
            if made is not None:
                yield Values(step=step, time_ns=time_ns, values={key: made})
        else:
            place = self._file((rows.column("file_value")[i].as_py() or {}).get("path"))
            if place is None:
                self.account.leave("files", "they are not beside the export", path)
            elif kind == "file_series":
                yield file_event(key, place, step, time_ns)
            else:
                yield Artifact(name=key, files=_members(place), time_ns=time_ns)

    def _file(self, name: Any) -> Path | None:
        """Return where a file is: in `files/<project>` beside the folder with the data. It names no other place to read."""
        project = self.found.paths[0].parent
        for home in (project.parent.parent / "files" / project.name, project.parent / "files" / project.name, project):
            place = home / str(name)
            if name and place.exists() and not _leads_out(home, place):
                return place
        return None


def _leads_out(home: Path, place: Path) -> bool:
    """Return whether a place is outside of a folder of the export, or there is a link on the way to it."""
    inner = Path(os.path.normpath(place))
    if not inner.is_relative_to(home):
        return True
    steps = [home.joinpath(*inner.relative_to(home).parts[:depth]) for depth in range(len(inner.relative_to(home).parts) + 1)]
    return is_link(home.parent) or any(is_link(step) for step in steps)


def _members(place: Path) -> list[tuple[str, Path]]:
    if place.is_file():
        return [(place.name, place)]
    return [(str(path.relative_to(place)), path) for path in sorted(place.rglob("*")) if path.is_file() and not path.is_symlink()]


def _indices(places: list[int]) -> Any:
    import pyarrow

    return pyarrow.array(places, pyarrow.int64())


def _steps(batch: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return steps as millionths, exactly, and which rows have one."""
    import pyarrow

    column = batch.column("step").cast(pyarrow.decimal128(38, 6))
    valid = np.array(column.is_valid().to_numpy(zero_copy_only=False), bool)
    buffer = column.buffers()[1]
    if buffer is None or not len(column):
        return np.zeros(len(column), np.int64), np.zeros(len(column), bool)
    words = np.frombuffer(buffer, np.int64).reshape(-1, 2)[column.offset : column.offset + len(column)]
    fits = valid & (words[:, 1] == words[:, 0] >> 63)  # within 64 bits
    return np.where(fits, words[:, 0], 0), fits


def _times(batch: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    import pyarrow

    column = batch.column("timestamp").cast(pyarrow.timestamp("us", tz="UTC"), safe=False)
    valid = np.array(column.is_valid().to_numpy(zero_copy_only=False), bool)
    micros = np.array(column.cast(pyarrow.int64()).fill_null(0).to_numpy(zero_copy_only=False), np.int64)
    valid &= (micros > 0) & (micros < 1 << 53)
    return np.where(valid, micros, 0) * 1000, valid


def _split(columns: dict[str, Any], steps: Any, times: Any, timed: Any, *, system: bool = False) -> Iterator[Rows]:
    """Yield rows with times and rows without."""
    for have in (timed, ~timed):
        if have.any():
            yield Rows(
                steps=None if steps is None else steps[have], times=times[have] if have is timed else None,
                columns={key: values[have] for key, values in columns.items()}, system=system,
            )  # fmt: skip
