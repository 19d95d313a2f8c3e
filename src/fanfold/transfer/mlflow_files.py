"""MLflow's file store: `mlruns/<experiment>/<run>/` with meta.yaml, params, tags, metrics and artifacts, one file per key.

A metric's file has one line per point and only grows, so the next reading begins where the last one ended.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..journal.files import is_folder, open_regular
from . import flat_yaml
from .events import Event, Facts, Left, Mark, Rows
from .mlflow_run import SOURCE_RUN, TRACES, MLflowFacts, began, ended, files, keys_of, nanoseconds
from .reading import Account

META = "meta.yaml"
MOST_META = 4 << 20
MOST_TEXT = 1 << 20  # of a param or tag
CHUNK = 4 << 20
MOST_DEPTH = 32


# Finding runs


def runs_in(path: Path) -> Iterator[tuple[Path, MLflowFacts]]:
    """Yield the run of a run's folder, or the runs of an experiment's folder; a store is a folder of such folders."""
    meta = _meta(path)
    if _run_id(meta):
        yield path, _sketch(path, meta, _meta(path.parent))
    elif meta.get("experiment_id") is not None:
        for folder in _folders(path, named=True):
            about = _meta(folder)
            if _run_id(about):
                yield folder, _sketch(folder, about, meta)


def _sketch(folder: Path, meta: dict[str, Any], experiment: dict[str, Any]) -> MLflowFacts:
    """Return what identifies a run, without reading everything."""
    names = ("fanfold.run_id", "fanfold.project", "mlflow.runName")
    tags = {name: text for name in names if (text := _text(folder / "tags" / name))}
    return _about(folder, meta, experiment, tags)


def _run_id(meta: dict[str, Any]) -> str:
    return str(meta.get("run_id") or meta.get("run_uuid") or "")


def _folders(path: Path, *, named: bool = False) -> list[Path]:
    """Return the folders in a folder, by name. Links are not followed, except for a path that the user named."""
    if not named and not is_folder(path):
        return []
    try:
        with os.scandir(path) as found:
            return [path / name for name in sorted(entry.name for entry in found if entry.is_dir(follow_symlinks=False))]
    except OSError:
        return []


def _meta(folder: Path) -> dict[str, Any]:
    return flat_yaml.read(_text(folder / META, MOST_META))


def _text(path: Path, most: int = MOST_TEXT) -> str:
    try:
        with open_regular(path) as file:
            return file.read(most).decode("utf-8", "replace")
    except (OSError, ValueError):
        return ""


def _kept(folder: Path) -> MLflowFacts:
    tags = {name: _text(path) for name, path in tree(folder / "tags").items()}
    kept = _about(folder, _meta(folder), _meta(folder.parent), tags)
    parent = tags.get("mlflow.parentRunId", "")
    if parent not in ("", ".", "..") and "/" not in parent:
        kept.parent = str(_meta(folder.parent / parent).get("run_name") or "")
    return kept


def _about(folder: Path, meta: dict[str, Any], experiment: dict[str, Any], tags: dict[str, str]) -> MLflowFacts:
    deleted = "deleted" in (meta.get("lifecycle_stage"), experiment.get("lifecycle_stage"))
    name = str(experiment.get("name") or folder.parent.name)
    return MLflowFacts(
        info={**meta, "run_id": _run_id(meta)}, params={}, tags=tags, experiment=name, datasets=[], archived=deleted
    )


def tree(folder: Path, depth: int = 0) -> dict[str, Path]:
    """Return the files below a folder by their names relative to it. Links are not followed."""
    found: dict[str, Path] = {}
    if not is_folder(folder):
        return found
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return found
    for entry in listed:
        if entry.is_file(follow_symlinks=False):
            found[entry.name] = folder / entry.name
        elif entry.is_dir(follow_symlinks=False) and depth < MOST_DEPTH:
            found.update({f"{entry.name}/{name}": path for name, path in tree(folder / entry.name, depth + 1).items()})
    return found


# Reading one run


def read(folder: Path, run_id: str, position: dict[str, Any]) -> Iterator[Event]:
    """Yield a run's events from a position on: its facts if they changed, new points, new files, and its end."""
    del run_id
    account = Account()
    state = copy.deepcopy({"facts": "", "bytes": {}, "files": {}} | position)
    kept = _kept(folder)
    described = _signature(folder)
    anything = described != state["facts"]
    if anything:
        kept.params = {name: _text(path) for name, path in tree(folder / "params").items()}
        kept.datasets = _datasets(folder)
        yield from began(kept)
        yield from _left(folder, account)
    read_before = 0
    for event in _metrics(folder, kept, state["bytes"], account):
        anything = True
        yield event
        read_now = sum(state["bytes"].values())
        if read_now - read_before > CHUNK:
            yield Mark(position=copy.deepcopy(state))
            read_before = read_now
    for event in files(kept, new_files(_artifacts(folder, kept, account), state["files"]), account):
        anything = True
        yield event
    if anything:
        yield from ended(kept)
    yield from account.events()
    state["facts"] = described
    if state != position:
        yield Mark(position=state)


def new_files(found: dict[str, Path], known: dict[str, int]) -> dict[str, Path]:
    """Return the files that are new or of another size, and note their sizes."""
    new = {}
    for name, path in found.items():
        size = size_of(path)
        if known.get(name) != size:
            new[name], known[name] = path, size
    return new


def _signature(folder: Path) -> str:
    """Return what changes with the run's facts: sizes and times of the files that hold them."""
    seen = hashlib.blake2b(digest_size=16)
    for part in (META, "params", "tags", "inputs"):
        for name, path in ({part: folder / part} if part == META else tree(folder / part)).items():
            try:
                stat = path.lstat()
            except OSError:
                continue
            seen.update(f"{part}\0{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode("utf-8", "surrogateescape"))
    return seen.hexdigest()


def size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _datasets(folder: Path) -> list[dict[str, Any]]:
    found = []
    for place in _folders(folder / "inputs"):
        meta = _meta(place)
        source = str(meta.get("source_id"))
        if meta.get("source_type") == "DATASET" and source not in ("", ".", "..") and "/" not in source:
            tags = meta.get("tags")
            about = _meta(folder.parent / "datasets" / source)
            found.append({**about, "tags": tags} if tags else about)
    return [dataset for dataset in found if dataset]


def _left(folder: Path, account: Account) -> Iterator[Left]:
    for place in _folders(folder / "outputs"):
        account.leave("logged models", "their metrics and params are not carried; their files are artifacts", place.name)
    if traces := _traces(folder.parent / "traces")[folder.name]:
        account.leave("traces", TRACES, count=traces)
    yield from account.events()


def _traces(folder: Path) -> Counter[str]:
    """Return how many traces of an experiment each run has."""
    try:
        return _counted_traces(folder, folder.stat().st_mtime_ns)
    except OSError:
        return Counter()


@lru_cache(maxsize=64)
def _counted_traces(folder: Path, _changed: int) -> Counter[str]:
    return Counter(_text(place / "request_metadata" / SOURCE_RUN) for place in _folders(folder))


def _artifacts(folder: Path, kept: MLflowFacts, account: Account) -> dict[str, Path]:
    """Return the run's files, and those of the models it logged. Only what is inside the store is read."""
    found = tree(folder / "artifacts")
    for place in _folders(folder / "outputs"):
        for name, path in tree(folder.parent / "models" / place.name / "artifacts").items():
            found[f"{place.name}/{name}"] = path
    address = str(kept.info.get("artifact_uri") or "")
    if not (folder / "artifacts").is_dir() and "://" in address and not address.startswith("file:"):
        account.leave("the run's files", "they are not in the store, and were not fetched", address)
    return found


# Points


def _metrics(folder: Path, kept: MLflowFacts, offsets: dict[str, int], account: Account) -> Iterator[Event]:
    keys, ours = keys_of(kept), "fanfold.run_id" in kept.tags
    for name, path in tree(folder / "metrics").items():
        start, size = offsets.get(name, 0), size_of(path)
        if size < start:
            account.leave("metrics", "a file got shorter since it was imported; its points were kept", name)
            offsets[name] = size
        if size <= start:
            continue
        key = keys.get(name, name)
        for steps, times, values in _points(path, start, name, offsets, account):
            if ours and key.startswith("summary/"):
                yield Facts(summary={key.removeprefix("summary/"): float(values[-1])})
            else:
                system = not ours and key.startswith("system/")
                yield Rows(steps=None if system else steps, times=times, columns={key: values}, system=system)


Columns = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]


def _points(path: Path, start: int, name: str, offsets: dict[str, int], account: Account) -> Iterator[Columns]:
    """Yield steps, times and values of the complete lines from an offset on; it is moved behind them."""
    try:
        with open_regular(path) as file:
            file.seek(start)
            rest = b""
            while part := file.read(CHUNK):
                lines, newline, rest = (rest + part).rpartition(b"\n")
                if newline:
                    offsets[name] = offsets.get(name, 0) + len(lines) + 1
                    yield from _columns(lines, name, account)
                elif len(rest) > CHUNK:
                    account.leave("metrics", "a line is longer than any point; the rest of the file was not read", name)
                    return
            if rest.strip():
                account.leave("points", "the last line is incomplete", f"{name}: {rest[:80].decode('utf-8', 'replace')}")
    except OSError as error:
        account.leave("metrics", f"cannot be read: {error.strerror}", name)


def _columns(lines: bytes, name: str, account: Account) -> Iterator[Columns]:
    fields = lines.split()
    rows = lines.count(b"\n") + 1
    if len(fields) == 3 * rows:
        try:
            times, values, steps = (np.array(fields[i::3]) for i in range(3))
            found = steps.astype(np.int64), times.astype(np.int64) * 1_000_000, values.astype(np.float64)
        except (ValueError, OverflowError):
            pass
        else:
            if all(line.count(b" ") == 2 for line in lines.split(b"\n")):
                yield found
                return
    yield from _one_by_one(lines, name, account)


def _one_by_one(lines: bytes, name: str, account: Account) -> Iterator[Columns]:
    """Read lines of any form: MLflow has written 2, 3 and 5 fields; damaged lines are counted."""
    points: list[tuple[int, int, float]] = []
    datasets: Counter[str] = Counter()
    for line in lines.split(b"\n"):
        fields = line.decode("utf-8", "replace").strip().split(" ")
        point = _point(fields)
        if point is None:
            if line.strip():
                account.leave("points", "a line cannot be read", f"{name}: {' '.join(fields)[:80]}")
            continue
        points.append(point)
        if len(fields) > 3:
            datasets[fields[3]] += 1
    for dataset, count in datasets.items():
        account.leave("dataset of a point", "a point has no dataset here; the run's datasets are in its facts", dataset, count)
    if points:
        steps, times, values = zip(*points, strict=True)
        yield np.array(steps, np.int64), np.array(times, np.int64), np.array(values, np.float64)


def _point(fields: list[str]) -> tuple[int, int, float] | None:
    try:
        ms, value, step = int(fields[0]), float(fields[1]), int(fields[2]) if len(fields) > 2 else 0
    except (ValueError, IndexError):
        return None
    time_ns = nanoseconds(ms)
    if time_ns is None or not -(1 << 63) <= step < 1 << 63 or len(fields) == 4:
        return None
    return step, time_ns, value
