"""The answers of the dashboard's server, written to files, each named by the question that the page asks (web/src/lib/copy.ts).

What depends on the page's question (a filter, some runs, a zoom, the rows of a table) is written as a whole, and the page works
it out. Media are written by content; logged HTML as text, so that opening a file runs nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ..errors import FanfoldError
from ..journal import blobs
from ..plain import json_safe
from ..server import data, edit, samples
from ..server.media import TYPES
from ..store.query import Store
from ..store.run import StoredRun

MOST_BUCKETS, LEAST_BUCKETS = 1000, 100  # of each series
ALL_BUCKETS = 400_000  # of all runs of a key: a page loads them in one file
MOST_ROWS = 5_000  # of a logged table
AXES = ("auto", "time", "relative")
FACTS = ("id", "name", "project", "status", "group", "notes", "tags", "created", "seen", "duration", "ranks", "attempts",
         "config", "latest", "summary")  # fmt: skip


def name_of(*words: object) -> str:
    """Return the name of the file that answers a question: FNV-1a of its words, 64 bits."""
    found = 0xCBF29CE484222325
    for byte in "\0".join(map(str, words)).encode("utf-8", "surrogatepass"):
        found = (found ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{found:016x}"


@dataclass
class Answers:
    """The files of a published folder, below `data`. `left_out` counts what is not in them, by reason."""

    store: Store
    data: Path
    buckets: int | None = None
    media: bool = True
    left_out: dict[str, int] = field(default_factory=dict)
    plotly: bool = False  # some figure needs its script
    _names: set[str] = field(default_factory=set)
    _several: dict[str, bool] = field(default_factory=dict)

    def leave_out(self, why: str, count: int = 1) -> None:
        self.left_out[why] = self.left_out.get(why, 0) + count

    def put(self, *question: object, answer: Any) -> None:
        """Write an answer as JSON. Numbers that JSON lacks become texts."""
        self._write(f"{name_of(*question)}.json", msgspec.json.encode(json_safe(answer)))

    def _write(self, name: str, content: bytes) -> None:
        """Write a file. Its name is not a secure hash: a crafted run could replace an answer about another one."""
        if name in self._names:
            self.leave_out("answers whose files would have the name of another one")
            return
        self._names.add(name)
        (self.data / name).write_bytes(content)

    def questions(self) -> Iterator[Callable[[], None]]:
        """Yield the work, piece by piece; the number of pieces is known without doing any."""
        yield self._projects
        for project in self.store.projects():
            listed = data.runs(self.store, project.name, "", "")
            ids = [run["id"] for run in listed["runs"]]
            yield partial(self._project, project.name, listed)
            for id in ids:
                yield partial(self._run, project.name, id)
            runs = list(self.store.several(project.name, ids).values())
            for key in dict.fromkeys(key for run in runs for key in (*run.keys(), *run.keys("system"))):
                yield partial(self._key, project.name, ids, key)
            for key in dict.fromkeys(key for run in runs for kind in ("media", "text") for key in run.keys(kind)):
                yield partial(self._media, project.name, runs, key)

    def _projects(self) -> None:
        from .._version import __version__

        projects = msgspec.to_builtins(self.store.projects())
        self.put("api/projects", answer={"projects": projects, "version": __version__, "write": False})

    def _project(self, project: str, listed: dict[str, Any]) -> None:
        unreadable = listed.pop("unreadable")
        if unreadable:
            self.leave_out("runs that could not be read", len(unreadable))
        self.put("api/runs", project, answer=listed)
        rows = [{name: row[name] for name in FACTS} for row in self.store.runs(project)]
        self.put("rows", project, answer=rows)
        self.put("api/alerts", project, answer=data.alerts(self.store, project))
        self.put("api/views", project, answer=edit.views(self.store, project))
        self.put("api/rules", project, answer={"rules": {}, "programs": {}})

    def _run(self, project: str, id: str) -> None:
        found = data.run(self.store, project, id)
        self.put("api/run", project, id, answer={**found, **self._without_files(found)})
        console = data.console(self.store, project, id, None)
        if console["more"]:
            self.leave_out("runs of which only the end of the console output is there")
        self.put("api/console", project, id, answer={**console, "more": False})
        self.put("api/profile", project, id, answer=data.profile(self.store, project, id))
        self.put("api/goodput", project, id, answer=data.goodput(self.store, project, id))

    def _without_files(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return the facts of a run that lead to files: where it is on this machine, artifacts, evidence, model files."""
        files = sum(len(one["files"]) for name in ("artifacts", "blackbox") for one in found[name])
        if files:
            self.leave_out("files of artifacts and black boxes", files)
        artifacts, evidence = ([{**one, "files": []} for one in found[name]] for name in ("artifacts", "blackbox"))
        return {"path": "", "artifacts": artifacts, "blackbox": evidence}

    def _key(self, project: str, ids: list[str], key: str) -> None:
        rows = {row.id: self.store.statistics(row, key) for row in self.store.runs(project) if key in row.latest}
        self.put("stats", project, key, answer={id: found for id, found in rows.items() if found is not None})
        for x in AXES:
            self._series(project, ids, key, x)

    def _series(self, project: str, ids: list[str], key: str, x: str) -> None:
        most = min(MOST_BUCKETS, max(LEAST_BUCKETS, ALL_BUCKETS // max(1, len(ids))))
        query = data.SeriesQuery(project, ids, [key], n=self.buckets or most, x=x)
        if x == "auto":
            found = data.found_series(self.store, query)
            if any(one.axis not in ("step", "relative") for _, _, one in found):
                self._series(project, ids, key, "step")  # define_metric chose another x: the step is a choice of its own
            thinned = sum(not one.raw for _, _, one in found)
            if thinned:
                self.leave_out("series thinned to the first, last, lowest and highest points of each bucket", thinned)
        for fold in (None, "mean") if self._ranked(project) else (None,):
            asked = msgspec.structs.replace(query, fold=fold)
            self._write(f"{name_of('api/series', project, key, x, fold or '')}.bin", data.series(self.store, asked))

    def _ranked(self, project: str) -> bool:
        """Return whether the page offers the mean over ranks."""
        if project not in self._several:
            self._several[project] = any(row.ranks > 1 for row in self.store.runs(project))
        return self._several[project]

    def _media(self, project: str, runs: list[StoredRun], key: str) -> None:
        found = data.media(self.store, project, [run.id for run in runs], key)
        older = sum(one["total"] - len(one["points"]) for one in found)
        if older:
            self.leave_out(f"media older than the newest {data.MOST_MEDIA} of a key", older)
        if not self.media:
            self.leave_out("media (--no-media)", sum(len(one["points"]) for one in found))
            found = []
        for one in found:
            one["points"] = [point for point in one["points"] if self._held(project, one["run"], key, point)]
        self.put("api/media", project, key, answer=found)

    def _held(self, project: str, id: str, key: str, point: dict[str, Any]) -> bool:
        """Write the content of one medium; return False if it cannot be read."""
        try:
            if point["kind"] == "table":
                self._table(project, id, key, point["n"])
            elif point["kind"] == "html":
                html = data.media_point(self.store, project, id, key, point["n"]).load().html
                self._write(f"{name_of('html', project, id, key, point['n'])}.txt", str(html).encode("utf-8", "replace"))
            elif point["entry"].get("blob"):
                self._blob(project, id, point["entry"])
        except (FanfoldError, OSError):
            self.leave_out("media whose file is missing or damaged")
            return False
        return True

    def _blob(self, project: str, id: str, entry: dict[str, Any]) -> None:
        run, ext = data.open_run(self.store, project, id), str(entry.get("ext") or "").lower()
        run.artifact_file(entry["blob"])
        self.plotly = self.plotly or ext == "json"
        target = self.data / "blobs" / f"{entry['blob']}.{ext if ext in TYPES else 'bin'}"
        if not target.exists():
            with blobs.opened(run.path, entry["blob"]) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)

    def _table(self, project: str, id: str, key: str, n: int) -> None:
        part = partial(samples.table, self.store, project, id, key, n, search="", sort="", where="")
        found = part(start=0, count=samples.MOST_ROWS)
        for start in range(samples.MOST_ROWS, min(found["total"], MOST_ROWS), samples.MOST_ROWS):
            more = part(start=start, count=samples.MOST_ROWS)
            found["media"] += [[row + start, *rest] for row, *rest in more["media"]]
            found["rows"] += more["rows"]
            found["numbers"] += more["numbers"]
        if found["total"] > MOST_ROWS:
            self.leave_out(f"rows of tables after the first {MOST_ROWS:,}", found["total"] - MOST_ROWS)
        found["found"] = len(found["rows"])
        self.put("api/table", project, id, key, n, answer=found)
        for row, column, *_ in found["media"]:
            content, _ = samples.cell(self.store, project, id, key, n, found["numbers"][row], column)
            self._write(name_of("cell", project, id, key, n, found["numbers"][row], column), content)
