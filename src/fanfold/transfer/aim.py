"""Aim: a repository `.aim` of RocksDB stores, one pair for each run, and a SQLite file with names and tags.

Reading RocksDB needs `aim`. Its stores are opened for reading only and past its index, which would have to be built first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from ..errors import MissingExtra, needed, outcome
from ..media import Audio, Histogram, Image, decode
from .events import Alert, Artifact, Console, End, Event, Facts, Found, Rows, Start, Values
from .reading import Account, nanoseconds, resumed
from .sqlite import BROKEN, opened

SYSTEM = "__system__"
LOGS = "logs"


class AimImporter:
    """Runs of an Aim repository."""

    kind = "aim"
    title = "Aim"
    says_end = True

    def find(self, path: Path) -> Iterator[Found]:
        """Yield the runs of a repository, which is a folder `.aim`."""
        if not (path / "run_metadata.sqlite").is_file() or not (path / "meta" / "chunks").is_dir():
            return
        about = _about(path)
        for folder in sorted((path / "meta" / "chunks").iterdir()):
            if (folder / "CURRENT").is_file():
                ours = _fanfold_id(folder)
                known = about.get(folder.name, {})
                yield Found(
                    kind="aim", id=folder.name, paths=(folder, path / "seqs" / "chunks" / folder.name),
                    project=str(known.get("experiment") or "aim"), name=str(known.get("name") or folder.name),
                    fanfold_id=ours,
                )  # fmt: skip

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        """Yield a run's events."""
        yield from resumed(_Run(found).events(), position)


def _tree(folder: Path) -> Any:
    """Open a store for reading."""
    with needed("aim", "aim", "Reading an Aim repository"):
        from aim.storage.rockscontainer import RocksContainer
    if not (folder / "CURRENT").is_file():
        raise FileNotFoundError(f"{folder} is not a store")
    return RocksContainer(str(folder), read_only=True).tree()


def _fanfold_id(folder: Path) -> str | None:
    """Return the id of a run that fanfold sent, which it keeps among the run's attributes."""
    attributes = ("meta", "chunks", folder.name, "attrs", "fanfold")
    found, error = outcome(lambda: _tree(folder).subtree(attributes).get("run"))
    if isinstance(error, MissingExtra):
        raise error
    return found if isinstance(found, str) else None


def _about(repository: Path) -> dict[str, dict[str, Any]]:
    """Return what the repository's SQLite file knows of each run, by its hash."""
    found: dict[str, dict[str, Any]] = {}
    try:
        with opened(repository / "run_metadata.sqlite") as database:
            experiments = dict(database.select("experiment", ("id", "name")))
            names = dict(database.select("tag", ("id", "name")))
            columns = ("id", "hash", "name", "description", "is_archived", "created_at", "finalized_at", "experiment_id")
            ids = {}
            for row in list(database.select("run", columns)):
                known = dict(zip(columns, row, strict=True))
                known |= {"experiment": experiments.get(known["experiment_id"]), "tags": []}
                ids[known["id"]] = found[str(known["hash"])] = known
            for run, tag in database.select("run_tag", ("run_id", "tag_id")):
                if run in ids and tag in names:
                    ids[run]["tags"].append(str(names[tag]))
    except BROKEN:
        return found
    return found


class _Run:
    """One run's two stores."""

    def __init__(self, found: Found) -> None:
        self.found, self.account = found, Account()
        self.repository = found.paths[0].parents[2]
        self.ours = found.fanfold_id is not None
        self.epochs: dict[int, tuple[float, float]] = {}  # by step, with the time
        self.own: Mapping[str, Any] = {}
        self.finished: int | None = None
        self.last: int | None = None

    def events(self) -> Iterator[Event]:
        """Yield everything."""
        name = self.found.id
        meta, error = outcome(lambda: _tree(self.found.paths[0]).subtree(("meta", "chunks", name)).collect())
        if meta is None:
            self.account.leave("runs", f"cannot be read: {error}", name)
            yield from self.account.events()
            return
        yield from self._began(meta)
        series, error = outcome(lambda: _tree(self.found.paths[1]).subtree("seqs"))
        for context, traces in sorted(meta.get("traces", {}).items()) if series is not None else ():
            for key, about in traces.items():
                words = meta.get("contexts", {}).get(context) or {}
                yield from self.account.all_or_none(self._trace(series, context, key, about, words), "series", key)
        yield from self._epochs()
        yield from self._artifacts(meta.get("artifacts") or {})
        yield from self.account.events()
        yield from self._ended(meta)

    def _began(self, meta: Mapping[str, Any]) -> Iterator[Event]:
        about = _about(self.repository).get(self.found.id, {})
        attrs = dict(meta.get("attrs") or {})
        own = attrs.pop("fanfold", {}) if self.ours else {}
        system = attrs.pop("__system_params", None)
        summary = attrs.pop("summary", None) if self.ours else None
        config = attrs.pop("hparams", {}) if self.ours else attrs
        if not self.ours and set(attrs) == {"hparams"} and isinstance(attrs["hparams"], dict):
            config = attrs["hparams"]
        yield Start(time_ns=nanoseconds(about.get("created_at")))
        yield Facts(
            name=self.found.name, notes=about.get("description") or None, tags=about.get("tags") or None, group=own.get("group"),
            config=config if isinstance(config, dict) else {"hparams": config}, summary=summary,
            archived=True if about.get("is_archived") else None, facts={"aim": {"system": system}} if system else None,
        )  # fmt: skip
        self.own = own
        self.finished = nanoseconds(about.get("finalized_at"))

    def _ended(self, meta: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the end: Aim knows when a run was closed, not how it went."""
        closed = meta.get("end_time")
        time_ns = _nanoseconds(closed) if isinstance(closed, (int, float)) else self.finished
        status = self.own.get("status")
        if status in ("finished", "failed", "killed"):
            yield End(status=status, time_ns=self.last)
        elif time_ns is not None and not self.ours:
            yield End(status="finished", time_ns=time_ns)

    # Series

    def _trace(self, series: Any, context: Any, name: str, about: Mapping[str, Any], words: Mapping[str, Any]) -> Iterator[Event]:
        version = about.get("version", 1)
        home = ("chunks", self.found.id) if version == 1 else (f"v{version}", "chunks", self.found.id)
        tree = series.subtree(home).subtree((context, name))
        if version == 1:
            steps, values = tree.array("val").sparse_list()
            stamps = dict(zip(*tree.array("time").sparse_list(), strict=True))
            numbers = dict(zip(*tree.array("epoch").sparse_list(), strict=True))
            times, epochs = [stamps.get(step) for step in steps], [numbers.get(step) for step in steps]
        else:
            steps, values, times, epochs = (list(tree.array(column).values()) for column in ("step", "val", "time", "epoch"))
        if not len(steps) == len(values) == len(times):
            raise ValueError("its steps, values and times are of different lengths")
        # By time, so that what is added later comes last.
        order = sorted(range(len(steps)), key=lambda i: (times[i] or 0.0, steps[i]))
        steps, values, times = [steps[i] for i in order], [values[i] for i in order], [times[i] for i in order]
        if len(epochs) == len(order):
            pairs = zip(steps, times, (epochs[i] for i in order), strict=True)
            self.epochs.update(
                {int(step): (epoch, time) for step, time, epoch in pairs if isinstance(epoch, (int, float)) and time}
            )
        yield from self._points(name, words, steps, values, times)

    def _points(
        self, name: str, words: Mapping[str, Any], steps: list[Any], values: list[Any], times: list[Any]
    ) -> Iterator[Event]:
        key = _key(name, words, ours=self.ours)
        moments = [_nanoseconds(time) if time else None for time in times]
        self.last = max([self.last or 0, *(moment for moment in moments if moment)]) or None
        if all(isinstance(value, (bool, int, float)) for value in values):
            system = name.startswith(SYSTEM)
            timed = None not in moments
            yield Rows(
                steps=None if system else np.array(steps, np.int64), times=np.array(moments, np.int64) if timed else None,
                columns={key: np.array(values, np.float64)}, system=system,
            )  # fmt: skip
            return
        for step, value, moment in zip(steps, values, moments, strict=True):
            yield from self._value(name, key, int(step), value, moment)

    def _value(self, name: str, key: str, step: int, value: Any, moment: int | None) -> Iterator[Event]:
        kind = type(value).__name__
        if kind == "LogLine" or name == LOGS:
            yield Console(text=f"{value.data}\n", time_ns=moment)
        elif kind == "LogRecord":
            level = "error" if value.level >= logging.ERROR else "warn" if value.level >= logging.WARNING else "info"
            title, _, text = str(value.message).partition(": ") if self.ours else (str(value.message), "", "")
            yield Alert(title=title, text=text, level=level, time_ns=moment)
        else:
            items = list(value) if isinstance(value, (list, tuple)) else [value]
            made = [one for item in items if (one := self._made(key, item)) is not None]
            if made:
                yield Values(step=step, time_ns=moment, values={key: made if len(made) > 1 else made[0]})

    def _made(self, key: str, item: Any) -> Any:
        made, error = outcome(_media, item)
        if made is None:
            self.account.leave(type(item).__name__, f"cannot be read: {error}", key)
        return made

    def _epochs(self) -> Iterator[Event]:
        """Yield epochs as a metric: Aim keeps one with each value."""
        rows = sorted((time, step, epoch) for step, (epoch, time) in self.epochs.items())
        if rows and not self.ours:
            times, steps, epochs = zip(*rows, strict=True)
            moments = np.array([_nanoseconds(time) or 0 for time in times], np.int64)
            yield Rows(steps=np.array(steps, np.int64), times=moments, columns={"epoch": np.array(epochs, np.float64)})

    def _artifacts(self, found: Mapping[str, Any]) -> Iterator[Event]:
        home = self.repository.resolve().parent
        for name, artifact in found.items():
            address = str(getattr(artifact, "uri", ""))
            place = Path(unquote(urlsplit(address).path))
            if address.startswith("file:") and place.is_file() and place.resolve().is_relative_to(home):
                yield Artifact(name=str(name), files=[(place.name, place)])
            else:
                self.account.leave("files", "they are not in the repository's folder", address or str(name))


def _key(name: str, context: Mapping[str, Any], *, ours: bool) -> str:
    """Return the key of a name in a context: its subset as a folder, the rest in brackets."""
    name = name.removeprefix(SYSTEM)
    if ours and name == "(empty)":
        name = ""
    words = {key: value for key, value in context.items() if not (ours and key == "kind")}
    subset = words.pop("subset", None)
    rest = ", ".join(f"{key}={value}" for key, value in sorted(words.items()))
    return (f"{subset}/" if isinstance(subset, str) else "") + name + (f" [{rest}]" if rest else "")


def _media(item: Any) -> Any:
    """Return an object of Aim as the object that log() takes."""
    kind, storage = type(item).__name__, item.storage
    if kind == "Text":
        return item.data
    caption = str(storage["caption"]) if "caption" in list(storage.keys()) else ""
    if kind == "Image":
        return Image(bytes(storage["data"]), caption=caption or None)
    if kind == "Audio":
        return Audio(bytes(storage["data"]), caption=caption or None)
    if kind == "Distribution":
        low, high = storage["range"]
        counts = np.frombuffer(bytes(storage["data"]), storage["dtype"], int(storage["bin_count"]))
        return Histogram(np_histogram=(counts, np.linspace(low, high, len(counts) + 1)))
    if kind == "Figure":
        data = storage["data"].load()
        return decode("figure", {}, data.encode() if isinstance(data, str) else data)
    raise ValueError("there is nothing like it in fanfold")


def _nanoseconds(seconds: float) -> int | None:
    return int(seconds * 1e6 + 0.5) * 1000 if math.isfinite(seconds) and 0 < seconds < 1 << 33 else None
