"""Weights & Biases: the `.wandb` logs in its folders, read without wandb. Each start of a resumed run is an attempt.

A log is a sequence of protobuf messages in LevelDB's framing. The numbers of their fields are those of wandb_internal.proto,
which only ever adds to them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Final

import msgspec
import numpy as np

from ..errors import outcome
from ..journal.files import is_folder, open_regular
from ..media import Histogram, Image, Media, Table
from ..plain import equal
from . import protobuf as pb
from .events import Alert, Artifact, Console, Definition, End, Event, Facts, Found, Mark, Rows, Start, Values
from .reading import Account, file_inside, media_of, read_document, signature_of
from .record_log import records
from .wandb_rows import RowBatch, flat, nested, number_of, numbers_in, path_of, row_of

HEAD: Final = b":W&B\xe1\xbe"
HEAD_SIZE: Final = 7
STEP: Final = "fanfold/step"  # our tracker's x axis
_RUN, _HISTORY, _SUMMARY, _OUTPUT, _CONFIG, _FILES, _STATS, _ARTIFACT, _ALERT = 17, 2, 3, 4, 5, 6, 7, 8, 10
_METRIC, _RAW, _EXIT, _PREEMPTING, _USED, _ENVIRONMENT = 12, 13, 18, 23, 25, 26
_RULES: Final = {1: "min", 2: "max", 3: "mean", 5: "last", 6: "none", 8: "first"}
_OWN_FILES: Final = frozenset({"config.yaml", "wandb-summary.json", "wandb-metadata.json", "requirements.txt", "output.log",
                               "conda-environment.yaml", "diff.patch"})  # fmt: skip
_OWN_ARTIFACTS: Final = frozenset({"run_table", "wandb-history", "job", "wandb-run-history"})
_OWN_KEYS: Final = ("_step", "_runtime", "_timestamp", "_wandb")
_OF_ROW: Final = b"\x0a_timestamp\x82\x01"
_RUNTIME: Final = b"\x06_wandb\x12\x07runtime"
_BEGIN_SECONDS: Final = 10.0
_LEAST_SCAN: Final = 1 << 18  # bytes at the start of a log that are searched for the run and its metrics


class WandbImporter:
    """Folders of wandb: `wandb/run-…` and `wandb/offline-run-…`."""

    kind = "wandb"
    title = "Weights & Biases"
    says_end = True

    def find(self, path: Path) -> Iterator[Found]:
        logs = _logs(path)
        by_id: dict[str, list[Path]] = {}
        for log in logs:
            by_id.setdefault(log.name, []).append(log)
        for name, found in by_id.items():
            run_id = name.removeprefix("run-").removesuffix(".wandb")
            head = _head(found[0])
            if head is None:
                continue
            run, ours = head
            run_id = pb.text(run, 1) or run_id
            project = pb.text(run, 3) or "uncategorized"
            folders = tuple(log.parent for log in found) if path.is_dir() and _is_run_folder(found[0].parent) else ()
            yield Found(kind=self.kind, id=f"{pb.text(run, 2)}/{project}/{run_id}", paths=(*found, *folders), project=project,
                        name=pb.text(run, 8) or run_id, fanfold_id=run_id if ours else None)  # fmt: skip

    def join(self, found: Found, other: Found) -> Found | None:
        """Return a run with the folders of two places, such as two machines it ran on; None if they are copies."""
        logs = {path.parent.name: path for path in (*other.paths, *found.paths) if path.suffix == ".wandb"}
        if len(logs) == sum(path.suffix == ".wandb" for path in found.paths):
            return None
        folders = [path for path in (*found.paths, *other.paths) if path.suffix != ".wandb"]
        return msgspec.structs.replace(found, paths=(*sorted(logs.values(), key=_started), *folders))

    def signature(self, found: Found) -> Any:
        return signature_of((path.parent.name, path) for path in found.paths if path.suffix == ".wandb")

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        known = position if isinstance(position, dict) else {}
        places: dict[str, Any] = dict(known.get("logs") or {})
        account = Account()
        for log in (path for path in found.paths if path.suffix == ".wandb"):
            name = log.parent.name
            reader = _Log(log, name, places.get(name), account, ours=found.fanfold_id is not None)
            for event in reader.events():
                if isinstance(event, Mark):
                    places[name] = event.position
                    yield Mark(position={"logs": dict(places)})
                else:
                    yield event
        yield from account.events()


def _is_run_folder(path: Path) -> bool:
    return path.name.startswith(("run-", "offline-run-"))


def _logs(path: Path) -> list[Path]:
    """Return the logs at a path: a log, a run's folder, or wandb's folder with the folders of many starts. Oldest first."""
    if path.suffix == ".wandb":
        return [path] if path.is_file() else []
    if not is_folder(path) and not path.is_dir():
        return []
    try:
        with os.scandir(path) as entries:
            names = sorted(entry.name for entry in entries if not entry.is_symlink())
    except OSError:
        return []
    own = [path / name for name in names if name.startswith("run-") and name.endswith(".wandb")]
    if own:
        return own
    folders = [path / name for name in names if name.startswith(("run-", "offline-run-")) and is_folder(path / name)]
    found = [log for folder in folders for log in sorted(folder.glob("run-*.wandb")) if not log.is_symlink()]
    return sorted(found, key=_started)


def _started(log: Path) -> str:
    """Return what sorts logs by their age: the name of a folder has the time of its start."""
    return log.parent.name.removeprefix("offline-")


def _head(log: Path) -> tuple[pb.Message, bool] | None:
    """Return the run's own record at the start of a log, and whether fanfold wrote the log.

    None if it is not a log, or was begun only now: what it is is known when it has a first row.
    """
    run: pb.Message | None = None
    told = False
    try:
        with open_regular(log) as file:
            if file.read(HEAD_SIZE)[:6] != HEAD:
                return None
            for data, end in records(file, HEAD_SIZE, Account()):
                record, _ = outcome(pb.message, data)
                if record is None:
                    continue
                if run is None and _RUN in record:
                    run = pb.inner(record, _RUN)
                if _METRIC in record and pb.text(pb.inner(record, _METRIC), 1) == STEP:
                    return run or {}, True
                told = end > _LEAST_SCAN or _HISTORY in record or _EXIT in record
                if told and (run is not None or end > _LEAST_SCAN):
                    break
            begun = time.time() - os.fstat(file.fileno()).st_mtime < _BEGIN_SECONDS
    except (OSError, ValueError):
        return None
    return None if begun and not told else (run or {}, False)


class _Log:
    """One log being read: one attempt of the run."""

    def __init__(self, path: Path, name: str, known: Any, account: Account, *, ours: bool) -> None:
        known = known if isinstance(known, dict) else {}
        self.path, self.name, self.account, self.ours = path, name, account, ours
        self.at = int(known.get("at") or HEAD_SIZE)
        self.started = bool(known.get("started"))
        self.began = int(known.get("began") or 0)
        self.last = int(known.get("last") or 0)  # the newest time
        self.summary: dict[str, Any] = dict(known.get("summary") or {})
        self.raw_summary: dict[bytes, bytes] = {}
        self.of_row = b""  # the last summary that came with a row; it comes before the row, which may not be there yet
        self.pending: dict[str, Any] = dict(known.get("pending") or {})  # the same, decoded
        self.exited = False
        self.latest: dict[str, Any] = dict(known.get("latest") or {})
        self.preempting = bool(known.get("preempting"))
        self.batch = RowBatch(STEP if ours else "_step")
        self.stats = RowBatch("")
        self.files = path.parent / "files"
        self.takers: dict[int, Callable[[pb.Message], Iterator[Event]]] = {
            _RUN: self._run, _CONFIG: self._config, _OUTPUT: self._console, _RAW: self._console, _STATS: self._stats,
            _METRIC: self._metric, _ARTIFACT: self._artifact, _ALERT: self._alert, _FILES: self._saved, _EXIT: self._exit,
            _PREEMPTING: self._preempt, _SUMMARY: self._summarise, _ENVIRONMENT: self._environment, _USED: self._used,
        }  # fmt: skip

    def events(self) -> Iterator[Event]:
        try:
            file = open_regular(self.path)
        except OSError as error:
            self.account.leave("log", f"cannot be read: {error.strerror}", self.path)
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            if size <= self.at:
                if size < self.at and self.started:
                    self.account.leave("log", "it became shorter than what was imported of it; the rest is not read", self.path)
                return
            if file.read(HEAD_SIZE)[:6] != HEAD:
                self.account.leave("log", "it does not begin as a log of wandb does", self.path)
                return
            if self.started:
                yield Start(time_ns=self.last or None, attempt=self.name)
            for data, end in records(file, self.at, self.account):
                yield from self._record(data)
                self.at = end
                if self.batch.full:
                    yield from self._flush()
                    yield self._mark()
            yield from self._flush()
            yield from self._differing_summary()
        yield self._mark()

    def _mark(self) -> Mark:
        self._decode_numbers()
        self._decode_row()
        known = {"at": self.at, "started": self.started, "began": self.began, "last": self.last, "preempting": self.preempting}
        return Mark(position={**known, "summary": dict(self.summary), "pending": dict(self.pending), "latest": dict(self.latest)})

    def _record(self, data: bytes) -> Iterator[Event]:
        """Yield the events of one record. History is most of a log: it is looked at first, and decoded many rows at a time."""
        number, body = body_of(data)
        if number == _HISTORY and self.batch.add(body):
            return
        if number == _SUMMARY and (_OF_ROW in body or (len(body) < 100 and _RUNTIME in body)):
            self.of_row = body if _OF_ROW in body else self.of_row  # there is one for each row; the last one is enough
            return
        if number == _SUMMARY:
            yield from self._flush()  # rows before it are overwritten by it, rows after it overwrite it
            self._decode_summary()
            if self._numbers_of_summary(body):
                return
        found, error = outcome(list, self._decoded(data))
        if error is not None:
            self.account.leave("records", f"they cannot be decoded: {type(error).__name__}")
        yield from found or []

    def _decoded(self, data: bytes) -> Iterator[Event]:
        record = pb.message(data)
        for number in record:
            if number == _HISTORY:
                yield from self._history(pb.raw(record, _HISTORY))
            elif number in self.takers:
                yield from self._flush()
                yield from self.takers[number](pb.inner(record, number))

    # Numbers

    def _history(self, data: bytes) -> Iterator[Event]:
        """Take a row that is not only numbers: texts, media, nested values."""
        items, step = row_of(data)
        values = {key: value for key, value in items.items() if not key.startswith("_wandb")}
        own = int(values["_step"]) if isinstance(values.get("_step"), int) else step
        chosen = values.get(STEP) if self.ours else own
        at = chosen if isinstance(chosen, int) else own
        when = values.get("_timestamp")
        time_ns = round(when * 1e9) if isinstance(when, (int, float)) and 0 < when < 9e9 else self.last
        numbers = {key: value for key, value in values.items() if _is_number(value) and key not in _OWN_KEYS}
        if self.ours:
            numbers.pop(STEP, None)
        if numbers:
            self.batch.put(numbers, at, time_ns)
        others = {key: made for key, value in values.items()
                  if key not in _OWN_KEYS and not _is_number(value) and (made := self._made(key, value)) is not None}  # fmt: skip
        if others:
            yield from self._flush()
            self.last = max(self.last, time_ns)
            self._overwrite(others)
            self.latest.update({key: value for key, value in others.items() if isinstance(value, str)})
            yield Values(step=at, time_ns=time_ns or None, values=others)

    def _flush(self) -> Iterator[Event]:
        for batch, system in ((self.batch, False), (self.stats, True)):
            for steps, times, columns in batch.flush():
                kept = {
                    key: column for key, column in columns.items() if key not in _OWN_KEYS and not (self.ours and key == STEP)
                }
                if len(times):
                    self.last = max(self.last, int(times.max()))
                if kept and len(times):
                    if not system:
                        self._overwrite(kept)
                        self.latest.update({key: column[-1].item() for key, column in kept.items()})
                    yield Rows(steps=None if system else steps, times=times, columns=kept, system=system)

    def _overwrite(self, keys: Iterable[str]) -> None:
        """Drop what the user put into the summary under keys that were logged afterwards, as wandb does."""
        if self.summary or self.raw_summary:
            self._decode_numbers()
            for key in keys:
                _drop(self.summary, key)

    def _stats(self, stats: pb.Message) -> Iterator[Event]:
        time_ns = pb.timestamp(stats, 2) or self.last
        values: dict[str, Any] = {}
        for item in pb.messages(stats, 3):
            value, _ = outcome(json.loads, pb.text(item, 16))
            if _is_number(value):
                values[f"system/{pb.text(item, 1)}"] = float(value)  # type: ignore[arg-type]
        if values:
            self.stats.put(values, 0, time_ns)
        yield from ()

    # Facts

    def _run(self, run: pb.Message) -> Iterator[Event]:
        began = pb.timestamp(run, 17)
        if not self.started:
            self.started, self.began = True, began or 0
            if began is not None:
                self.last = max(self.last, began)
            yield Start(time_ns=began, attempt=self.name)
        host = pb.text(run, 13)
        config = nested(pb.inner(run, 4)) if 4 in run else {}
        config.pop("_wandb", None)
        git = pb.inner(run, 21)
        facts: dict[str, Any] = {"node": {"hostname": host}} if host else {}
        if git:
            facts["git"] = {"remote": pb.text(git, 1), "commit": pb.text(git, 2)}
        for number, name in ((2, "entity"), (7, "job_type"), (12, "sweep")):
            if pb.text(run, number):
                facts.setdefault("wandb", {})[name] = pb.text(run, number)
        yield Facts(name=pb.text(run, 8) or None, group=pb.text(run, 6) or None, notes=pb.text(run, 9) or None,
                    tags=pb.texts(run, 10) or None, config=config or None, facts=facts or None)  # fmt: skip
        yield from self._metadata()
        if 5 in run:
            _merge(self.summary, nested(pb.inner(run, 5)))

    def _metadata(self) -> Iterator[Event]:
        """Yield what wandb wrote about the machine and the packages."""
        facts: dict[str, Any] = {}
        found, _ = outcome(lambda: json.loads(self._content("wandb-metadata.json")))
        if isinstance(found, dict):
            facts |= _machine(found)
        text, _ = outcome(lambda: self._content("requirements.txt").decode("utf-8", "replace"))
        packages = dict(line.split("==", 1) for line in (text or "").splitlines()[:20_000] if "==" in line)
        if packages:
            facts["packages"] = packages
        if facts:
            yield Facts(facts=facts)

    def _environment(self, record: pb.Message) -> Iterator[Event]:
        git = pb.inner(record, 9)
        names = {12: "host", 1: "os", 2: "python", 6: "program", 13: "username", 18: "gpu", 14: "executable"}
        found: dict[str, Any] = {name: pb.text(record, number) for number, name in names.items()}
        found |= {"args": pb.texts(record, 5), "git": {"remote": pb.text(git, 1), "commit": pb.text(git, 2)}}
        facts = _machine({name: value for name, value in found.items() if value and value != {"remote": "", "commit": ""}})
        if facts:
            yield Facts(facts=facts)

    def _config(self, config: pb.Message) -> Iterator[Event]:
        found = nested(config)
        found.pop("_wandb", None)
        if found:
            yield Facts(config=found)

    def _numbers_of_summary(self, data: bytes) -> bool:
        """Take a summary of plain numbers. Return False for any other."""
        items = numbers_in(data)
        if items is None:
            return False
        self.raw_summary.update(items)
        return True

    def _summarise(self, summary: pb.Message) -> Iterator[Event]:
        self._decode_summary()
        _merge(self.summary, nested(summary))
        for item in pb.messages(summary, 2):
            self.summary.pop(path_of(item)[0], None)
        yield from ()

    def _decode_summary(self) -> None:
        """Decode what is waiting, in the order it came."""
        self._decode_numbers()
        self._decode_row()
        found, self.pending = self.pending, {}
        _merge(self.summary, found)

    def _decode_row(self) -> None:
        body, self.of_row = self.of_row, b""
        if body:
            found, _ = outcome(lambda: nested(pb.message(body)))
            self.pending = found or {}

    def _decode_numbers(self) -> None:
        raw, self.raw_summary = self.raw_summary, {}
        for key, text in raw.items():
            value, _ = outcome(number_of, text)
            self.summary[key.decode("utf-8", "replace")] = value

    def _differing_summary(self) -> Iterator[Event]:
        """Yield the summary values that the run set itself: those that are neither the last value logged nor computed."""
        if self.exited:
            self._decode_summary()
        else:
            self._decode_numbers()
        own = {}
        for key, value in flat(self.summary):
            rule = key.rpartition("/")[2] in _RULES.values() and key.rpartition("/")[0] in self.latest
            medium = isinstance(value, dict) and "_type" in value
            if key.startswith("_") or (self.ours and key == STEP) or rule or medium or value == {}:
                continue
            if key not in self.latest or not equal(value, self.latest[key]):
                own[key] = value
        if own:
            yield Facts(summary=own)

    def _metric(self, metric: pb.Message) -> Iterator[Event]:
        key, x = pb.text(metric, 1) or pb.text(metric, 2), pb.text(metric, 4)
        rules = [_RULES[number] for number in pb.inner(metric, 7) if number in _RULES]
        options = {"x": x} if x and x != "_step" and not (self.ours and x == STEP) else {}
        if rules:
            options["summary"] = rules[0]
        if key and options and not (self.ours and key in (STEP, "*")):
            yield Definition(key=key.replace("\\.", "."), options=options)

    def _console(self, output: pb.Message) -> Iterator[Event]:
        time_ns = pb.timestamp(output, 2)
        yield Console(text=pb.text(output, 3), time_ns=time_ns, stream="stdout" if pb.integer(output, 1) else "stderr")

    def _alert(self, alert: pb.Message) -> Iterator[Event]:
        yield Alert(title=pb.text(alert, 1), text=pb.text(alert, 2), level=pb.text(alert, 3) or "info", time_ns=self.last or None)

    def _preempt(self, _record: pb.Message) -> Iterator[Event]:
        self.preempting = True
        yield from ()

    def _exit(self, record: pb.Message) -> Iterator[Event]:
        code = pb.integer(record, 1)
        self.exited = True
        status = "finished" if not code else "preempted" if self.preempting else "killed" if code in (137, -9) else "failed"
        self.last = max(self.last, self.began + pb.integer(record, 2) * 1_000_000_000 if self.began else 0)
        yield End(status=status, time_ns=self.last or None, cause=f"exit code {code}" if code else "")

    def _used(self, _record: pb.Message) -> Iterator[Event]:
        self.account.leave("artifact", "it was used by the run, and wandb keeps it elsewhere")
        yield from ()

    # Files and media

    def _saved(self, record: pb.Message) -> Iterator[Event]:
        for saved in pb.messages(record, 1):
            name = pb.text(saved, 1)
            if name in _OWN_FILES or name.startswith(("media/", "code/", "artifact/")):
                continue
            path = _inside(self.files, name)
            if path is None:
                self.account.leave("file", "it is a link, missing, or outside the run's folder", name)
            else:
                yield Artifact(name=name, files=[(name, path)], time_ns=self.last or None)

    def _artifact(self, record: pb.Message) -> Iterator[Event]:
        kind, name = pb.text(record, 4), pb.text(record, 5)
        if kind in _OWN_ARTIFACTS:
            return
        manifest = pb.inner(record, 12)
        if pb.text(manifest, 5):
            self.account.leave("artifact", "its list of files is in a file of its own", name)
        files = []
        for entry in pb.messages(manifest, 4):
            local = pb.text(entry, 6)
            path = self._local(local)
            if path is not None:
                files.append((pb.text(entry, 1), path))
            elif pb.text(entry, 3):
                self.account.leave("artifact file", "it is a reference to another place", pb.text(entry, 3))
            else:
                why = "it is gone, or not in a folder of wandb: files named by a log are read only there"
                self.account.leave("artifact file", why, local or pb.text(entry, 1))
        if files:
            metadata, _ = outcome(json.loads, pb.text(record, 8) or "{}")
            yield Artifact(name=name, files=files, type=kind or "file", time_ns=self.last or None,
                           metadata=metadata if isinstance(metadata, dict) else None)  # fmt: skip

    def _local(self, name: str) -> Path | None:
        """Return an artifact's file if it is where wandb itself puts them: a log may name any file of this machine."""
        if not name:
            return None
        path = Path(os.path.normpath(name))
        data = os.environ.get("WANDB_DATA_DIR")
        staging = Path(data) if data else Path.home() / ".local" / "share" / "wandb"
        allowed = (self.path.parent, staging / "artifacts" / "staging")
        for folder in allowed:
            if path.is_relative_to(folder):
                return _inside(folder, str(path.relative_to(folder)))
        return None

    def _made(self, key: str, value: Any) -> str | Media | list[Media] | None:
        """Return a value of a row as a text or media; None, and a line in the account, if it cannot be carried."""
        if isinstance(value, str):
            return value
        found, error = outcome(self._media, value)
        if found is None:
            kind = value.get("_type") if isinstance(value, dict) else type(value).__name__
            why = str(error) if error is not None else "fanfold has nothing like it"
            self.account.leave(str(kind or "value")[:40], why[:200], key)
        return found

    def _media(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list):
            return json.dumps(value)
        kind = value.get("_type")
        if kind is None:
            return json.dumps(value)
        if kind == "histogram":
            return _histogram(value)
        if kind == "images/separated":
            captions = value.get("captions") or []
            names = value.get("filenames") or []
            return [Image(self._content(name), caption=captions[place] if place < len(captions) else None)
                    for place, name in enumerate(names)] or None  # fmt: skip
        if kind in ("videos", "audio", "html"):
            return [self._file_media(item) for item in value.get(kind if kind != "html" else "html", [])] or None
        if kind == "table-file":
            table = json.loads(self._content(value.get("path")))
            return Table([str(name) for name in table["columns"]], [[_cell(cell) for cell in row] for row in table["data"]])
        return self._file_media(value)

    def _file_media(self, value: Any) -> Media:
        name = str(value.get("path"))
        facts: dict[str, Any] = {"caption": value["caption"]} if isinstance(value.get("caption"), str) else {}
        return media_of(self._content(name), PurePosixPath(name).suffix, **facts)

    def _content(self, name: Any) -> bytes:
        path = _inside(self.files, str(name))
        if path is None:
            raise ValueError("its file is missing, a link, or outside the run's folder")
        return read_document(path)


def body_of(data: bytes) -> tuple[int, bytes]:
    """Return the number and content of a record's first field after its own number; (0, b"") if that is not a message."""
    at = 0
    if data[:1] == b"\x08":
        at = 1
        while at < len(data) and data[at] >= 0x80:
            at += 1
        at += 1
    if at >= len(data) or data[at] & 7 != 2 or data[at] >= 0x80:
        return 0, b""
    number = data[at] >> 3
    at, size, shift = at + 1, 0, 0
    while at < len(data) and shift < 35:
        byte = data[at]
        at += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (number, data[at : at + size]) if at + size <= len(data) else (0, b"")
    return 0, b""


def _merge(target: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        known = target.get(key)
        if isinstance(known, dict) and isinstance(value, dict) and "_type" not in value:
            _merge(known, value)
        else:
            target[key] = value


def _drop(target: dict[str, Any], key: str) -> None:
    """Remove a key, which may be the joined names of nested ones."""
    target.pop(key, None)
    first, _, rest = key.partition("/")
    if rest and isinstance(target.get(first), dict):
        _drop(target[first], rest)


def _inside(folder: Path, name: str) -> Path | None:
    """Return a regular file in a folder, reached through no link; None if there is none."""
    return outcome(file_inside, folder, name)[0] if is_folder(folder) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not (isinstance(value, int) and abs(value) >= 1 << 63)


def _histogram(value: dict[str, Any]) -> Histogram:
    counts = [float(count) for count in value["values"]]
    if "bins" in value:
        edges = [float(edge) for edge in value["bins"]]
    else:
        low, step, count = value["packedBins"]["min"], value["packedBins"]["size"], int(value["packedBins"]["count"])
        if not 0 <= count <= 1 << 16:
            raise ValueError("a histogram with too many bins")
        edges = (low + step * np.arange(count + 1)).tolist()
    return Histogram(np_histogram=(counts, edges))


def _cell(value: Any) -> Any:
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return value


def _machine(found: dict[str, Any]) -> dict[str, Any]:
    """Return wandb's description of the machine under our names."""
    facts: dict[str, Any] = {}
    node = {
        "hostname": found.get("host"),
        "os": found.get("os"),
        "cpu_count": found.get("cpu_count_logical") or found.get("cpu_count"),
    }
    if any(node.values()):
        facts["node"] = {name: value for name, value in node.items() if value}
    if isinstance(found.get("python"), str):
        facts["python"] = {"version": found["python"].removeprefix("CPython "), "executable": found.get("executable") or ""}
    if found.get("program"):
        arguments = found.get("args") if isinstance(found.get("args"), list) else []
        facts["command"] = [str(found["program"]), *map(str, arguments or [])]
    if isinstance(found.get("git"), dict):
        facts["git"] = found["git"]
    if found.get("username"):
        facts["user"] = str(found["username"])
    if found.get("gpu"):
        facts["gpus"] = [{"name": str(found["gpu"])}] * min(int(found.get("gpu_count") or 1), 64)
    return facts
