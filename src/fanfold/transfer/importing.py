"""Importing: find the runs of other tools, and carry what is new of each into a run of ours, once or for as long as they grow."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from .._version import __version__
from ..errors import FanfoldError, describe, notices, outcome
from ..journal.directory import decode_name, encode_name, is_link, is_run, make_root, run_path
from ..process import digest
from ..settings import find_directory
from . import events
from .account import RunAccount
from .events import Event, Facts, Importer, Left, Mark
from .find import Search, Sighting, last_written, signature, size_of
from .write import ImportBusy, RunWriter, read_record

POLL_SECONDS: Final = 0.5
SEARCH_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 10.0
MOST_OPEN: Final = 128  # growing runs whose journals stay open
REST_SECONDS: Final = 600.0  # after which a source that does not grow counts as at rest: its run is over
DEAD_SECONDS: Final = 86_400.0  # after which a run without the end that its product would have recorded was killed
FREE_BYTES, RATIO = 1 << 30, 200  # what a run may unpack to, and how much more for each byte of its source
GROWING: Final = "it may still have been growing when it was imported"
Progress = Callable[[Iterable[Sighting], int], Iterable[Sighting]]


def import_runs(
    *sources: str | os.PathLike[str],
    kind: str | None = None,
    project: str | None = None,
    name: str | None = None,
    tags: Sequence[str] = (),
    dry_run: bool = False,
    dir: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> list[RunAccount]:
    """Import runs of other tools from files and folders; return an account of each run.

    A folder is searched for everything known. Importing again adds only what is new. `kind` restricts the search to one tool;
    `name` is a pattern of run names; `dry_run` reads everything and writes nothing.

    Args:
        sources: Files, folders or addresses of servers.
        kind: Only runs of this tool, such as `"wandb"` or `"tensorboard"`.
        project: The project they go to. Default: the one they had.
        name: Only runs whose name matches this pattern.
        tags: Tags to add to each run.
        dry_run: Report what would be imported and write nothing.
        dir: Where runs live.
        progress: Called with the runs found and their number; returns them, for progress bars.

    Returns:
        An account of each run: its id, what was carried, and what was not.

    Raises:
        SettingError: A source does not exist.
        FanfoldError: The runs cannot be written.

    Example:
        ```python
        from tensorboard.summary import Writer

        import fanfold

        writer = Writer("runs/baseline")
        writer.add_scalar("loss", 0.5, 1)
        writer.close()
        print([account.id for account in fanfold.import_runs("runs")])
        ```
    """
    work = Import(sources, kind=kind, project=project, name=name, tags=tags, dry_run=dry_run, dir=dir)
    return work.once(progress)


class Import:
    """One import of some sources into one directory of runs."""

    def __init__(
        self, sources: Sequence[str | os.PathLike[str]], *, kind: str | None = None, project: str | None = None,
        name: str | None = None, tags: Sequence[str] = (), dry_run: bool = False,
        dir: str | os.PathLike[str] | None = None, largest: int | None = None,
    ) -> None:  # fmt: skip
        self.search = Search(sources, kind)
        self.project, self.name, self.tags, self.dry_run, self.largest = project, name, list(tags), dry_run, largest
        self.root = find_directory(dir)
        self.passed_over = 0  # runs whose name the pattern does not match
        self._open: dict[str, tuple[RunWriter, float]] = {}  # writers of growing runs, and when they last grew
        self._read: dict[tuple[str, str], Any] = {}  # the state of each source when it was read
        self._written: dict[tuple[str, str], tuple[Any, float]] = {}  # signatures, and when the files were last written to
        self._known: list[Sighting] = []
        self._failed: dict[tuple[str, str], float] = {}  # when runs that could not be read are tried again
        self._searched = -SEARCH_SECONDS  # when, by the monotonic clock

    def once(self, progress: Progress | None = None) -> list[RunAccount]:
        """Import what is there."""
        sightings = self._selected()
        try:
            return [self._import(one, live=False) for one in (progress(sightings, len(sightings)) if progress else sightings)]
        finally:
            self.close()

    def follow(self, stop: threading.Event, report: Callable[[RunAccount], None]) -> None:
        """Import what is there and whatever is added, until `stop` is set. `report` gets an account of each change."""
        try:
            while not stop.is_set():
                self.round(stop, report)
                stop.wait(POLL_SECONDS)
        finally:
            self.close()

    def round(self, stop: threading.Event, report: Callable[[RunAccount], None]) -> None:
        """Import what was added since the last round: a look at each known file, and now and then a search for new ones."""
        now = time.monotonic()
        self.look(now)
        for one in self._known:
            if stop.is_set():
                return
            name = (one.found.kind, one.found.id)
            if now < self._failed.get(name, 0.0):
                continue
            account, error = outcome(self._followed, one)
            if error is not None:
                outcome(self._forget, one)
                self._failed[name] = now + AGAIN_SECONDS
                why = describe(error)
                notices.once(f"follow:{why}", f"{one.found.name} could not be read further: {why}. It is tried again.")
            elif account is not None:
                report(account)
        self._rest()

    def look(self, now: float) -> int:
        """Search for runs, unless that was done a moment ago; return how many are known."""
        if now - self._searched >= SEARCH_SECONDS:
            found, error = outcome(self._selected)
            if found is None and not self._known and isinstance(error, FanfoldError):
                raise error
            self._known, self._searched = found or self._known, now
        return len(self._known)

    def share(self, place: int, of: int, stop: Callable[[], bool]) -> None:
        """Import one of several equal parts of the known runs. The process that follows them passes over what is done by then."""
        size = len(self._known)
        for one in self._known[place * size // of : (place + 1) * size // of]:
            if stop():
                break
            outcome(self._followed, one)
        self.close()

    def close(self) -> None:
        """Close every run. Nobody follows it any more, so it ends here as far as we know."""
        for writer, _ in self._open.values():
            _close(writer)
        self._open.clear()

    # Which runs, and where they go

    def _selected(self) -> list[Sighting]:
        found = list(self.search())
        if self.name is None:
            return found
        chosen = [one for one in found if fnmatch.fnmatchcase(one.found.name or one.found.id, self.name)]
        self.passed_over = len(found) - len(chosen)
        return chosen

    def _place(self, one: Sighting) -> tuple[str, Path]:
        """Return the id and folder of a run: where it already is, else in the project asked for."""
        found = one.found
        first = found.fanfold_id or run_id_of(found)
        for run_id in (first, *(_id_here(found.kind, known) for known in found.earlier_ids)):
            here = self._existing(run_id)
            if here is not None:
                return run_id, here
        return first, run_path(self.root, self.project or found.project or found.kind, first)

    def _existing(self, run_id: str) -> Path | None:
        encoded = encode_name(run_id)
        try:
            with os.scandir(self.root) as entries:
                projects = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return None
        for folder in projects:
            path = Path(folder) / encoded
            if is_run(path) and not is_link(path):
                return path
        return None

    # One run

    def _followed(self, one: Sighting) -> RunAccount | None:
        """Import what is new of a run; None if it did not change."""
        name, state = (one.found.kind, one.found.id), self._state(one)
        if name in self._read and self._read[name] == state:
            return None
        account = self._import(one, live=True)
        if account.outcome != "busy":
            self._read[name] = state
        return None if account.outcome == "unchanged" else account

    def _state(self, one: Sighting) -> list[Any]:
        """Return what changes when there is something to import: the files as seen from outside, and whether they are at rest."""
        name, sign = (one.found.kind, one.found.id), msgspec.to_builtins(signature(one.importer, one.found))
        known = self._written.get(name)
        if known is None or known[0] != sign:
            known = self._written[name] = (sign, last_written(one.found))
        return [sign, _is_old(known[1])]

    def _import(self, one: Sighting, *, live: bool) -> RunAccount:
        found = one.found
        run_id, path = self._place(one)
        account = RunAccount(kind=found.kind, source=one.source, id=found.id, name=found.name, run=run_id, path=str(path),
                          project=decode_name(path.parent.name))  # fmt: skip
        for place in one.also:
            account.leave(
                Left(
                    what="copy of a run", why="it has the same id as a run found elsewhere, which is imported", example=str(place)
                )
            )
        if is_run(path) and str(path) not in self._open and (why := _known(path, found)):
            account.outcome, account.why = "known", why
            return account
        if self.dry_run:
            return self._counted(one, account, path)
        try:
            return self._carried(one, account, path, live=live)
        except ImportBusy as error:
            account.outcome, account.why = "busy", str(error)
        except OSError as error:
            self._forget(one)
            raise FanfoldError(
                f"{path} cannot be written: {error.strerror or error}. The import stopped there; what is written is kept. "
                "Free space or choose another directory, and import again: it continues where it stopped."
            ) from error
        return account

    def _counted(self, one: Sighting, account: RunAccount, path: Path) -> RunAccount:
        """Read a run without writing anything."""
        record = read_record(path) if is_run(path) else None
        for event in _events(one.importer, one.found, record.position if record else None, account):
            account.count(event)
        account.outcome = "would be imported" if record is None else "would be updated" if account.anything else "unchanged"
        return account

    def _carried(self, one: Sighting, account: RunAccount, path: Path, *, live: bool) -> RunAccount:
        state = self._state(one)
        writer = self._writer(one, account, path)
        over = True
        try:
            unchanged = state == writer.record.signature and writer.record.position is not None
            began = False if unchanged else self._feed(one, writer, account)
            if not began and not writer.record.chains:
                writer.close()
                self._open.pop(str(path), None)
                shutil.rmtree(path)
                account.outcome, account.why = "skipped", "there is nothing in it"
                return account
            over = self._is_over(one, writer, grown=live and began and not writer.fresh)
            _end(one, writer, account, over=over, live=live)
            writer.settle(state)
            account.outcome = "imported" if writer.fresh else "updated" if began else "unchanged"
            writer.fresh = False
        finally:
            if live and not over and str(path) in self._open:
                self._open[str(path)] = (writer, time.monotonic())
                if len(self._open) > MOST_OPEN:
                    self._rest()
            else:
                writer.close()
                self._open.pop(str(path), None)
        return account

    def _is_over(self, one: Sighting, writer: RunWriter, *, grown: bool) -> bool:
        """Return whether a run's source is at rest: its files are old, or its last point is, unless it has just grown.

        The files of old runs may be new copies, or a database that other runs are written to.
        """
        written = self._written[one.found.kind, one.found.id][1]
        last = writer.record.last / 1e9 or written  # without times, there are only those of the files
        return (written > 0 and _is_old(written)) or (not grown and _is_old(last))

    def _writer(self, one: Sighting, account: RunAccount, path: Path) -> RunWriter:
        known = self._open.get(str(path))
        if known is not None and not known[0].gone:
            known[0].account, known[0].found = account, one.found
            return known[0]
        if known is not None:  # the run was deleted meanwhile
            known[0].close()
        make_root(self.root)
        writer = RunWriter(path, account.run, account.project, one.found, account, largest=self.largest)
        self._open[str(path)] = (writer, time.monotonic())
        return writer

    def _feed(self, one: Sighting, writer: RunWriter, account: RunAccount) -> bool:
        """Feed a run's new events to its writer; return whether there were any."""
        began = False
        for event in _events(one.importer, one.found, writer.record.position, account):
            account.count(event)
            if not began and not isinstance(event, (Mark, Left)):
                began = True
                writer.feed(Facts(facts={"imported": self._origin(one)}))
            writer.feed(event)
        if self.tags and began:
            own = writer.record.info.get("tags") or []
            writer.feed(Facts(tags=[*own, *(tag for tag in self.tags if tag not in own)]))
        return began

    def _origin(self, one: Sighting) -> dict[str, Any]:
        paths = [str(path) for path in one.found.paths[:16]]
        return {"from": one.found.kind, "id": one.found.id, "paths": paths, "by": f"fanfold {__version__}"}

    def _forget(self, one: Sighting) -> None:
        """Drop the state of a run after an error; the next import recovers it from its record."""
        _, path = self._place(one)
        known = self._open.pop(str(path), None)
        if known is not None:
            known[0].close()
        self._read.pop((one.found.kind, one.found.id), None)

    def _rest(self) -> None:
        """Close the runs that have not grown for a while, and the oldest if there are too many."""
        by_age = sorted(self._open.items(), key=lambda item: item[1][1], reverse=True)
        for place, (path, (writer, grew)) in enumerate(by_age):
            if place >= MOST_OPEN or time.monotonic() - grew > REST_SECONDS:
                _close(writer)
                del self._open[path]


def run_id_of(found: events.Found) -> str:
    """Return the id that a run of another tool gets here: the same every time."""
    return _id_here(found.kind, found.id)


def _id_here(kind: str, source_id: str) -> str:
    return digest("import", kind, source_id)


def _known(path: Path, found: events.Found) -> str:
    """Return why a run that is here already is not imported again; "" if it came from this source and may have grown."""
    record = read_record(path)
    if record is None:
        return "this run was sent there by fanfold, and is here already"
    ids = (found.id, *found.earlier_ids)
    if record.kind == found.kind and record.source in ids and record.form == found.form:
        return ""
    return f"this run is here already, imported from {record.kind}{f' ({record.form})' if record.form else ''}"


def _end(one: Sighting, writer: RunWriter, account: RunAccount, *, over: bool, live: bool) -> None:
    """End a run whose source does not say that it ended, if the source is at rest or nobody follows it any more."""
    unsaid = f"{one.importer.title} has no end of it" if getattr(one.importer, "says_end", False) else ""
    if over and unsaid and _is_old(writer.record.last / 1e9, DEAD_SECONDS):
        writer.let_go("dead", "killed", unsaid)
    elif over:
        writer.let_go("rest", "finished", unsaid)
    elif live:
        writer.revive()
    else:
        account.growing = writer.let_go("growing", "finished", GROWING) or writer.record.assumed == "growing"


def _cost(event: Event) -> int:
    """Return about how many bytes an event takes here. Compressed files of others must not fill the disk."""
    if isinstance(event, events.Rows):
        return sum(8 * len(column) for column in event.columns.values())
    if isinstance(event, events.Values):
        return sum(len(value) for value in event.values.values() if isinstance(value, str))
    return len(event.text) if isinstance(event, events.Console) else 0


def _close(writer: RunWriter) -> None:
    """Close a run that may still grow. If the disk does not take its end, the next import recovers it."""
    with contextlib.suppress(OSError):
        if not writer.gone and writer.let_go("growing", "finished", GROWING):
            writer.settle()
    writer.close()


def _is_old(seconds: float, most: float = REST_SECONDS) -> bool:
    return time.time() - seconds > most


def _events(importer: Importer, found: events.Found, position: Any, account: RunAccount) -> Iterator[Event]:
    """Yield an importer's events; an error in it ends them, and is reported as something not carried."""
    stream, error = outcome(lambda: iter(importer.read(found, position)))
    spent = 0
    while stream is not None:
        event, error = outcome(next, stream, None)
        if event is None:
            break
        spent += _cost(event)
        if spent > FREE_BYTES and found.paths and spent > FREE_BYTES + RATIO * size_of(found):
            account.leave(Left(what="rest of the run", why=f"it unpacks to more than {RATIO} times its size", example=found.id))
            return
        yield event
    if error is not None:
        account.leave(Left(what="rest of the run", why=f"it could not be read: {describe(error)}", example=found.id))
