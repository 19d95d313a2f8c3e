"""Bundles that `fanfold export` wrote: whole runs come back as they were, with their ids, attempts, ranks and files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ..errors import outcome
from ..media import Media, decode
from .bundle_write import FORMAT, MANIFEST, RUN, VERSION, schemas
from .events import Alert, Artifact, Console, Definition, End, Event, Facts, Found, Rows, Start, Values
from .reading import UNREADABLE, Account, file_inside, read_json, read_media, resumed, signature_of, step_of

BATCH = 1 << 15
FILES = (RUN, "points.parquet", "texts.parquet", "media.parquet", "console.parquet")
Row = dict[str, Any]


class BundleImporter:
    """Folders that `fanfold export` wrote."""

    kind = "fanfold"
    title = "fanfold bundle"

    def find(self, path: Path) -> Iterator[Found]:
        folder = path.parent if path.name == MANIFEST else path
        if not (folder / MANIFEST).is_file():
            return
        manifest = read_json(folder / MANIFEST)
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
            return
        for run in manifest["runs"] if isinstance(manifest.get("runs"), list) else ():
            if isinstance(run, dict) and isinstance(run.get("id"), str) and isinstance(run.get("folder"), str):
                inside = folder.absolute() / _safe(run["folder"])
                yield Found(
                    kind=self.kind, id=f"{run.get('project')}/{run['id']}", paths=(inside, folder.absolute()),
                    project=str(run.get("project") or "imported"), name=str(run.get("name") or ""), fanfold_id=run["id"],
                )  # fmt: skip

    def signature(self, found: Found) -> Any:
        """Return what changes with one run: the other runs of the bundle are not looked at."""
        return signature_of((name, found.paths[0] / name) for name in FILES)

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        yield from resumed(_Reading(*found.paths).events(), position)


def _safe(name: str) -> PurePosixPath:
    """Return a path of the manifest if it stays inside of the bundle."""
    path = PurePosixPath(name)
    return PurePosixPath("missing") if path.is_absolute() or ".." in path.parts else path


class _Reading:
    """One run of a bundle."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        self.folder, self.bundle = folder, bundle
        self.left = Account()

    def events(self) -> Iterator[Event]:
        facts = read_json(self.folder / RUN)
        if not isinstance(facts, dict):
            self.left.leave("run", f"its {RUN} cannot be read", self.folder)
            yield from self.left.events()
            return
        attempts = [one for one in _list(facts, "attempts") if isinstance(one, dict)] or [{}]
        yield from self._describe(facts)
        for n, attempt in enumerate(attempts):
            yield from self._attempt(n, attempt, last=n == len(attempts) - 1, facts=facts)
        for what, count in (facts.get("left_out") or {}).items():
            self.left.leave(str(what), "bundles do not have it", count=count if type(count) is int else 1)
        yield from self.left.events()

    def _describe(self, facts: Row) -> Iterator[Event]:
        texts = {name: facts[name] for name in ("name", "group", "notes") if isinstance(facts.get(name), str)}
        data = {name: facts[name] for name in ("config", "summary", "facts") if isinstance(facts.get(name), dict) and facts[name]}
        tags = [str(tag) for tag in _list(facts, "tags")]
        yield Facts(**texts, **data, tags=tags or None, archived=True if facts.get("archived") is True else None)

    def _attempt(self, n: int, attempt: Row, *, last: bool, facts: Row) -> Iterator[Event]:
        started, key = step_of(attempt.get("started_ns")), attempt["key"] if isinstance(attempt.get("key"), str) else None
        for rank in sorted({rank for rank in _list(attempt, "ranks") if type(rank) is int and rank >= 0} | {0}):
            yield Start(time_ns=started, attempt=str(n), rank=rank, key=key)
        for one in _list(facts, "definitions") if last else ():
            if isinstance(one, dict) and isinstance(one.get("key"), str):
                yield Definition(key=one["key"], options={name: one[name] for name in ("x", "summary") if one.get(name)})
        yield from self._points(n)
        yield from self._texts(n)
        yield from self._media(n)
        for row in self._table("console", n):
            if isinstance(row["output"], bytes):
                text = row["output"].decode("utf-8", "backslashreplace")
                yield Console(text=text, time_ns=row["time"], stream=str(row["stream"] or ""), rank=row["rank"] or 0)
        if last:
            yield from self._happened(facts)
        yield _end(attempt)

    # Tables

    def _batches(self, name: str, attempt: int) -> Iterator[Any]:
        path = self.folder / f"{name}.parquet"
        if not path.is_file() or path.is_symlink():
            return
        try:
            import pyarrow.compute as pc
            import pyarrow.parquet as pq

            file = pq.ParquetFile(path)
            missing = {*schemas()[name].names} - {*file.schema_arrow.names}
            if missing:
                raise KeyError(f"no column {', '.join(sorted(missing))}")
            for batch in file.iter_batches(BATCH):
                batch.validate(full=True)  # damage may leave texts that are not UTF-8
                chosen = batch.filter(pc.equal(batch.column("attempt"), attempt))
                if chosen.num_rows:
                    yield chosen
        except ImportError:
            self.left.leave("table", "reading Parquet needs pyarrow: pip install 'fanfold[arrow]'", path)
        except (*UNREADABLE, KeyError, TypeError) as error:
            self.left.leave("table", f"it cannot be read further ({error})", path)

    def _table(self, name: str, attempt: int) -> Iterator[Row]:
        for batch in self._batches(name, attempt):
            times = _integers(batch, "time")
            rows = batch.drop_columns(["time"]).to_pylist()
            for row, when in zip(rows, times, strict=True):
                yield {**row, "time": when}

    def _points(self, attempt: int) -> Iterator[Event]:
        """Yield the points, a run of equal keys and types at a time."""
        for batch in self._batches("points", attempt):
            keys, origins = (batch.column(name).to_pylist() for name in ("key", "origin"))
            ranks, times = batch.column("rank").to_pylist(), np.array(_integers(batch, "time"), np.int64)
            stepped, steps = _nullable(batch, "step", np.int64)
            whole, integers = _nullable(batch, "integer", np.int64)
            flags, booleans = _nullable(batch, "boolean", np.bool_)
            values = _nullable(batch, "value", np.float64)[1]
            marks = list(zip(keys, ranks, origins, stepped.tolist(), whole.tolist(), flags.tolist(), strict=True))
            start = 0
            while start < len(marks):
                stop = start + 1
                while stop < len(marks) and marks[stop] == marks[start]:
                    stop += 1
                key, rank, origin, has_step, is_whole, is_flag = marks[start]
                column = integers if is_whole else booleans if is_flag else values
                some = slice(start, stop)
                yield Rows(
                    steps=steps[some] if has_step else None, times=times[some], columns={str(key): column[some]},
                    rank=int(rank or 0), system=origin == "system" and not has_step,
                )  # fmt: skip
                start = stop

    def _texts(self, attempt: int) -> Iterator[Event]:
        for row in self._table("texts", attempt):
            if isinstance(row["text"], str):
                yield Values(step=row["step"], time_ns=row["time"], values={str(row["key"]): row["text"]}, rank=row["rank"] or 0)

    def _media(self, attempt: int) -> Iterator[Event]:
        """Yield media; the items of a list follow each other."""
        held: list[Any] = []
        place: tuple[Any, ...] = ()
        for row in self._table("media", attempt):
            here = (row["key"], row["rank"], row["step"], row["time"])
            if held and (here != place or not row["position"]):
                yield self._held(place, held)
                held = []
            media, error = outcome(self._loaded, row)
            if media is None:
                self.left.leave(str(row["kind"]), f"it cannot be read: {error}", row["key"])
            elif row["position"] is None:
                yield Values(step=row["step"], time_ns=row["time"], values={str(row["key"]): media}, rank=row["rank"] or 0)
            else:
                held, place = [*held, media], here
        if held:
            yield self._held(place, held)

    def _held(self, place: tuple[Any, ...], items: list[Any]) -> Values:
        key, rank, step, when = place
        return Values(step=step, time_ns=when, values={str(key): items}, rank=rank or 0)

    def _loaded(self, row: Row) -> Media:
        facts = json.loads(row["facts"] or "{}")
        data = read_media(file_inside(self.bundle, str(row["file"]))) if row["file"] else b""
        return decode(str(row["kind"]), facts, data)

    # Alerts and artifacts

    def _happened(self, facts: Row) -> Iterator[Event]:
        for one in _list(facts, "alerts"):
            if isinstance(one, dict):
                yield Alert(
                    title=str(one.get("title") or ""), text=str(one.get("text") or ""), level=str(one.get("level") or "warn"),
                    step=step_of(one.get("step")), time_ns=step_of(one.get("time_ns")), rank=_rank(one.get("rank")),
                )  # fmt: skip
        code = {"name": "code", "kind": "code", "files": _list(facts, "code")}
        for one in [*_list(facts, "artifacts"), *([code] if code["files"] else [])]:
            if not isinstance(one, dict):
                continue
            files = []
            for file in _list(one, "files"):
                path, error = outcome(lambda file=file: file_inside(self.bundle, str(file["file"])))  # type: ignore[misc]
                if path is None:
                    self.left.leave("file", f"it is not in the bundle ({error})", str(file)[:80])
                else:
                    files.append((str(file["path"]), path))
            yield Artifact(
                name=str(one.get("name") or ""), files=files, type=str(one.get("kind") or "file"),
                metadata=one["metadata"] if isinstance(one.get("metadata"), dict) else None, step=step_of(one.get("step")),
                time_ns=step_of(one.get("time_ns")),
            )  # fmt: skip


def _end(attempt: Row) -> End:
    """Return how an attempt ended. One that was still running when it was exported counts as killed."""
    status, time_ns = str(attempt.get("status")), step_of(attempt.get("ended_ns")) or step_of(attempt.get("seen_ns"))
    if status in ("finished", "failed", "killed", "preempted"):
        return End(status=status, time_ns=time_ns, cause=str(attempt.get("error") or ""))
    return End(status="killed", time_ns=time_ns, cause=f"it was {status} when it was exported")


def _rank(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def _list(facts: Row, name: str) -> list[Any]:
    found = facts.get(name)
    return found if isinstance(found, list) else []


def _integers(batch: Any, name: str) -> list[int]:
    """Return a column of times as nanoseconds."""
    import pyarrow as pa

    return [value or 0 for value in batch.column(name).cast(pa.int64()).to_pylist()]


def _nullable(batch: Any, name: str, kind: Any) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return where a column has values, and the values."""
    column = batch.column(name)
    there = column.is_valid().to_numpy(zero_copy_only=False)
    filled = column.fill_null(False if kind is np.bool_ else 0)
    return there, filled.to_numpy(zero_copy_only=False).astype(kind, copy=False)
