"""Whole runs as a bundle that any tool can read: Parquet tables, JSON facts, and the files themselves.

docs/export.md describes it; `transfer/bundle.py` reads it back.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from .._version import __version__
from ..errors import FanfoldError, RunError, needed
from ..journal import Journal, blobs, bodies, walker
from ..journal import format as fmt
from ..journal.directory import encode_name
from ..store import StoredRun, open_run
from ..store.attempts import Attempt

FORMAT, VERSION = "fanfold-bundle", 1
MANIFEST, RUN = "manifest.json", "run.json"
GROUP_ROWS = 1 << 17  # rows of a row group
_LEFT_OUT = {
    "ops": "operator profile",
    "usage": "API usage",
    "saved": "stamped model file",
    "trace": "trace",
    "span": "timed span",
}


def schemas() -> dict[str, Any]:
    """Return the tables of a run and their columns."""
    with needed("pyarrow", "arrow", "exporting a project"):
        import pyarrow as pa
    place = [("attempt", pa.int32()), ("rank", pa.int32())]
    point = [*place, ("key", pa.string()), ("step", pa.int64()), ("time", pa.timestamp("ns", "UTC"))]
    return {
        "points": pa.schema(
            [*point, ("value", pa.float64()), ("integer", pa.int64()), ("boolean", pa.bool_()), ("origin", pa.string())]
        ),
        "texts": pa.schema([*point, ("text", pa.string())]),
        "media": pa.schema(
            [*point, ("position", pa.int32()), ("kind", pa.string()), ("file", pa.string()), ("size", pa.int64()),
             ("facts", pa.string())]
        ),
        "console": pa.schema([*place, ("time", pa.timestamp("ns", "UTC")), ("stream", pa.string()), ("output", pa.binary())]),
    }  # fmt: skip


def write_bundle(target: Path, runs: Iterable[StoredRun]) -> list[dict[str, Any]]:
    """Write runs to a new folder and return an account of each. The manifest comes last: without it, nothing is a bundle."""
    schemas()
    if target.exists() and any(target.iterdir()):
        raise RunError(f"{target} is not empty. Nothing was written. Name a folder that does not exist yet.")
    target.mkdir(parents=True, exist_ok=True)
    done = [_RunFolder(target, run).write() for run in runs]
    manifest = {
        "format": FORMAT, "version": VERSION, "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "writer": f"fanfold {__version__}", "runs": done,
    }  # fmt: skip
    _write_json(target / MANIFEST, manifest)
    return done


class _RunFolder:
    """One run of a bundle being written."""

    def __init__(self, target: Path, run: StoredRun) -> None:
        self.target, self.project = target, run.project
        self.run = open_run(run.pulled())
        self.folder = f"runs/{encode_name(run.project)}/{encode_name(run.id)}"
        self.counts: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()

    def write(self) -> dict[str, Any]:
        import pyarrow.parquet as pq

        place = self.target / self.folder
        place.mkdir(parents=True)
        with contextlib.ExitStack() as stack:
            tables = {
                name: _Table(stack.enter_context(pq.ParquetWriter(place / f"{name}.parquet", schema)), schema)
                for name, schema in schemas().items()
            }
            for number, attempt in enumerate(self.run.attempts):
                for journal in attempt.journals:
                    self._journal(number, journal, tables)
            for name, table in tables.items():
                table.flush()
                self.counts[name] = table.rows
        for name in [name for name in schemas() if not self.counts[name]]:
            (place / f"{name}.parquet").unlink()
        facts = self._facts()
        _write_json(place / RUN, facts)
        return {
            "id": self.run.id, "project": self.project, "name": self.run.name, "status": self.run.status, "folder": self.folder,
            **{name: count for name, count in self.counts.items() if count}, "left_out": dict(self.left_out),
        }  # fmt: skip

    # Tables

    def _journal(self, attempt: int, journal: Journal, tables: dict[str, _Table]) -> None:
        place = {"attempt": attempt, "rank": journal.header.rank}
        for found in journal.walk(0):
            if isinstance(found, walker.RowSpan):
                for columns in _columns(found):
                    tables["points"].add_columns({**place, **columns})
                continue
            data = found.data
            if isinstance(data, bodies.Values):
                self._values(place, data, tables)
            elif isinstance(data, bodies.Console):
                tables["console"].add({**place, "time": data.t, "stream": data.stream, "output": data.b})
            elif isinstance(data, bodies.Lost):
                self.left_out["value that never arrived"] += 1
            elif isinstance(data, bodies.Event) and data.event in _LEFT_OUT:
                self.left_out[_LEFT_OUT[data.event]] += 1

    def _values(self, place: dict[str, Any], data: bodies.Values, tables: dict[str, _Table]) -> None:
        for key, value in data.v.items():
            point = {**place, "key": key, "step": data.s, "time": data.t}
            if isinstance(value, str):
                tables["texts"].add({**point, "text": value})
                continue
            for position, entry in enumerate(value if isinstance(value, list) else [value]):
                facts = {name: fact for name, fact in entry.items() if name not in ("type", "blob", "ext", "size")}
                tables["media"].add({
                    **point, "position": position if isinstance(value, list) else None, "kind": entry.get("type"),
                    "file": self._file(entry.get("blob"), entry.get("ext")), "size": entry.get("size"),
                    "facts": json.dumps(facts),
                })  # fmt: skip

    def _file(self, blob: Any, ext: Any = None) -> str | None:
        """Copy a blob into the bundle, once, and return where it is."""
        if not isinstance(blob, str):
            return None
        suffix = f".{ext}" if isinstance(ext, str) and ext.isalnum() and len(ext) <= 8 else ""
        name = f"files/{blob[:2]}/{blob}{suffix}"
        path = self.target / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                shutil.copyfile(blobs.path_of(self.run.path, blob), path, follow_symlinks=False)
            except (OSError, FanfoldError):
                self.left_out["file that is missing"] += 1
                return None
        return name

    # Facts

    def _facts(self) -> dict[str, Any]:
        run = self.run
        return {
            "id": run.id, "project": self.project, "name": run.name, "group": run.group, "notes": run.notes, "tags": run.tags,
            "config": run.config, "summary": run.assigned, "facts": run.facts, "archived": bool(run.info.get("archived")),
            "status": run.status, "created": run.started, "seen": run.seen, "duration": run.duration,
            "attempts": [_attempt(attempt) for attempt in run.attempts],
            "definitions": [{"key": key, **_picked(rule, "x", "summary")} for key, rule in run.metrics.items()],
            "alerts": [{**_at(one), **_picked(one, "level", "title", "text")} for one in run.alerts],
            "artifacts": [
                {**_at(one), **_picked(one, "name", "kind", "metadata"), "files": [self._kept(file) for file in one["files"]]}
                for one in run.artifacts
            ],
            "code": [self._kept({"size": None, **file}) for file in _code(run.facts)], "left_out": dict(self.left_out),
        }  # fmt: skip

    def _kept(self, file: dict[str, Any]) -> dict[str, Any]:
        return {"path": file["path"], "size": file["size"], "file": self._file(file["blob"])}


def _code(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the files with code that no commit has: the patch of a work tree, and sources that git does not track."""
    git, code = facts.get("git"), facts.get("code")
    patch = git.get("patch") if isinstance(git, dict) else None
    files = code.get("files") if isinstance(code, dict) else None
    found = [{"path": "changes.patch", **patch}] if isinstance(patch, dict) else []
    found += [file for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return [file for file in found if isinstance(file.get("blob"), str) and isinstance(file.get("path"), str)]


def _picked(found: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: found[name] for name in names if found.get(name) is not None}


def _at(event: dict[str, Any]) -> dict[str, Any]:
    return {"time_ns": event["t"], "step": event.get("s"), "rank": event["rank"]}


def _attempt(attempt: Attempt) -> dict[str, Any]:
    verdict = attempt.verdict()
    return {
        "key": attempt.key, "started_ns": attempt.started, "seen_ns": attempt.seen, "status": verdict["status"],
        "ended_ns": verdict.get("time"), "error": verdict.get("error") or verdict.get("reason"),
        "ranks": sorted({journal.header.rank for journal in attempt.mains}),
    }  # fmt: skip


def _columns(rows: walker.RowSpan) -> Iterator[dict[str, Any]]:
    """Yield the points of consecutive rows, a key at a time."""
    shape = rows.shape
    names, formats, offsets = ["time"], ["<i8"], [fmt.HEAD_SIZE + 4]
    stepped = not shape.layout & fmt.Layout.STEP_NONE
    if stepped:
        names, offsets = [*names, "step"], [*offsets, fmt.HEAD_SIZE + 12]
        formats.append("<i8" if shape.layout & fmt.Layout.STEP_WIDE else "<i4")
    at = fmt.HEAD_SIZE + shape.size - sum(fmt.TYPE_SIZE[code] for code in shape.types)
    for n, code in enumerate(shape.types):
        names, formats, offsets = [*names, f"v{n}"], [*formats, fmt.DTYPE[code]], [*offsets, at]
        at += fmt.TYPE_SIZE[code]
    kind = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": rows.stride})
    table = np.frombuffer(rows.view, kind)
    steps = table["step"].astype(np.int64) if stepped else None
    for n, (key, code) in enumerate(zip(shape.keys, shape.types, strict=True)):
        column = table[f"v{n}"].copy()
        yield {
            "key": key, "step": steps, "time": table["time"].astype(np.int64), "value": column.astype(np.float64),
            "integer": column.astype(np.int64) if code == "q" else None, "boolean": column if code == "?" else None,
            "origin": shape.origin,
        }  # fmt: skip


class _Table:
    """A Parquet file that is written a row group at a time."""

    def __init__(self, writer: Any, schema: Any) -> None:
        self.rows = 0
        self._writer, self._schema = writer, schema
        self._held: list[dict[str, Any]] = []
        self._tables: list[Any] = []
        self._waiting = 0

    def add(self, row: dict[str, Any]) -> None:
        """Add one row."""
        self._held.append(row)
        self._count(1)

    def add_columns(self, columns: dict[str, Any]) -> None:
        """Add many rows: columns are arrays, one value for all rows, or None."""
        import pyarrow as pa

        size = len(columns["time"])
        arrays = []
        for field in self._schema:
            column = columns[field.name]
            if column is None:
                arrays.append(pa.nulls(size, field.type))
            elif isinstance(column, np.ndarray):
                arrays.append(pa.array(column, from_pandas=False).cast(field.type))
            else:
                arrays.append(pa.repeat(pa.scalar(column, field.type), size))
        self._tables.append(pa.Table.from_arrays(arrays, schema=self._schema))
        self._count(size)

    def _count(self, rows: int) -> None:
        self.rows += rows
        self._waiting += rows
        if self._waiting >= GROUP_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        import pyarrow as pa

        if self._held:
            self._tables.append(pa.Table.from_pylist(self._held, schema=self._schema))
        if self._tables:
            self._writer.write_table(pa.concat_tables(self._tables))
        self._held, self._tables, self._waiting = [], [], 0


def _write_json(path: Path, content: Any) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False)
    path.write_text(f"{text}\n", encoding="utf-8", errors="backslashreplace")
