"""A stored run: everything in its journals, read without a lock, live or finished."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, overload

from .. import fold as folding
from ..errors import FanfoldError, JournalError, RunNotFound, notices
from ..journal import Journal, Kind, blobs, bodies, directory
from ..journal.bodies import NewerFormat
from ..journal.format import PACKED
from ..journal.index import open_indexed
from ..journal.packed import MostlyHoles
from ..journal.walker import NO_STEP
from ..settings import cache_directory
from . import deadline
from .attempts import Attempt, group
from .points import holders, points, reduce
from .rows import Life, Row, lasted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .buckets import Buckets


MOST_PATTERNS = 256  # the newest define_metric patterns that are used
MOST_PATTERN = 256  # characters of a pattern; longer ones are ignored
_WILD = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class Series:
    """One key's points, by step. `times` are seconds since 1970; a fold adds the extremes and their ranks."""

    key: str
    steps: NDArray[np.int64]
    times: NDArray[np.float64]
    values: NDArray[Any]
    min: NDArray[np.float64] | None = None
    max: NDArray[np.float64] | None = None
    min_rank: NDArray[np.int64] | None = None
    max_rank: NDArray[np.int64] | None = None
    count: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.steps)


class MediaPoint(NamedTuple):
    """One logged image, table, histogram, …; `load()` returns the object itself."""

    key: str
    step: int
    time: float
    rank: int
    entry: dict[str, Any]
    run: StoredRun

    @property
    def kind(self) -> str:
        return str(self.entry.get("type"))

    def load(self) -> Any:
        from ..media import decode

        name = self.entry.get("blob")
        return decode(self.kind, self.entry, self.run.blob(name) if name else b"")


class TextPoint(NamedTuple):
    """One logged text."""

    step: int
    time: float
    rank: int
    text: str


# Facts in a row, by their names in StoredRun. A listed run has them already, until it is refreshed.
_SAME = ("id", "project", "name", "group", "notes", "tags", "config", "seen", "summary", "rules", "latest")
_KNOWN = {"started": "created", "ranks": "rank_list"} | {name: name for name in _SAME}
_READ = (*_KNOWN, "info", "metrics", "_rules", "_patterns", "_holders")


class StoredRun:
    """A run on disk. Reading never disturbs the processes that write it; `refresh()` reads what they appended.

    A listed run has the facts of its row; its journals are opened when more is needed.
    """

    def __init__(self, path: Path | str, row: Row | None = None) -> None:
        self.path = path if isinstance(path, Path) and path.is_absolute() else Path(path).absolute()
        self._journals: dict[Path, Journal] = {}
        self._attempts: list[Attempt] | None = None
        self._row = row
        if row is not None:
            self.__dict__.update({name: getattr(row, field) for name, field in _KNOWN.items()})

    def refresh(self) -> StoredRun:
        """Read what was written since the last read."""
        journals = {file: self._read_on(file) for file in directory.journal_files(self.path, strict=True)}
        self._journals = {file: journal for file, journal in journals.items() if journal is not None and journal.begun}
        self._read(group(list(self._journals.values())))
        return self

    def _read(self, attempts: list[Attempt]) -> None:
        """Set the journals' current state, and drop everything cached before."""
        self._attempts, self._row = attempts, None
        for name in _READ:
            self.__dict__.pop(name, None)

    @property
    def place(self) -> str:
        """Where the run is stored, for display."""
        return str(self.path)

    @property
    def store(self) -> str:
        """The address of the store that has the run."""
        return str(self.path.parent.parent)

    def pulled(self) -> Path:
        """Return the folder with the run's journals and blobs, after copying into it any that are stored elsewhere."""
        return self.path

    def reopened(self) -> StoredRun:
        """Return the run in its current state, reading only what was appended since; this object stays unchanged."""
        run = StoredRun(self.path)
        run._journals = dict(self._journals)
        return run.refresh()

    def _read_on(self, file: Path) -> Journal | None:
        deadline.check()
        journal = self._journals.get(file)
        try:
            if journal is not None:
                journal.refresh()
                return journal
        except (FileNotFoundError, JournalError):
            pass  # replaced or deleted since it was listed: open it again
        return self._open(file)

    def _open(self, file: Path) -> Journal | None:
        try:
            return open_indexed(file, cache_directory())
        except (FileNotFoundError, JournalError) as error:
            if isinstance(error, NewerFormat):
                raise
            if isinstance(error, MostlyHoles) or (file.suffix == PACKED and isinstance(error, JournalError)):
                notices.once(f"packed:{file}", str(error))
            return None  # another kind of file with our suffix, or deleted since it was listed

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts of the run, oldest first."""
        if self._attempts is None:
            self.refresh()
        assert self._attempts is not None
        return self._attempts

    @property
    def journals(self) -> list[Journal]:
        return [journal for attempt in self.attempts for journal in attempt.journals]

    def holding(self, key: str) -> Iterable[tuple[int, Journal]]:
        """Return the journals that have a key, each with the index of its attempt."""
        if "_holders" in self.__dict__:
            return self._holders.get(key, ())
        return ((n, journal) for n, attempt in enumerate(self.attempts) for journal in attempt.journals if key in journal.by_key)

    @cached_property
    def _holders(self) -> dict[str, list[tuple[int, Journal]]]:
        """The same journals by key. Built when every key is needed, because searching all journals for each key is slow."""
        found: dict[str, list[tuple[int, Journal]]] = {}
        for n, attempt in enumerate(self.attempts):
            for journal in attempt.journals:
                for key in journal.by_key:
                    found.setdefault(key, []).append((n, journal))
        return found

    # Facts

    @cached_property
    def info(self) -> dict[str, Any]:
        """Facts by name. Rank 0 takes precedence over other ranks and edits over everything; the newest value wins."""
        facts: dict[str, Any] = {}
        roles = {"worker": 0, "main": 1}

        def weight(place: tuple[int, Journal]) -> tuple[bool, int, int, int]:
            header = place[1].header
            return header.role == "editor", place[0], roles.get(header.role, 0) + (header.rank == 0), header.started

        for _, journal in sorted(((n, j) for n, attempt in enumerate(self.attempts) for j in attempt.journals), key=weight):
            for record in journal.records(Kind.INFO):
                facts.update(record.data.given)
        return facts

    def _header(self, name: str) -> Any:
        return getattr(self.attempts[0].journals[0].header, name) if self.attempts else None

    @cached_property
    def id(self) -> str:
        return str(self._header("run") or directory.decode_name(self.path.name))

    @cached_property
    def project(self) -> str:
        return str(self._header("project") or directory.decode_name(self.path.parent.name))

    @cached_property
    def name(self) -> str:
        return str(self.info.get("name") or self._header("name") or self.id)

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(self.info.get("config") or {})

    @cached_property
    def tags(self) -> list[str]:
        return list(self.info.get("tags") or [])

    @cached_property
    def group(self) -> str | None:
        return self.info.get("group")

    @cached_property
    def notes(self) -> str | None:
        return self.info.get("notes")

    @property
    def facts(self) -> dict[str, Any]:
        """Facts recorded about the run: command, git, packages, node, hardware, environment."""
        return dict(self.info.get("facts") or {})

    @property
    def status(self) -> str:
        return str(self.verdict["status"])

    @property
    def verdict(self) -> dict[str, Any]:
        """Status of the latest attempt, and the rank, signal and error that explain it."""
        if self._row is not None:
            return dict(self._row.verdict)
        return self.attempts[-1].verdict() if self.attempts else {"status": "lost", "rank": None, "error": None}

    @property
    def error(self) -> str | None:
        """The traceback of the rank that failed first."""
        return self.verdict.get("error")

    @cached_property
    def started(self) -> float:
        """When the first attempt began, in seconds since 1970."""
        return self.attempts[0].started / 1e9 if self.attempts else 0.0

    @cached_property
    def seen(self) -> float:
        """When one of its processes was last active, in seconds since 1970."""
        return max((attempt.seen / 1e9 for attempt in self.attempts), default=self.started)

    @property
    def duration(self) -> float:
        """Seconds the run has been active: each attempt from its start to its last sign of life, without the gaps."""
        if self._row is not None:
            return self._row.duration
        return lasted(((attempt.started, attempt.seen) for attempt in self.attempts), running=self.status == "running")

    @cached_property
    def ranks(self) -> list[int]:
        return sorted({j.header.rank for attempt in self.attempts for j in attempt.mains})

    @property
    def dropped(self) -> int:
        """The number of log() calls that could not be written (a full disk), as counted by the processes."""
        counts: dict[Any, int] = {}  # a process keeps counting across its journals
        for journal in self.journals:
            process = journal.header.process or journal.id
            known = (record.data.dropped or 0 for record in journal.records(Kind.END, Kind.BEAT))
            counts[process] = max(counts.get(process, 0), journal.header.dropped or 0, *known)
        return sum(counts.values())

    @property
    def damaged(self) -> int:
        """The number of unreadable bytes in the journals."""
        return sum(journal.damaged for journal in self.journals)

    # Numbers

    def keys(self, kind: str = "number") -> list[str]:
        """Return the logged keys of a kind (number, text, media or system), in order of first appearance."""
        if kind not in ("number", "text", "media", "system"):
            raise FanfoldError(f"keys({kind!r}) is not known. Known: number, text, media, system.")
        if kind in ("number", "system"):
            origins = ("",) if kind == "number" else ("system", "energy")
            return list(dict.fromkeys(key for origin in origins for journal in self.journals for key in journal.keys(origin)))
        wanted = str if kind == "text" else (dict, list)
        return list(
            dict.fromkeys(key for _, data in self._values() for key, value in data.v.items() if isinstance(value, wanted))
        )

    def series(self, key: str, *, rank: int | None = None, fold: str | None = None, raw: bool = False) -> Series:
        """Return one key's points by step: of one rank (default: 0, else the lowest that has it), or folded over all.

        Points that a later attempt logged again are hidden; `raw` includes the whole history.
        """
        import numpy as np

        if fold is not None:
            return self._folded(key, folding.check(fold), raw)
        if rank is None:
            rank = self._rank_of(key)
        steps, times, values = self._of_rank(key, rank, raw) if rank is not None else self._nothing(key)
        if len(steps) and steps.min() == NO_STEP:
            steps = np.where(steps == NO_STEP, -1, steps)
        return Series(key, steps, times, values)

    def curve(self, key: str, *, buckets: int = 330, x: str = "auto") -> Buckets | None:
        """Return a key's series for a chart: the mean over ranks if several have it, None if there are no points."""
        from .axes import curve

        return curve(self, key, buckets=buckets, x=x)

    def _nothing(self, key: str, rank: int | None = None) -> Any:
        ranks = holders(self, key)
        if ranks:
            raise FanfoldError(
                f"rank {rank} of run {self.id} has no numbers under {key!r}. Nothing was read. "
                f"Ranks that have it: {', '.join(map(str, ranks))}."
            )
        known = self.keys() + self.keys("system")
        close = [name for name in known if key.lower() in name.lower()][:8] or known[:8]
        raise FanfoldError(
            f"run {self.id} has no numbers under {key!r}. It has {len(known)} keys, among them: {', '.join(close) or 'none'}."
        )

    def _rank_of(self, key: str) -> int | None:
        return next(iter(holders(self, key)), None)

    def _of_rank(self, key: str, rank: int, raw: bool) -> tuple[Any, Any, Any]:
        found = points(self, key, rank, raw=raw)
        if not found.chunks:
            self._nothing(key, rank)
        return found.columns()

    def _folded(self, key: str, how: str, raw: bool) -> Series:
        import numpy as np

        ranks_with = holders(self, key)
        if not ranks_with:
            self._nothing(key)
        parts = [(rank, *self._of_rank(key, rank, raw)) for rank in ranks_with]
        ranks = np.concatenate([np.full(len(part[1]), part[0], np.int64) for part in parts])
        done = folding.fold(how, ranks, *(np.concatenate([part[i] for part in parts]) for i in (1, 2, 3)))
        return Series(key, done.steps, done.times, done.values, done.min, done.max, done.min_rank, done.max_rank, done.count)

    @cached_property
    def latest(self) -> dict[str, Any]:
        """Each key's last value, including texts. If several ranks have a key, the lowest counts."""
        found: dict[str, Any] = {}
        for attempt in self.attempts:
            for journal in sorted(attempt.journals, key=lambda j: -j.header.rank):
                found.update({key: value for key, (_, _, value) in journal.latest().items()})
        for _, data in self._values():
            found.update({key: value for key, value in data.v.items() if isinstance(value, str)})
        return found

    @cached_property
    def metrics(self) -> dict[str, dict[str, Any]]:
        """Arguments of define_metric, by key pattern."""
        return {str(event["key"]): event for event in self._events("metric")}

    def metric(self, key: str) -> dict[str, Any]:
        """Return the define_metric arguments for a key: those of the key itself, else of the last pattern that matches."""
        if key in self.metrics:
            return self.metrics[key]
        match = self._patterns.match(key)
        return self._rules[int(str(match.lastgroup)[1:])] if match else {}

    @cached_property
    def _rules(self) -> list[dict[str, Any]]:
        """Rules for patterns, newest first. Each is tried on each key, so very many or very long patterns are limited."""
        named = [(name, rule) for name, rule in self.metrics.items() if _WILD.search(name) and len(name) <= MOST_PATTERN]
        return [rule for _, rule in reversed(named[-MOST_PATTERNS:])]

    @cached_property
    def _patterns(self) -> re.Pattern[str]:
        """The patterns of these rules as one expression; its groups are numbered like the rules."""
        parts = [f"(?P<r{place}>{fnmatch.translate(str(rule['key']))})" for place, rule in enumerate(self._rules)]
        return re.compile("|".join(parts) or r"(?!)")

    @cached_property
    def rules(self) -> dict[str, str]:
        """Keys for which define_metric(summary=…) prefers low ("min") or high ("max") values."""
        found = {key: str(self.metric(key).get("summary")) for key in self.summary} if self.metrics else {}
        return {key: rule for key, rule in found.items() if rule in ("min", "max")}

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The summary value of each key (the last value unless define_metric says otherwise), and values set by the user.

        If several ranks have a key, the lowest counts, as in `latest` and `series`.
        """
        found = {key: value for key, value in self.latest.items() if not key.startswith("system/")}
        if self.metrics:
            self._holders  # noqa: B018 - built before every key is looked up
        for key in list(found) if self.metrics else ():
            deadline.check()
            rule = self.metric(key).get("summary")
            if rule == "none":
                del found[key]
            elif rule not in (None, "last") and not isinstance(found[key], str):
                found[key] = reduce(str(rule), self.series(key).values)
        return {**found, **self.assigned}

    @property
    def assigned(self) -> dict[str, Any]:
        """Summary values set by the user."""
        return dict(self.info.get("summary") or {})

    # Everything else

    def _values(self) -> Iterator[tuple[Journal, bodies.Values]]:
        for journal in self.journals:
            for record in journal.records(Kind.VALUES):
                yield journal, record.data

    def _events(self, name: str) -> Iterator[dict[str, Any]]:
        for journal in self.journals:
            for record in journal.records(Kind.EVENT):
                if record.data.event == name:
                    yield {**bodies.as_dict(record.data), "rank": journal.header.rank}

    def texts(self, key: str) -> list[TextPoint]:
        """Return the texts logged under a key, by step."""
        points = [
            TextPoint(data.s, data.t / 1e9, journal.header.rank, text)
            for journal, data in self._values()
            if isinstance(text := data.v.get(key), str)
        ]
        return sorted(points, key=lambda point: point.step)

    def media(self, key: str) -> list[MediaPoint]:
        """Return the images, tables, histograms, … logged under a key, by step."""
        points: list[MediaPoint] = []
        for journal, data in self._values():
            found = data.v.get(key, "")
            entries = found if isinstance(found, list) else [found] if isinstance(found, dict) else []
            points += [MediaPoint(key, data.s, data.t / 1e9, journal.header.rank, entry, self) for entry in entries]
        return sorted(points, key=lambda point: point.step)

    def table(self, key: str, step: int | None = None) -> Any:
        """Return the last table logged under a key, or the one of a step."""
        points = [point for point in self.media(key) if point.kind == "table" and step in (None, point.step)]
        if not points:
            raise FanfoldError(f"run {self.id} has no table under {key!r}. Its media: {', '.join(self.keys('media')) or 'none'}.")
        return points[-1].load()

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return sorted(self._events("alert"), key=lambda event: event["t"])

    @property
    def artifacts(self) -> list[dict[str, Any]]:
        return list(self._events("artifact"))

    @property
    def files(self) -> list[dict[str, Any]]:
        """Model files this run saved and stamped: `path`, `size`, `s` (the step), `rank`, and `t`, in nanoseconds."""
        return list(self._events("saved"))

    def ops(self) -> list[dict[str, Any]]:
        """Return the operator profile: one row per op, scope, thread, label and rank, sorted by self time, longest first.

        `count`, `total_ns`, `self_ns`, `max_ns`, `p50_ns` and `p99_ns` describe the observed calls, in host time; each of them
        represents `scale` calls.
        """
        from .ops import rows

        return rows(self)

    def usage(self) -> list[dict[str, Any]]:
        """Return the APIs of PyTorch and others that the processes used, once per key, and the model files written or read."""
        from .ops import usage

        return usage(self)

    def blob(self, name: str) -> bytes:
        """Return the content of a media file or artifact, checked against its name."""
        self.artifact_file(name)
        return blobs.get(self.path, name)

    def artifact_file(self, blob: str) -> Path:
        """Return the file with the content of an artifact or media file."""
        return blobs.path_of(self.path, blob)

    def console(self) -> bytes:
        """Return the captured console output of the processes, in order of time."""
        chunks = [record.data for journal in self.journals for record in journal.records(Kind.CONSOLE)]
        return b"".join(chunk.b for chunk in sorted(chunks, key=lambda chunk: chunk.t))

    @property
    def lost_values(self) -> list[dict[str, Any]]:
        """Device values that never arrived, with the reason."""
        return [bodies.as_dict(record.data) for journal in self.journals for record in journal.records(Kind.LOST)]

    def row(self) -> Row:
        """Return the facts of the run as one row, as stored in the catalogue and used by filters."""
        if self._row is not None:
            return self._row
        return Row(
            id=self.id, project=self.project, name=self.name, group=self.group, notes=self.notes, tags=self.tags,
            config=self.config, verdict=self.verdict, created=self.started, seen=self.seen, rank_list=self.ranks,
            summary=self.summary, rules=self.rules, latest=self.latest, media=self.keys("media"),
            lives=[Life(a.key, a.verdict()["status"], a.started, a.seen) for a in self.attempts],
            archived=bool(self.info.get("archived")), path=str(self.path),
        )  # fmt: skip

    # Data frames

    def to_arrow(self, keys: list[str] | None = None, *, rank: int | None = None, fold: str | None = None) -> Any:
        """Return a pyarrow Table: one row per step, a column per key (and `step`)."""
        from .dataframes import to_arrow

        return to_arrow(self, keys, rank=rank, fold=fold)

    def to_pandas(self, keys: list[str] | None = None, *, rank: int | None = None, fold: str | None = None) -> Any:
        """Return a pandas DataFrame: one row per step, a column per key (and `step`)."""
        from .dataframes import to_pandas

        return to_pandas(self, keys, rank=rank, fold=fold)

    def to_polars(self, keys: list[str] | None = None, *, rank: int | None = None, fold: str | None = None) -> Any:
        """Return a polars DataFrame: one row per step, a column per key (and `step`)."""
        from .dataframes import to_polars

        return to_polars(self, keys, rank=rank, fold=fold)

    def __repr__(self) -> str:
        return f"<run {self.name} ({self.id}) of {self.project}: {self.status}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from ..drawing.runs import run_html
        from ..notebook import shown

        return {"text/plain": repr(self), "text/html": shown(run_html(self), [self])}


SHOWN = 50  # maximum number of runs in a printed list


class Runs(list[StoredRun]):
    """A list of stored runs that is displayed as a table. `unreadable` has the path and reason of each run left out."""

    def __init__(self, runs: Iterable[StoredRun] = (), unreadable: Iterable[dict[str, str]] = ()) -> None:
        super().__init__(runs)
        self.unreadable = list(unreadable)

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> StoredRun: ...
    @overload
    def __getitem__(self, place: slice, /) -> Runs: ...
    def __getitem__(self, place: SupportsIndex | slice, /) -> StoredRun | Runs:
        found = super().__getitem__(place)
        return Runs(found) if isinstance(found, list) else found

    def __repr__(self) -> str:
        shown = [f"  {run!r}" for run in self[:SHOWN]]
        more = [f"  and {len(self) - SHOWN} more"] if len(self) > SHOWN else []
        return "\n".join([f"{len(self)} run{'' if len(self) == 1 else 's'}", *shown, *more])

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from ..drawing.runs import runs_html
        from ..notebook import shown

        return {"text/plain": repr(self), "text/html": shown(runs_html(self), self)}


def not_found(what: str, place: str) -> RunNotFound:
    return RunNotFound(
        f"no run {what!r} in {place}. Nothing was read. `fanfold ls` lists the runs; --dir or FANFOLD_DIR names the place."
    )
