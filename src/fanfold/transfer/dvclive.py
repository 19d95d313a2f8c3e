"""DVCLive: a folder with a table per metric, params.yaml, metrics.json, images and plots, now and in earlier git revisions.

DVC keeps an experiment as a commit, so each revision that changed the folder is a run of its own. git only lists and prints
objects here: no hook, filter or network access of a foreign repository takes part.
"""

from __future__ import annotations

import csv
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from ..facts.git import run_git
from ..journal.files import is_folder, open_regular
from ..media import Histogram, Media, Table
from ..plain import plain
from ..trackers._dvclive_files import ITSELF, key_of
from ..trackers.dvclive import MARKER
from .events import Artifact, End, Event, Facts, Found, Start, Values
from .reading import (
    MOST_DOCUMENT,
    MOST_MEDIA,
    UNREADABLE,
    Account,
    Gather,
    Number,
    media_bytes,
    media_of,
    number,
    number_in,
    read_document,
    read_json,
    read_yaml,
    reread,
    step_of,
)

METRICS, IMAGES, ARTIFACTS = "plots/metrics/", "plots/images/", "artifacts/"
PLOTS = ("plots/custom/", "plots/sklearn/")
_STEP = re.compile(r"(\d{1,18})(?:-(\d{1,6}))?")
_GENERATED = ("report.html", "report.md", "report.ipynb", "dvc.yaml", MARKER)


class DVCLiveFiles(Protocol):
    """The files of a DVCLive folder: on disk, or in a commit."""

    names: list[str]

    def read(self, name: str) -> bytes: ...
    def path(self, name: str, scratch: Path) -> Path: ...


class FolderFiles:
    """The files as they are now; links are left out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not _linked(path, folder))
        self.names = [path.relative_to(folder).as_posix() for path in found]
        self.times = [(folder / name).stat().st_mtime_ns for name in self.names]

    def read(self, name: str) -> bytes:
        return read_document(self.folder / name)

    def path(self, name: str, scratch: Path) -> Path:  # noqa: ARG002 - it is a file already
        return self.folder / name


class InCommit:
    """The files as a git commit has them."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.folder = folder
        listing = run_git(str(folder), "ls-tree", "-r", "-z", "--long", commit, "--", ".", limit=MOST_DOCUMENT) or b""
        self._objects: dict[str, tuple[str, int]] = {}
        for entry in listing.decode("utf-8", "surrogateescape").split("\0"):
            facts, _, name = entry.partition("\t")
            words = facts.split()
            if len(words) == 4 and words[0] in ("100644", "100755") and words[3].isdecimal():
                self._objects[name] = (words[2], int(words[3]))
        self.names = sorted(self._objects)

    def read(self, name: str) -> bytes:
        object_id, size = self._objects[name]
        if size > MOST_MEDIA:
            raise ValueError(f"it is larger than {MOST_MEDIA >> 20} MiB")
        data = run_git(str(self.folder), "cat-file", "blob", object_id, limit=size + 1)
        if data is None or len(data) != size:
            raise ValueError("git could not print it")
        return data

    def path(self, name: str, scratch: Path) -> Path:
        target = scratch / str(len(list(scratch.iterdir())))
        target.write_bytes(self.read(name))
        return target


class DVCLiveImporter:
    """Folders of DVCLive, with the experiments that git has of them."""

    kind = "dvclive"
    title = "DVCLive"

    def find(self, path: Path) -> Iterator[Found]:
        if not is_ours(path):
            return
        folder = path.absolute()
        project = folder.parent.name or "imported"
        mark = read_json(folder / MARKER)
        ours = mark.get("run") if isinstance(mark, dict) else None
        yield Found(
            kind=self.kind, id=str(folder), paths=(folder,), project=project, name=folder.name,
            fanfold_id=ours if isinstance(ours, str) else None,
        )  # fmt: skip
        if ours is None:
            for commit, name in revisions(folder):
                yield Found(kind=self.kind, id=f"{folder}@{commit}", paths=(folder,), project=project, name=name)

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        folder = found.paths[0]
        commit = found.id.removeprefix(f"{folder}@") if found.id != str(folder) else ""
        yield from reread(lambda: _events(folder, commit, found.name), position)


def is_ours(path: Path) -> bool:
    """Return whether a folder is DVCLive's: it has tables of metrics, or a metrics.json with a step beside its params.yaml."""
    if not is_folder(path):
        return False
    tables = path / METRICS
    if is_folder(path / "plots") and is_folder(tables) and next(tables.rglob("*.tsv"), None) is not None:
        return True
    if not (path / "metrics.json").is_file() or not (path / "params.yaml").is_file():
        return False
    try:
        found = json.loads(read_document(path / "metrics.json"))
    except UNREADABLE:
        return False
    return isinstance(found, dict) and "step" in found


def revisions(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the commits that changed a folder's metrics, newest first, each with a name; not the one it shows now."""
    log = run_git(str(folder), "log", "--all", "--format=%H%x00%s%x01", "--", "metrics.json", "plots/metrics")
    refs = run_git(str(folder), "for-each-ref", "--format=%(objectname) %(refname)", "refs/exps") or b""
    lines = [line.split(" ", 1) for line in refs.decode("utf-8", "replace").splitlines() if " " in line]
    experiments = {commit: name.rpartition("/")[2] for commit, name in lines}
    names = ("metrics.json", "params.yaml")
    now: dict[str, str | None] | None = {name: _digest(folder, name) for name in names}
    for entry in (log or b"").decode("utf-8", "replace").split("\x01"):
        commit, _, subject = entry.strip().partition("\0")
        if not re.fullmatch("[0-9a-f]{40,64}", commit):
            continue
        then = {name: _object(folder, commit, name) for name in names}
        if not any(then.values()):
            continue  # the commit that removed the folder
        if then == now:
            now = None  # the folder holds this experiment: it is not imported twice
            continue
        yield commit, experiments.get(commit) or f"{commit[:7]} {subject}".strip()


def _digest(folder: Path, name: str) -> str | None:
    """Return the id that git gives to a file's current content, without filters."""
    if not (folder / name).is_file():
        return None
    return _line(run_git(str(folder), "hash-object", "--no-filters", "--", name))


def _object(folder: Path, commit: str, name: str) -> str | None:
    return _line(run_git(str(folder), "rev-parse", "--verify", "--quiet", f"{commit}:./{name}"))


def _line(output: bytes | None) -> str | None:
    return output.decode().strip() if output else None


def _events(folder: Path, commit: str, name: str) -> Iterator[Event]:
    left = Account()
    files: FolderFiles | InCommit = InCommit(folder, commit) if commit else FolderFiles(folder)
    began, ended = _times(folder, commit, files)
    yield Start(time_ns=began)
    ours = MARKER in files.names and not commit
    yield Facts(name=name, config=_config(files, left))
    if commit:
        yield Facts(facts={"git": {"commit": commit}})
    tables: dict[str, Any] = {}
    for one in files.names:
        if one.startswith(METRICS) and one.endswith(".tsv"):
            yield from _table(files, one, tables, ours, left)
    yield Facts(summary=_summary(files, tables, ours, left))
    yield from _media(files, ours, left)
    yield from _artifacts(files, left)
    if commit:
        yield End(status="finished", time_ns=ended)
    yield from left.events()


def _times(folder: Path, commit: str, files: DVCLiveFiles) -> tuple[int | None, int | None]:
    if isinstance(files, FolderFiles):
        return min(files.times, default=None), max(files.times, default=None)
    when = _line(run_git(str(folder), "show", "--no-patch", "--format=%at", commit))
    at = int(when) * 10**9 if when and when.isdecimal() else None
    return at, at


def _config(files: DVCLiveFiles, left: Account) -> dict[str, Any]:
    if "params.yaml" not in files.names:
        return {}
    try:
        found = read_yaml(files.read("params.yaml"))
    except UNREADABLE as error:
        left.leave("config", f"params.yaml was not read: {error}")
        return {}
    return found if isinstance(found, dict) else {}


def _table(files: DVCLiveFiles, name: str, latest: dict[str, Any], ours: bool, left: Account) -> Iterator[Event]:
    """Yield the rows of a metric's table: its step, perhaps a time in milliseconds, and its value in the last column."""
    key = name.removeprefix(METRICS).removesuffix(".tsv")
    key = key_of(key) if ours else key
    gather = Gather()
    try:
        text = files.read(name).decode("utf-8", "replace")
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            left.leave("row", "the last line of its table is incomplete", key)
        rows = csv.reader(whole.splitlines(keepends=True), delimiter="\t")
        head = next(rows, [])
        if "step" not in head[:-1]:
            raise ValueError("it has no step column")
        at, clock = head.index("step"), head.index("timestamp") if "timestamp" in head[:-1] else None
        for row in rows:
            point = _point(row, len(head), at, clock)
            if point is None:
                left.leave("row", "it has another number of columns, or no step", key)
                continue
            step, time_ns, latest[key] = point
            if isinstance(latest[key], str):
                yield from gather.flush()
                yield Values(step=step, time_ns=time_ns, values={key: latest[key]})
            else:
                yield from gather.add(step, time_ns, {key: latest[key]})
    except (*UNREADABLE, csv.Error) as error:
        left.leave("table", f"it was not read further: {error}", name)
    yield from gather.flush()


def _point(row: list[str], columns: int, at: int, clock: int | None) -> tuple[int, int | None, Number | str] | None:
    """Return the step, time and value of a row; None if it has no step."""
    step = step_of(row[at]) if len(row) == columns else None
    if step is None:
        return None
    milliseconds = step_of(row[clock]) if clock is not None else None
    value = number_in(row[-1])
    return step, None if milliseconds is None else milliseconds * 10**6, row[-1] if value is None else value


def _summary(files: DVCLiveFiles, latest: dict[str, Any], ours: bool, left: Account) -> dict[str, Any]:
    """Return what metrics.json has beyond the last row of each table."""
    if "metrics.json" not in files.names:
        return {}
    found = _json(files, "metrics.json")
    if not isinstance(found, dict):
        left.leave("summary", "metrics.json cannot be read")
        return {}
    flat = {key: value for key, value in _leaves(found, "", ours) if key != "step"}
    return plain({key: value for key, value in flat.items() if not _same(latest.get(key, files), value)})  # type: ignore[no-any-return]


def _leaves(node: dict[str, Any], before: str, ours: bool) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{name}/", ours)
        elif ours and name == ITSELF and before:
            yield key_of(before[:-1]), value
        else:
            yield key_of(before + name) if ours else before + name, value


def _same(one: Any, two: Any) -> bool:
    return one == two or str(one).lower() == str(two).lower()  # NaN and infinities are texts in metrics.json


def _json(files: DVCLiveFiles, name: str) -> Any:
    try:
        return json.loads(files.read(name))
    except UNREADABLE:
        return None


def _media(files: DVCLiveFiles, ours: bool, left: Account) -> Iterator[Values]:
    """Yield images and plots; those of one key and step together."""
    found: dict[tuple[str, int | None], list[tuple[int, Media]]] = {}
    for name in files.names:
        prefix = next((one for one in (IMAGES, *PLOTS) if name.startswith(one)), None)
        if prefix is None:
            continue
        key, step, item = _place(name.removeprefix(prefix), ours)
        try:
            media = _picture(files, name) if prefix == IMAGES else _plot(files, name)
        except (*UNREADABLE, TypeError) as error:
            left.leave("image" if prefix == IMAGES else "plot", str(error), name)
            continue
        found.setdefault((key, step), []).append((item, media))
    for (key, step), items in sorted(found.items(), key=lambda one: (one[0][0], one[0][1] or 0)):
        several = [media for _, media in sorted(items, key=lambda one: one[0])]
        yield Values(step=step, time_ns=None, values={key: several if len(several) > 1 else several[0]})


def _place(name: str, ours: bool) -> tuple[str, int | None, int]:
    """Return the key, step and position of a file: `samples/20.png` is step 20 of samples."""
    path = PurePosixPath(name)
    parent = path.parent.as_posix()
    match = _STEP.fullmatch(path.stem) if parent != "." else None
    if match is None or (match[2] and not ours):
        return path.with_suffix("").as_posix(), None, 0
    return key_of(parent) if ours else parent, int(match[1]), int(match[2] or 0)


def _picture(files: DVCLiveFiles, name: str) -> Media:
    return media_of(media_bytes(files.read(name)), PurePosixPath(name).suffix)


def _plot(files: DVCLiveFiles, name: str) -> Media:
    """Return the points of a plot as a table; bins with their counts are a histogram."""
    found = json.loads(files.read(name))
    if isinstance(found, dict):
        found = next((value for value in found.values() if isinstance(value, list)), None)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ValueError("its data is not a list of points")
    if found and all(_is_bin(row) for row in found):
        edges = [found[0]["from"], *(row["to"] for row in found)]
        return Histogram(np_histogram=([row["count"] for row in found], edges))
    columns = list(dict.fromkeys(str(key) for row in found for key in row))
    return Table(columns, [[plain(row.get(column)) for column in columns] for row in found])


def _is_bin(row: dict[str, Any]) -> bool:
    return list(row) == ["from", "to", "count"] and all(number(cell) is not None for cell in row.values())


def _artifacts(files: DVCLiveFiles, left: Account) -> Iterator[Artifact]:
    kept: dict[str, list[str]] = {}
    for name in files.names:
        if name.startswith(ARTIFACTS) and name.endswith(".dvc"):
            if name.removesuffix(".dvc") not in files.names:
                left.leave("artifact", "only DVC's pointer is here; `dvc pull` brings the file", name)
        elif name.startswith(ARTIFACTS) and name.endswith(".gitignore"):
            continue
        elif name.startswith(ARTIFACTS):
            kept.setdefault(name.removeprefix(ARTIFACTS), []).append(name)
        elif not name.startswith("plots/") and name not in ("metrics.json", "params.yaml", *_GENERATED):
            left.leave("file", "it is not DVCLive's", name)
        elif name.startswith("plots/") and not name.startswith((METRICS, IMAGES, *PLOTS)):
            left.leave("plot", "plots of this kind are not known", name)
    with tempfile.TemporaryDirectory(prefix="fanfold-import-") as folder:
        for inner, names in kept.items():
            try:
                path = files.path(names[0], Path(folder))
                open_regular(path).close()
            except UNREADABLE as error:
                left.leave("artifact", str(error), inner)
                continue
            yield Artifact(name=inner, files=[(PurePosixPath(inner).name, path)])


def _linked(path: Path, folder: Path) -> bool:
    return any(one.is_symlink() for one in (path, *path.parents) if one != folder and folder in one.parents)
