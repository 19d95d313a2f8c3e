"""Events of an importer become a run: a journal for each attempt and rank, with the original times.

What was imported, and how far, is kept in `import.mp` in the run's folder. It is written after the journals it describes, so
an import that was killed is continued from there: journals are cut back to the sizes that it names.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from .._version import __version__
from ..errors import FanfoldError, JournalError, clean_text, describe, outcome
from ..facts.mask import mask
from ..journal import Kind, blobs
from ..journal import format as fmt
from ..journal.batch import pack_rows
from ..journal.directory import check_folders, journal_files, make_run, read_header
from ..journal.files import open_regular, open_to_write
from ..journal.writer import Sheet, try_lock
from ..media.base import Media
from ..plain import plain
from ..process import boot_id, digest
from ..values import code_of_dtype
from . import events
from .account import RunAccount
from .events import Event, Found, Left

RECORD: Final = "import.mp"
LOCK: Final = "import.lock"
LAUNCHER: Final = "import"  # names imported journals, in their headers
MOST_BUFFERED: Final = 4 << 20  # bytes written at once
MOST_COLUMNS: Final = 4096  # of one shape; wider rows are written as several
LONGEST_KEY: Final = 1 << 12
SECOND: Final = 1_000_000_000
_I32: Final = 1 << 31
_LEVELS: Final = {"warn": "warning", "warning": "warning", "error": "error", "info": "info"}
# An end that the source does not have, the surer the later: the import stopped there; nothing was written for a while, for long.
ASSUMED: Final = ("growing", "rest", "dead")
_STATUSES: Final = ("finished", "failed", "killed", "preempted")


class JournalChain(Struct, kw_only=True):
    """The journals of one attempt and rank, one for each import that had something new."""

    attempt: str
    ordinal: int
    rank: int
    process: str
    journal: str = ""  # the last one
    started: int = 0
    ended: bool = False
    last: int = 0  # the newest time in its journals
    key: str | None = None  # of the attempt, if the source has one


class ImportRecord(Struct, kw_only=True):
    """What is known of an imported run."""

    version: int = 1
    kind: str
    source: str  # the run's id there
    position: Any = None
    sizes: dict[str, int] = field(default_factory=dict)  # of each journal
    chains: dict[str, JournalChain] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    attempt: str = ""  # the one being written
    high: int = 0
    last: int = 0  # the newest time, in nanoseconds
    signature: Any = None  # of the source's files, so that an unchanged source is not read
    form: str = ""
    assumed: str = ""  # why an end was written that is not the source's: one of ASSUMED
    later: dict[str, str] = field(default_factory=dict)  # attempts of the source that went on after they counted as killed


_records = msgspec.msgpack.Decoder(ImportRecord)


def read_record(run: Path) -> ImportRecord | None:
    """Return what is known of an imported run; None if the run was not imported. Raise FanfoldError for a damaged record."""
    try:
        with open_regular(run / RECORD) as file:
            return _records.decode(file.read())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FanfoldError(
            f"{run / RECORD}, which says how far this run was imported, cannot be read: {error}. Nothing was imported into "
            "it. Delete the run with `fanfold rm` and import it again."
        ) from error


class ImportBusy(FanfoldError):
    """Another process imports the same run."""


class Lane:
    """The open journal of one attempt and rank, and the frames that wait to be written to it."""

    def __init__(self, chain: JournalChain) -> None:
        self.chain = chain
        self.sheet: Sheet | None = None
        self.pieces: list[bytes | memoryview] = []


class RunWriter:
    """One imported run. `feed` takes events, `settle` writes everything, `close` ends the work on it."""

    def __init__(self, path: Path, run_id: str, project: str, found: Found, account: RunAccount, *,
                 largest: int | None = None) -> None:  # fmt: skip
        self.path, self.run_id, self.project, self.found, self.account = path, run_id, project, found, account
        self.largest = largest  # bytes of a file that is copied
        make_run(path)
        check_folders(path)
        (path / "journal").mkdir(exist_ok=True, mode=0o700)
        self._lock = open_to_write(path / LOCK)
        if try_lock(self._lock) is False:
            os.close(self._lock)
            raise ImportBusy(f"another process is importing {found.name or found.id}")
        self.record = read_record(path) or ImportRecord(kind=found.kind, source=found.id, form=found.form)
        self.fresh = not self.record.chains
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._waiting: list[events.Rows | events.Values] = []  # without times
        self._facts_changed = False
        self._buffered = 0
        self._position = self.record.position
        self._takers: dict[type, Callable[[Any], None]] = {
            events.Mark: self._take_mark,
            events.Rows: self._take_rows,
            events.Values: self._take_values,
            events.Facts: self._take_facts,
            events.Start: self._start,
            events.End: self._end,
            events.Artifact: self._take_artifact,
            events.Console: self._take_console,
            events.Alert: self._take_alert,
            events.Definition: self._take_definition,
        }
        self._recover()

    # Events

    def feed(self, event: Event) -> None:
        """Take one event."""
        take = self._takers.get(type(event))
        if self.record.assumed == "dead" and isinstance(event, (events.Rows, events.Values)):
            self._live_again()
        if take is not None:
            take(event)

    def _take_mark(self, event: events.Mark) -> None:
        self._position = event.position
        if self._buffered > MOST_BUFFERED and not self._waiting:
            self._commit()

    def _take_console(self, event: events.Console) -> None:
        text = event.text.encode("utf-8", "backslashreplace")
        for start in range(0, len(text), 1 << 20):
            body = {"t": self._at(event.time_ns), "b": text[start : start + (1 << 20)], "stream": clean_text(event.stream)}
            self._frame(Kind.CONSOLE, body, event.rank)

    def _take_alert(self, event: events.Alert) -> None:
        level = _LEVELS.get(event.level.lower(), "warning")
        body = {"event": "alert", "title": clean_text(event.title), "text": clean_text(event.text), "level": level}
        self._frame(Kind.EVENT, {"t": self._at(event.time_ns), "s": _step(event.step), **body}, event.rank)

    def _take_definition(self, event: events.Definition) -> None:
        options = {name: event.options[name] for name in ("x", "summary") if isinstance(event.options.get(name), str)}
        body = {"event": "metric", "key": clean_text(event.key), **plain(options)}
        self._frame(Kind.EVENT, {"t": self._at(None), **body})

    def _take_facts(self, event: events.Facts) -> None:
        given = msgspec.structs.asdict(event)
        info = self.record.info
        for name, fact in given.items():
            if fact is None:
                continue
            value = mask(plain(fact))
            merged = {**info.get(name, {}), **value} if isinstance(value, dict) else value
            if info.get(name) != merged:
                info[name] = merged
                self._facts_changed = True

    def _start(self, event: events.Start) -> None:
        self.record.attempt = self.record.later.get(event.attempt, event.attempt)
        lane = self._lane(event.rank)
        lane.chain.key = event.key
        if event.time_ns is not None and not lane.chain.journal:
            lane.chain.started = lane.chain.started or event.time_ns
            self.record.last = max(self.record.last, event.time_ns)

    def _end(self, event: events.End) -> None:
        self._spread(event.time_ns)
        self._write_facts()
        status = event.status if event.status in _STATUSES else "finished"
        why = {"reason" if status == "finished" else "error": event.cause} if event.cause else {}
        open_ranks = [chain.rank for chain in self.record.chains.values()
                      if chain.attempt == self.record.attempt and (self.record.assumed or not chain.ended)]  # fmt: skip
        for rank in open_ranks or ([] if self.record.chains else [0]):
            self._frame(Kind.END, {"t": self._at(event.time_ns), "status": status, "high": self.record.high, **why}, rank)
            self._lane(rank).chain.ended = True
        self.record.assumed = ""

    def let_go(self, why: str, status: str, cause: str = "") -> bool:
        """End everything that its source left open; return whether there was anything. `why` is one of ASSUMED.

        What comes later takes the end back, and after "dead" it is another attempt.
        """
        self._spread()
        self._write_facts()
        record, current = self.record, self.record.attempt
        again = bool(record.assumed) and ASSUMED.index(why) > ASSUMED.index(record.assumed)
        left = [chain for chain in record.chains.values() if not chain.ended or (again and chain.attempt == current)]
        for chain in left:
            record.attempt = chain.attempt
            word, reason = (status, cause) if chain.attempt == current else ("killed", "it was started again")
            detail = {"reason" if word == "finished" else "error": reason} if reason else {}
            self._frame(Kind.END, {"t": chain.last or self._at(None), "status": word, "high": record.high, **detail}, chain.rank)
            chain.ended = True
        record.attempt = current
        if left:
            record.assumed = why
        return bool(left)

    def revive(self) -> None:
        """Take back an end that was only where the import stopped: the run is being followed again."""
        if self.record.assumed == "growing":
            self.record.assumed = ""
            chains = [chain for chain in self.record.chains.values() if chain.attempt == self.record.attempt]
            for chain in chains:
                self._sheet(self._lane(chain.rank), revive=True)

    def _live_again(self) -> None:
        """Begin another attempt: the one before it counts as killed."""
        record = self.record
        source = next((name for name, here in record.later.items() if here == record.attempt), record.attempt)
        record.attempt = record.later[source] = f"{record.attempt}+"
        record.assumed = ""

    # Numbers

    def _take_rows(self, event: events.Rows) -> None:
        if event.times is None:
            self._waiting.append(event)
            return
        columns = self._columns(event)
        count = len(event.times)
        if not count or not columns:
            return
        times = np.asarray(event.times, np.int64)
        steps = None if event.steps is None or event.system else np.asarray(event.steps, np.int64)
        lane = self._lane(event.rank, int(times[0]))
        keys = list(columns)
        for start in range(0, len(keys), MOST_COLUMNS):
            some = keys[start : start + MOST_COLUMNS]
            self._write_rows(lane, times, steps, {key: columns[key] for key in some}, "system" if event.system else "")
        newest = int(times.max())
        lane.chain.last, self.record.last = max(lane.chain.last, newest), max(self.record.last, newest)
        if steps is not None:
            self.record.high = max(self.record.high, int(steps.max()))

    def _columns(self, event: events.Rows) -> dict[str, NDArray[Any]]:
        """Return the columns by the names they get here."""
        found: dict[str, NDArray[Any]] = {}
        for key, column in event.columns.items():
            name = clean_text(key)
            if event.system and not name.startswith("system/"):
                name = f"system/{name}"
            if len(name) > LONGEST_KEY:
                self._leave_points(f"their name is longer than {LONGEST_KEY} characters", len(column), name[:40])
            elif name in found:
                self._leave_points("two of their keys are the same text", len(column), name)
            else:
                found[name] = column
        return found

    def _leave_points(self, why: str, count: int, example: str) -> None:
        self.account.points -= count
        self.account.leave(Left(what="points", why=why, count=count, example=example))

    def _write_rows(
        self, lane: Lane, times: NDArray[np.int64], steps: NDArray[np.int64] | None, columns: Mapping[str, NDArray[Any]],
        origin: str,
    ) -> None:  # fmt: skip
        sheet = self._sheet(lane, revive=True)
        types = "".join(_code(column) for column in columns.values())
        layout = fmt.Layout(0)
        if steps is None:
            layout |= fmt.Layout.STEP_NONE
        elif steps.max() >= _I32 or steps.min() < -_I32:
            layout |= fmt.Layout.STEP_WIDE
        packer, declaration = sheet.packer(tuple(columns), types, int(layout), origin, lambda _shape: None)
        if declaration:
            sheet.publish(packer, None)
            self._put(lane, declaration)
        most = max(1, MOST_BUFFERED // packer.shape.size)
        for start in range(0, len(times), most):
            part = slice(start, start + most)
            some = [column[part] for column in columns.values()]
            self._put(lane, pack_rows(packer, times[part], None if steps is None else steps[part], some))
            if self._buffered > MOST_BUFFERED:
                self._flush()

    # Texts, media, files

    def _take_values(self, event: events.Values) -> None:
        if event.time_ns is None:
            self._waiting.append(event)
            return
        found: dict[str, Any] = {}
        for key, value in event.values.items():
            name = clean_text(key)
            if isinstance(value, str):
                found[name] = clean_text(value)
                continue
            items = value if isinstance(value, list) else [value]
            stored = [entry for item in items if (entry := self._stored(name, item)) is not None]
            if stored:
                found[name] = stored if isinstance(value, list) else stored[0]
        if found:
            step = self.record.high if event.step is None else _step(event.step)
            self._frame(Kind.VALUES, {"s": step, "t": self._at(event.time_ns), "v": found}, event.rank)
            if event.step is not None:
                self.record.high = max(self.record.high, int(step or 0))

    def _stored(self, key: str, item: Media) -> dict[str, Any] | None:
        """Encode one media object and store its bytes; return its entry in the frame."""
        encoded, error = outcome(item.encode)
        if encoded is None:
            self.account.media -= 1
            self.account.leave(Left(what=f"{item.kind}", why=f"cannot be read: {describe(error) if error else ''}", example=key))
            return None
        entry: dict[str, Any] = {**encoded.meta, "type": item.kind}
        if len(encoded.data):
            entry |= {"blob": blobs.put(self.path, encoded.data), "ext": encoded.ext, "size": len(encoded.data)}
        return entry

    def _take_artifact(self, event: events.Artifact) -> None:
        entries = []
        for name, source in event.files:
            entry = self._copied(_inner_name(name), source)
            if entry is None:
                self.account.files -= 1
            else:
                entries.append(entry)
        if not entries:
            return
        body = {"event": "artifact", "name": clean_text(event.name), "kind": clean_text(event.type), "files": entries}
        metadata = mask(plain(event.metadata or {}))
        self._frame(Kind.EVENT, {"t": self._at(event.time_ns), "s": _step(event.step), "metadata": metadata, **body})

    def _copied(self, name: str, source: Path) -> dict[str, Any] | None:
        try:
            with open_regular(source) as file:
                size = os.fstat(file.fileno()).st_size
                if self.largest is not None and size > self.largest:
                    why = f"larger than {self.largest >> 20} MB, and the dashboard copies no such files; `fanfold import` does"
                    self.account.leave(Left(what="file", why=why, example=str(source)))
                    return None
                blob = blobs.put_open(self.path, file)
        except OSError as error:
            why = error.strerror or str(error)
            self.account.leave(Left(what="file", why=f"cannot be read: {why}", example=str(source)))
            return None
        return {"path": name, "blob": blob, "size": size}

    # Events without times

    def _spread(self, end: int | None = None) -> None:
        """Write the events that have no times: by their steps, evenly between the run's start and its end."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        started = min((chain.started for chain in self.record.chains.values() if chain.started), default=0)
        end = end or max(self.record.last, _modified(self.found))
        begin = min(end, self.record.last or started or end)
        steps = [step for event in waiting for step in _ends(event)]
        low, high = (min(steps), max(steps)) if steps else (0, 0)

        def at(step: Any) -> Any:
            share = (np.asarray(step, np.float64) - low) / (high - low) if high > low else np.zeros_like(step, np.float64)
            return (begin + share * (end - begin)).astype(np.int64)

        for event in waiting:
            if isinstance(event, events.Values):
                when = int(at(event.step)) if event.step is not None else begin
                self._take_values(msgspec.structs.replace(event, time_ns=when))
            else:
                count = len(next(iter(event.columns.values()), ()))
                times = at(event.steps) if event.steps is not None else np.full(count, begin, np.int64)
                self._take_rows(msgspec.structs.replace(event, times=times))

    # Frames and journals

    def _at(self, time_ns: int | None) -> int:
        """Return a time to write: the given one, else the newest known."""
        if time_ns is None:
            return self.record.last or _modified(self.found)
        self.record.last = max(self.record.last, time_ns)
        return time_ns

    def _frame(self, kind: Kind, body: dict[str, Any], rank: int = 0) -> None:
        lane = self._lane(rank, int(body["t"]))
        if kind != Kind.INFO:
            lane.chain.last = max(lane.chain.last, int(body["t"]))
        sheet = self._sheet(lane, revive=kind == Kind.VALUES)
        try:
            self._put(lane, fmt.frame(kind, fmt.pack(body), sheet.seed))
        except JournalError as error:
            self.account.leave(Left(what=kind.name.lower(), why=str(error)))

    def _put(self, lane: Lane, piece: bytes | memoryview) -> None:
        lane.pieces.append(piece)
        self._buffered += len(piece)

    def _lane(self, rank: int, time_ns: int | None = None) -> Lane:
        place = (self.record.attempt, rank)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes[place] = Lane(self._chain(rank))
        if time_ns and not lane.chain.started:
            lane.chain.started = time_ns
        return lane

    def _chain(self, rank: int) -> JournalChain:
        attempt, chains = self.record.attempt, self.record.chains
        name = f"{rank}:{attempt}"
        if name not in chains:
            ordinals = {chain.attempt: chain.ordinal for chain in chains.values()}
            ordinal = ordinals.get(attempt) or len(ordinals) + 1
            chains[name] = JournalChain(attempt=attempt, ordinal=ordinal, rank=rank, process=secrets.token_hex(8))
        return chains[name]

    def _sheet(self, lane: Lane, *, revive: bool = False) -> Sheet:
        """Return the lane's open journal. Points after an end mean that the run continues: in a journal of another process."""
        chain = lane.chain
        if chain.ended and revive:
            self._flush()
            self._close_lane(lane)
            chain.process, chain.ended = secrets.token_hex(8), False
        if lane.sheet is not None:
            return lane.sheet
        chain.started = chain.started or self.record.last or _modified(self.found)
        node = (self.record.info.get("facts") or {}).get("node")
        journal = secrets.token_hex(8)
        header = {
            "format": [fmt.MAJOR, fmt.MINOR],
            "writer": f"fanfold {__version__}",
            "run": self.run_id,
            "project": self.project,
            "name": clean_text(str(self.record.info.get("name") or self.found.name or self.found.id)),
            "role": "main",
            "rank": chain.rank,
            "world": None,
            "attempt": chain.key or digest(self.run_id, chain.attempt),
            "ordinal": chain.ordinal,
            "node": node.get("hostname") if isinstance(node, dict) else None,
            "boot": boot_id(),
            "pid": os.getpid(),
            "process": chain.process,
            "launcher": LAUNCHER,
            "journal": journal,
            "started": chain.started if not chain.journal else max(chain.started, self.record.last),
            "mono": time.time_ns(),
            "follows": chain.journal or None,
            "dropped": 0,
        }
        lane.sheet = Sheet(self.path / "journal" / f"{chain.rank}-{journal}{fmt.SUFFIX}", header)
        chain.journal = journal
        return lane.sheet

    def _close_lane(self, lane: Lane) -> None:
        if lane.sheet is not None:
            lane.sheet.close(ended=True)  # without the lock file: the process that imports says nothing about the run's own
            lane.sheet = None

    # Writing

    def _write_facts(self) -> None:
        if self._facts_changed:
            self._facts_changed = False
            info = {name: value for name, value in self.record.info.items() if name != "facts"}
            facts = self.record.info.get("facts")
            self._frame(Kind.INFO, {"t": self._at(None), **info, **({"facts": facts} if facts else {})})

    def _flush(self) -> None:
        """Write the waiting frames; raise OSError if the disk does not take them."""
        for lane in self._lanes.values():
            pieces, lane.pieces = lane.pieces, []
            if pieces and lane.sheet is not None:
                data = b"".join(pieces)
                done = os.write(lane.sheet.fd, data)
                while done < len(data):
                    done += os.write(lane.sheet.fd, memoryview(data)[done:])
        self._buffered = 0

    def _commit(self) -> None:
        """Write the waiting frames, and then how far that is."""
        self._write_facts()
        self._flush()
        for lane in self._lanes.values():
            if lane.sheet is not None:
                self.record.sizes[lane.sheet.path.name] = os.fstat(lane.sheet.fd).st_size
        self.record.position = self._position
        aside = self.path / f".{RECORD}.{os.getpid()}"
        aside.write_bytes(msgspec.msgpack.encode(self.record))
        aside.replace(self.path / RECORD)

    def settle(self, signature: Any = None) -> None:
        """Write everything that was fed so far."""
        self._spread()
        if signature is not None:
            self.record.signature = signature
        self._commit()

    @property
    def gone(self) -> bool:
        """Return whether somebody deleted the run, or is deleting it."""
        open_files = [lane.sheet.fd for lane in self._lanes.values() if lane.sheet is not None]
        return not (self.path / RECORD).exists() or any(os.fstat(fd).st_nlink == 0 for fd in open_files)

    def rest(self) -> None:
        """Close the journals; the next event opens new ones."""
        for lane in self._lanes.values():
            self._close_lane(lane)
        self._lanes.clear()

    def close(self) -> None:
        """Close the journals and let other processes import the run."""
        self.rest()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _recover(self) -> None:
        """Cut the journals back to what the record says: an import that was killed may have written more."""
        for file in journal_files(self.path):
            if file.suffix == fmt.PACKED:
                continue
            known = self.record.sizes.get(file.name)
            if known is None:
                header = read_header(file)
                if header is not None and header.launcher == LAUNCHER:
                    file.unlink()
                    Path(f"{file}.alive").unlink(missing_ok=True)
            elif file.stat().st_size > known:
                os.truncate(file, known)
            if known is not None:
                with contextlib.suppress(OSError):
                    Path(f"{file}.alive").unlink()


def _inner_name(name: str) -> str:
    """Return the name of a file inside its artifact; it leads nowhere else when the artifact is written out."""
    parts = [part for part in clean_text(name).replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(parts) or "file"


def _step(step: int | None) -> int | None:
    return None if step is None else max(-(1 << 63), min(int(step), (1 << 63) - 1))


def _code(column: NDArray[Any]) -> str:
    return "?" if column.dtype == np.bool_ else "q" if column.dtype.kind in "iu" else code_of_dtype(column.dtype) or "d"


def _ends(event: events.Rows | events.Values) -> list[int]:
    if isinstance(event, events.Values):
        return [] if event.step is None else [event.step]
    return [] if event.steps is None or not len(event.steps) else [int(event.steps.min()), int(event.steps.max())]


def _modified(found: Found) -> int:
    """Return when the source was last written to, in nanoseconds."""
    times = [0]
    for path in found.paths:
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime_ns)
    return max(times) or time.time_ns()
