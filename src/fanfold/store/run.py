"""A stored run: everything in its journals, read without a lock, live or finished."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex, TypeVar, overload

from ..errors import FanfoldError, JournalError, RunNotFound, notices
from ..journal import Journal, Kind, blobs, bodies, directory
from ..journal.bodies import Fork, NewerFormat
from ..journal.format import PACKED
from ..journal.index import open_indexed
from ..journal.packed import MostlyHoles
from . import deadline, forks
from .attempts import Attempt, group
from .rows import AttemptRow, RunRow, lasted

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..journal.requests import Answer, JobRequest
    from .buckets import Buckets
    from .changes import Changes

T = TypeVar("T")


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
_SAME = ("id", "project", "name", "group", "notes", "tags", "archived", "config", "seen", "summary", "rules", "latest", "fork")
_KNOWN = {"started": "created", "ranks": "rank_list"} | {name: name for name in _SAME}
_READ = (*_KNOWN, "info", "metrics", "requests", "milestones", "_rules", "_patterns", "_holders")


class _editable(cached_property[T]):  # noqa: N801 - used like a property
    """A fact that is read once, and that assigning changes in the store."""

    def __set__(self, run: Any, value: T) -> None:
        run._edit({str(self.attrname): value})  # noqa: SLF001 - a part of that class


class StoredRun:
    """A run on disk. Reading never disturbs the processes that write it; `refresh()` reads what they appended.

    A listed run has the facts of its row; its journals are opened when more is needed. `name`, `tags`, `notes`, `group` and
    `archived` can be assigned.

    Attributes:
        path: The run's directory.
        id: Its id.
        config: Its config.
        journals: One object for each journal file.
        status: `"running"`, `"finished"`, `"failed"`, `"killed"`, `"preempted"` or `"lost"`.
        ranks: The ranks that logged something.
        artifacts: The artifacts, oldest first.

    Example:
        ```python
        import fanfold

        with fanfold.init("llm", config={"lr": 1e-3}) as run:
            run.log({"loss": 0.5}, step=0)
        stored = fanfold.open(run.id)
        print(stored.status, stored.config["lr"], stored.series("loss").values)
        ```
    """

    def __init__(self, path: Path | str, row: RunRow | None = None) -> None:
        self.path = path if isinstance(path, Path) and path.is_absolute() else Path(path).absolute()
        self._journals: dict[Path, Journal] = {}
        self._attempts: list[Attempt] | None = None
        self._row = row
        self.kin: forks.Kin = partial(forks.in_directory, self.path.parent.parent, open_folder)  # opens its parent
        self.lineage: tuple[float, list[forks.Ancestor]] | None = None  # kept by forks.ancestors
        if row is not None:
            self.__dict__.update({name: getattr(row, field) for name, field in _KNOWN.items()})

    def refresh(self) -> StoredRun:
        """Read what was written since the last read.

        Returns:
            The same object.
        """
        journals = {file: self._read_on(file) for file in directory.journal_files(self.path, strict=True)}
        self._journals = {file: journal for file, journal in journals.items() if journal is not None and journal.begun}
        self._read(group(list(self._journals.values())))
        return self

    def _read(self, attempts: list[Attempt]) -> None:
        """Set the journals' current state, and drop everything cached before."""
        self._attempts, self._row = attempts, None
        self.forget_parents()
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
        """Return the folder with the run's journals and blobs, after copying into it any that are stored elsewhere.

        Returns:
            The folder.
        """
        return self.path

    def reopened(self) -> StoredRun:
        """Return the run in its current state, reading only what was appended since; this object stays unchanged.

        Returns:
            A new object.
        """
        run = StoredRun(self.path)
        run._journals, run.kin = dict(self._journals), self.kin
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
            return open_indexed(file)
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

    @cached_property
    def fork(self) -> Fork | None:
        """The run that this one continues: its `project` and id (`run`), and the last `step` that both have."""
        journals = self.journals
        return next((journal.header.fork for journal in journals if journal.header.fork is not None), None)

    @property
    def parent(self) -> StoredRun | None:
        """The run that this one was forked from; None if there is none, or if it is not in the same store any more."""
        return None if self.fork is None else self.kin(self.fork.project, self.fork.run)

    def forget_parents(self) -> None:
        """Look the ancestors up again when they are needed next."""
        self.lineage = None

    @property
    def journals(self) -> list[Journal]:
        return [journal for attempt in self.attempts for journal in attempt.journals]

    def holding(self, key: str) -> Iterable[tuple[int, Journal]]:
        """Return the journals that have a key, each with the index of its attempt.

        Args:
            key: A logged key.

        Returns:
            Pairs of attempt and journal.
        """
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
        """The project whose folder the run is in: a run may be moved."""
        return directory.project_of(self.path, self._header("project"))

    @_editable
    def name(self) -> str:
        return str(self.info.get("name") or self._header("name") or self.id)

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(self.info.get("config") or {})

    @_editable
    def tags(self) -> list[str]:
        return list(self.info.get("tags") or [])

    @_editable
    def group(self) -> str | None:
        return self.info.get("group")

    @_editable
    def notes(self) -> str | None:
        return self.info.get("notes")

    @_editable
    def archived(self) -> bool:
        """Whether lists leave the run out."""
        return bool(self.info.get("archived"))

    def _edit(self, facts: dict[str, Any]) -> None:
        """Set facts in the store, as `fanfold tag` and the dashboard do; nothing that training wrote is changed."""
        from .changes import checked_facts

        self._changes().edit(self, checked_facts(facts))
        self.refresh()

    def move(self, project: str) -> None:
        """Move the run to another project, as `fanfold mv` does; a run that is still being written or delivered is refused.

        Args:
            project: The project it goes to.

        Raises:
            RunError: The run is still being written or delivered, or the project has another run of this id.
        """
        self._changes().move([self], project)
        self._follow(project)
        self.refresh()

    def _follow(self, project: str) -> None:
        """Take the name that the run has in the store once it is moved."""
        self.path, self._journals = directory.run_path(self.path.parent.parent, project, self.id), {}
        self.__dict__.pop("project", None)

    def _changes(self) -> Changes:
        from .changes import OnDisk

        return OnDisk(self.path.parent.parent)

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
        """Return the logged keys of a kind (number, text, media or system), in order of first appearance.

        Args:
            kind: Which keys.

        Returns:
            The keys.

        Example:
            ```python
            import fanfold

            fanfold.init("llm").log({"loss": 0.5})
            print(fanfold.open("-").keys())
            ```
        """
        if kind not in ("number", "text", "media", "system"):
            raise FanfoldError(f"keys({kind!r}) is not known. Known: number, text, media, system.")
        if kind in ("number", "system"):
            origins = ("",) if kind == "number" else ("system", "energy")
            runs = [self, *(one.run for one in forks.ancestors(self) if kind == "number")]  # a fork has its parent's curves, too
            journals = [journal for run in runs for journal in run.journals]
            return list(dict.fromkeys(key for origin in origins for journal in journals for key in journal.keys(origin)))
        wanted = str if kind == "text" else (dict, list)
        return list(
            dict.fromkeys(key for _, data in self._values() for key, value in data.v.items() if isinstance(value, wanted))
        )

    def series(
        self, key: str, *, rank: int | None = None, fold: str | None = None, raw: bool = False, own: bool = False
    ) -> Series:
        """Return one key's points by step: of one rank (default: 0, else the lowest that has it), or folded over all.

        Points that a later attempt logged again are hidden; `raw` includes the whole history. A fork's curve begins with its
        parent's points up to the fork.

        Args:
            key: A logged key.
            rank: Only this rank.
            fold: Fold all ranks: `"mean"`, `"min"`, `"max"`, `"sum"`, `"std"`, …
            raw: Keep points of earlier attempts that a later attempt logged again, and leave out those of a fork's parent.
            own: Leave out the points of a fork's parent.

        Returns:
            Numpy arrays `steps`, `times` and `values`; a fold also has `min`, `max`, `min_rank`, `max_rank` and `count`.

        Raises:
            MetricNotFound: The run has no numbers under this key, or not on this rank.

        Example:
            ```python
            import fanfold

            fanfold.init("llm").log({"loss": 0.5}, step=0)
            series = fanfold.open("-").series("loss", fold="mean")
            print(series.steps, series.values, series.max_rank)
            ```
        """
        from .series import series

        return series(self, key, rank=rank, fold=fold, raw=raw, own=own or raw)

    def curve(self, key: str, *, buckets: int = 330, x: str = "auto") -> Buckets | None:
        """Return a key's series for a chart: the mean over ranks if several have it, None if there are no points.

        Args:
            key: A logged key.
            buckets: How many pixels wide the chart is.
            x: The x axis: `"step"`, `"time"`, `"relative"`, a key, or `"auto"`, as define_metric says.

        Returns:
            The first, last, lowest and highest point of each bucket.
        """
        from .axes import curve

        return curve(self, key, buckets=buckets, x=x)

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
        """Return the define_metric arguments for a key: those of the key itself, else of the last pattern that matches.

        Args:
            key: A logged key.

        Returns:
            The arguments.
        """
        if key in self.metrics:
            return self.metrics[key]
        match = self._patterns.match(key)
        return self._rules[int(str(match.lastgroup)[1:])] if match else {}

    @cached_property
    def _rules(self) -> list[dict[str, Any]]:
        """Rules for patterns, newest first."""
        named = [rule for name, rule in self.metrics.items() if bodies.is_pattern(name) and len(name) <= bodies.MOST_PATTERN]
        return named[-bodies.MOST_PATTERNS :][::-1]

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
        return {**(self._ruled(found) if self.metrics else found), **self.assigned}

    def _ruled(self, found: dict[str, Any]) -> dict[str, Any]:
        """Apply the summary rules of define_metric to the last values."""
        from .points import reduce

        self._holders  # noqa: B018 - built before every key is looked up
        for key in list(found):
            deadline.check()
            rule = self.metric(key).get("summary")
            if rule == "none":
                del found[key]
            elif rule not in (None, "last") and not isinstance(found[key], str):
                found[key] = reduce(str(rule), self.series(key, own=True).values)
        return found

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
        """Return the texts logged under a key, by step.

        Args:
            key: A logged key.

        Returns:
            The texts, each with its step and time.
        """
        points = [
            TextPoint(data.s, data.t / 1e9, journal.header.rank, text)
            for journal, data in self._values()
            if isinstance(text := data.v.get(key), str)
        ]
        return sorted(points, key=lambda point: point.step)

    def media(self, key: str) -> list[MediaPoint]:
        """Return the images, tables, histograms, … logged under a key, by step.

        Args:
            key: A logged key.

        Returns:
            The media, each with its step, time and file.
        """
        points: list[MediaPoint] = []
        for journal, data in self._values():
            found = data.v.get(key, "")
            entries = found if isinstance(found, list) else [found] if isinstance(found, dict) else []
            points += [MediaPoint(key, data.s, data.t / 1e9, journal.header.rank, entry, self) for entry in entries]
        return sorted(points, key=lambda point: point.step)

    def table(self, key: str, step: int | None = None) -> Any:
        """Return the last table logged under a key, or the one of a step.

        Args:
            key: A logged key.
            step: The step. Default: the last one.

        Returns:
            A fanfold.Table.

        Raises:
            FanfoldError: There is no such table.
        """
        points = [point for point in self.media(key) if point.kind == "table" and step in (None, point.step)]
        if not points:
            raise FanfoldError(f"run {self.id} has no table under {key!r}. Its media: {', '.join(self.keys('media')) or 'none'}.")
        return points[-1].load()

    @property
    def alerts(self) -> list[dict[str, Any]]:
        """Alerts, by time: those of the program, and those of rules, which have the fields `rule` and `key`."""
        found: dict[Any, dict[str, Any]] = {}
        for number, event in enumerate(self._events("alert")):
            rule, key = event.pop("rule"), event.pop("key")
            if rule:  # two readers may have seen the same crossing at the same time
                found.setdefault((rule, key, event["t"]), {**event, "rule": rule, "key": key})
            else:
                found[number] = event
        return sorted(found.values(), key=lambda event: event["t"])

    @cached_property
    def requests(self) -> list[dict[str, Any]]:
        """Requests to the job, oldest first: `action`, `values`, `by`, `state` (asked, done, refused, expired), `step`, `why`.

        `asked` and `answered` are times in seconds since 1970.
        """
        found: dict[str, dict[str, Any]] = {}
        for event in sorted(self._events("request"), key=lambda event: event["t"]):
            known = found.setdefault(event["id"], {"asked": event["t"] / 1e9, "answered": None})
            given = {name: event[name] for name in ("id", "action", "by", "state", "why")}
            known |= {**given, "values": event["values"] or {}, "step": event["s"]}
            known["answered"] = None if event["state"] == "asked" else event["t"] / 1e9
        return list(found.values())

    @cached_property
    def milestones(self) -> list[tuple[int | None, float, str]]:
        """What happened beside the metrics, by time: (step, seconds, words) of alerts, checkpoints and requests carried out."""
        found = [(event.get("s"), event["t"] / 1e9, f"alert: {event['title']}") for event in self.alerts]
        saved: dict[tuple[int | None, int], list[dict[str, Any]]] = {}
        for file in self.files:  # the shards of one checkpoint are one
            saved.setdefault((file["s"], file["t"] // 10**9 if file["s"] is None else 0), []).append(file)
        for (step, _), files in saved.items():
            name = files[0]["path"].rpartition("/")[2] if len(files) == 1 else f"{len(files)} files"
            found.append((step, files[0]["t"] / 1e9, f"checkpoint: {name}"))
        for one in self.requests:
            if one["state"] == "done":
                given = ", ".join(f"{name}={value}" for name, value in one["values"].items())
                found.append((one["step"], one["answered"], f"{one['action']}{f' {given}' if given else ''} ({one['by']})"))
        return sorted(found, key=lambda one: one[1])

    def tell(self, action: str, /, *, wait: bool = True, timeout: float = 600.0, **values: Any) -> Answer:
        """Ask the running job to stop, save, evaluate, log, or set values (`tell("set", lr=1e-4)`); return its answer.

        The request expires after `timeout` seconds. See docs/tell.md.

        Args:
            action: `"stop"`, `"save"`, `"evaluate"`, `"log"` or `"set"`.
            wait: Wait for the answer.
            timeout: How long to wait, in seconds; the request expires then.
            values: The values to set.

        Returns:
            The answer of the job.

        Raises:
            SettingError: No job could do that.
        """
        from .tell import tell

        return tell(self, action, values, wait=wait, timeout=timeout)

    def leave_request(self, request: JobRequest) -> None:
        """Put a request where the job finds it.

        Args:
            request: The request.
        """
        from ..journal.requests import leave

        leave(self.path, request)

    def withdraw_request(self, id: str) -> bool:
        """Take a request back; return False if the job has taken it.

        Args:
            id: The id of the request.

        Returns:
            Whether it was still there.
        """
        from ..journal.requests import withdraw

        return withdraw(self.path, id)

    @property
    def artifacts(self) -> list[dict[str, Any]]:
        return list(self._events("artifact"))

    @property
    def files(self) -> list[dict[str, Any]]:
        """Model files this run saved and stamped: `path`, `size`, `s` (the step), `rank`, and `t`, in nanoseconds."""
        return list(self._events("saved"))

    @property
    def evidence(self) -> list[dict[str, Any]]:
        """What the black box recorded, oldest first; `store.blackbox` makes sense of it."""
        return sorted(self._events("blackbox"), key=lambda event: event["t"])

    def ops(self) -> list[dict[str, Any]]:
        """Return the operator profile: one row per op, scope, thread, label and rank, sorted by self time, longest first.

        `count`, `total_ns`, `self_ns`, `max_ns`, `p50_ns` and `p99_ns` describe the observed calls, in host time; each of them
        represents `scale` calls.

        Returns:
            One dict per row: `op`, `scope`, `thread`, `label`, `rank`, `count`, `self_ns`, `total_ns`, `scale`, …
        """
        from .ops import rows

        return rows(self)

    def goodput(self) -> dict[str, Any]:
        """Return where the run's wall time went: `seconds` and `shares` by part, `goodput` (the share of steps), and more.

        Returns:
            The account.
        """
        from .goodput import goodput

        return goodput(self).facts()

    def usage(self) -> list[dict[str, Any]]:
        """Return the APIs of PyTorch and others that the processes used, once per key, and the model files written or read.

        Returns:
            One dict per record.
        """
        from .ops import usage

        return usage(self)

    def blob(self, name: str) -> bytes:
        """Return the content of a media file or artifact, checked against its name.

        Args:
            name: The name of the blob.

        Returns:
            Its bytes.

        Raises:
            JournalError: The content does not match its name.
        """
        self.artifact_file(name)
        return blobs.get(self.path, name)

    def artifact_file(self, blob: str) -> Path:
        """Return the file with the content of an artifact or media file.

        Args:
            blob: The name of the blob.

        Returns:
            The path of its file.
        """
        return blobs.path_of(self.path, blob)

    def console(self) -> bytes:
        """Return the captured console output of the processes, in order of time.

        Returns:
            What the processes printed.
        """
        chunks = [record.data for journal in self.journals for record in journal.records(Kind.CONSOLE)]
        return b"".join(chunk.b for chunk in sorted(chunks, key=lambda chunk: chunk.t))

    @property
    def lost_values(self) -> list[dict[str, Any]]:
        """Device values that never arrived, with the reason."""
        return [bodies.as_dict(record.data) for journal in self.journals for record in journal.records(Kind.LOST)]

    def row(self) -> RunRow:
        """Return the facts of the run as one row, as stored in the catalogue and used by filters.

        Returns:
            The row.
        """
        if self._row is not None:
            return self._row
        verdicts = [attempt.verdict() for attempt in self.attempts]
        lives = [AttemptRow(a.key, v["status"], a.started, a.seen) for a, v in zip(self.attempts, verdicts, strict=True)]
        return RunRow(
            id=self.id, project=self.project, name=self.name, group=self.group, notes=self.notes, tags=self.tags,
            config=self.config, verdict=verdicts[-1] if verdicts else self.verdict, created=self.started, seen=self.seen,
            rank_list=self.ranks, summary=self.summary, rules=self.rules, latest=self.latest, media=self.keys("media"),
            lives=lives, archived=self.archived, fork=self.fork, path=str(self.path),
        )  # fmt: skip

    # Data frames

    def to_arrow(self, keys: list[str] | None = None, *, rank: int | None = None, fold: str | None = None) -> Any:
        """Return a pyarrow Table: one row per step, a column per key (and `step`).

        Args:
            keys: Which keys. Default: all numbers.
            rank: Only this rank.
            fold: Fold all ranks.

        Returns:
            The table.

        Raises:
            MissingExtra: pyarrow is not installed.
            MetricNotFound: The run has no such key.
        """
        return self._frame("arrow", keys, rank, fold)

    def to_pandas(self, keys: list[str] | None = None, *, rank: int | None = None, fold: str | None = None) -> Any:
        """Return a pandas DataFrame: one row per step, a column per key (and `step`).

        Args:
            keys: Which keys. Default: all numbers.
            rank: Only this rank.
            fold: Fold all ranks.

        Returns:
            The frame.

        Raises:
            MissingExtra: pandas is not installed.
            MetricNotFound: The run has no such key.

        Example:
            ```python
            import fanfold

            fanfold.init("llm").log({"loss": 0.5}, step=0)
            print(fanfold.open("-").to_pandas(["loss"]))
            ```
        """
        return self._frame("pandas", keys, rank, fold)

    def to_polars(self, keys: list[str] | None = None, *, rank: int | None = None, fold: str | None = None) -> Any:
        """Return a polars DataFrame: one row per step, a column per key (and `step`).

        Args:
            keys: Which keys. Default: all numbers.
            rank: Only this rank.
            fold: Fold all ranks.

        Returns:
            The frame.

        Raises:
            MissingExtra: polars is not installed.
            MetricNotFound: The run has no such key.
        """
        return self._frame("polars", keys, rank, fold)

    def _frame(self, kind: str, keys: list[str] | None, rank: int | None, fold: str | None) -> Any:
        from .dataframes import frame

        return frame(self, kind, keys, rank=rank, fold=fold)

    def __repr__(self) -> str:
        return f"<run {self.name} ({self.id}) of {self.project}: {self.status}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from ..drawing.runs import run_html
        from ..notebook import shown

        return {"text/plain": repr(self), "text/html": shown(run_html(self), [self])}


def open_folder(path: Path) -> StoredRun:
    """Open the run in a folder that is known to be one."""
    return StoredRun(path).refresh()


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
    """Return the error for a run that does not exist; `-` is the newest run of a place that has none."""
    found = "there are no runs" if what == "-" else f"no run {what!r}"
    return RunNotFound(f"{found} in {place}. Nothing was read. `fanfold ls` lists the runs; FANFOLD_DIR names another place.")
