"""Notifications about all runs of a store, sent by a thread of the server that has it: a gateway, or the local dashboard."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import FanfoldError, RunNotFound, describe, logger, notices, outcome
from ..journal.directory import is_run
from ..journal.liveness import is_locked
from ..relay.cursor import Cursor, Owned
from ..relay.process import cursor_of, has_everything
from ..store.changes import Changes
from ..store.query import Name, Store
from ..store.rules import Rule
from ..store.run import StoredRun
from . import NAME
from .ledger import GATEWAY, FilePages, Ledger, Pages
from .notifier import Notifier, parse_rules
from .options import NotifyOptions
from .project_rules import project_rules
from .services import NotSent, Service, open_services

LOOK_SECONDS = 2.0
CALM_SECONDS = 15.0  # between looks at a live run that has not changed: it may have stalled or got lost
SHARE = 10.0  # a look that takes a second is followed by a pause of this many for that run
RETRY_SECONDS = (5.0, 300.0)
RECENT_SECONDS = 7 * 86400.0  # how far back a server that was down looks for what it missed


class WatchState(Protocol):
    """Where a server keeps what it has sent."""

    def leads(self) -> bool:
        """Return whether this server is the one that sends, of those that share the store."""

    def pages(self, run: StoredRun | None) -> Pages:
        """Return the lines about a run; without one, those about the server itself."""

    def close(self) -> None:
        """Let another server take over."""


class DirectoryState:
    """Lines beside each run of a gateway's directory. A lock lets one server send.

    A server that sends nothing, and only applies rules, has a lock of another name, and leads only while nobody sends.
    """

    def __init__(self, root: Path, *, sends: bool = True) -> None:
        self.path = root / ".notify" / "gateway.cursor"
        self._other = self.path.with_name("rules.cursor" if sends else self.path.name).with_suffix(".lock")
        self._cursor = Cursor(self.path if sends else self.path.with_name("rules.cursor"))
        self._sends = sends

    def leads(self) -> bool:
        with contextlib.suppress(Owned):
            if not self._cursor.owned:
                self._cursor.acquire()
                return not is_locked(self._other)  # a server that only applies rules may be at it: it finds our lock next time
            return self._sends or not is_locked(self._other)
        return False

    def pages(self, run: StoredRun | None) -> Pages:
        if run is None:
            return FilePages(self.path.with_suffix(".sent"))
        return FilePages(run.path / "relay" / GATEWAY)

    def close(self) -> None:
        self._cursor.release()


@dataclass
class _Watched:
    """One run that may still have something to tell."""

    run: StoredRun
    notifier: Notifier
    due: float = 0.0  # when to look again
    changed: bool = True
    tries: int = 0


class StoreWatch:
    """The notifier of a server. Rules come from its options, and from the dashboard for each project."""

    def __init__(self, store: Store, options: NotifyOptions, state: WatchState, *, changes: Changes | None = None) -> None:
        self.store = store
        self.options = options
        self.state = state
        self.changes = changes or store.changes
        self.services: list[Service] = []
        self._started = time.time()
        self._since: dict[str, float] | None = None  # by service
        self._first = self._started  # when this store's notifications began
        self._token = 0
        self._open: dict[Name, _Watched] = {}
        self._parsed: dict[tuple[str, ...], list[Rule]] = {}
        self._rules: dict[str, list[tuple[Rule, float]]] = {}  # by project; read again at each look

    def serve(self, stop: threading.Event) -> None:
        """Look until told to stop."""
        self.services, _ = open_services(self.options.to)
        busy = bool(self.services or self.options.rules)
        while not stop.wait(LOOK_SECONDS if busy or self._open else CALM_SECONDS):
            _tolerantly(self.look)
        self.state.close()

    def look(self) -> None:
        """Look at what has changed since the last call, and at live runs that have not changed for a while."""
        if not self.state.leads():
            self._open, self._token = {}, 0  # what another server sends meanwhile is read when this one takes over
            return
        if self._since is None:
            self._begin()
        self._rules = {}
        token, names = self.store.changed(self._token)
        if not self._token:
            names = self._recent()
        self._token = token
        for name in names:
            if name in self._open:
                self._open[name].changed = True
            elif self.services or self._applied(name[0]):
                self._add(name)
        for name, one in list(self._open.items()):
            if time.monotonic() >= one.due:
                self._look_at(name, one)

    def _begin(self) -> None:
        ledger = Ledger(self.state.pages(None))
        ledger.begin(self._started, [service.name for service in self.services])
        self._since = ledger.since
        began = [line for line in ledger.lines if line.get("state") == "began"]
        self._first = float(began[0]["since"])

    def _recent(self) -> list[Name]:
        """Return the runs that something may have happened to since this server last looked, of projects somebody asked about."""
        first = max(self._first, time.time() - RECENT_SECONDS)
        ruled: list[str | None] = [one.name for one in self.store.projects() if self._applied(one.name)]
        rows = (row for project in ([None] if self.services else ruled) for row in self.store.runs(project))
        return [(row.project, row.id) for row in rows if row.seen >= first or row.status == "running"]

    def _add(self, name: Name) -> None:
        try:
            run = self.store.run(*name).reopened()  # its own: requests of the dashboard read the same run
        except RunNotFound:
            return
        notifier = Notifier(Ledger(self.state.pages(run)), self.services, self.options, self.changes, self._since or {})
        self._open[name] = _Watched(run, notifier)

    def _look_at(self, name: Name, one: _Watched) -> None:
        began = time.monotonic()
        try:
            if one.changed:
                one.changed = False
                one.run.refresh()
            held = one.notifier.look(one.run, self._applied(name[0]))
            one.tries = 0
        except NotSent as error:
            one.tries += 1
            one.due = time.monotonic() + min(RETRY_SECONDS[0] * 2**one.tries, RETRY_SECONDS[1])
            notices.once(f"notify:{error}", f"a notification was not sent: {error}. It is tried again until it arrives.")
            logger.debug("run %s/%s: %s", *name, error)
            return
        except (FanfoldError, OSError) as error:  # deleted meanwhile, or a store that cannot be reached
            one.due, one.changed = time.monotonic() + CALM_SECONDS, True
            logger.debug("run %s/%s cannot be read: %s", *name, error)
            if isinstance(error, RunNotFound):
                del self._open[name]
            return
        if one.run.status != "running" and not held and not one.changed:
            del self._open[name]  # a change brings it back
            return
        took = time.monotonic() - began
        one.due = time.monotonic() + max(LOOK_SECONDS, SHARE * took)
        one.changed = one.changed or time.monotonic() - began > CALM_SECONDS

    def _applied(self, project: str) -> list[tuple[Rule, float]]:
        """Return the rules for the runs of a project, each with the time from which on it applies."""
        if project not in self._rules:
            shared = project_rules(self.changes.views, project)
            stalled = bool(self.services) and not any(text.startswith("stalled") for text in shared)
            found = [(rule, self._first) for rule in self._known(tuple(self.options.rules), stalled)]
            self._rules[project] = found + [(rule, shared[rule.text]) for rule in self._known(tuple(shared), False)]
        return self._rules[project]

    def _known(self, texts: tuple[str, ...], stalled: bool) -> list[Rule]:
        key = (*texts, str(stalled))
        if key not in self._parsed:
            self._parsed = {**(self._parsed if len(self._parsed) < 1000 else {}), key: parse_rules(texts, stalled=stalled)}
        return self._parsed[key]


def _tolerantly(action: Callable[[], None]) -> None:
    """Call a look; a store that cannot be read now is tried again at the next one."""
    _, error = outcome(action)
    if error is not None:
        notices.once(f"watch:{type(error)}", f"notifications could not be prepared: {describe(error)}. This is tried again.")


@contextlib.contextmanager
def watching(watch: StoreWatch | LocalWatch | None) -> Iterator[None]:
    """Run a watch in a thread of its own, for as long as a server runs."""
    if watch is None:
        yield
        return
    stop = threading.Event()
    thread = threading.Thread(target=watch.serve, args=(stop,), name="fanfold-notify", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(10.0)


class LocalWatch:
    """The rules of the dashboard and unsent notifications, for the runs of a directory, while `fanfold ui --write` shows it.

    A run that has a notifier of its own is left to it.
    """

    def __init__(self, store: Store, options: NotifyOptions) -> None:
        self.store = store
        self.options = options
        self._token = 0
        self._live: set[Name] = set()
        self._due: dict[Name, float] = {}

    def serve(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_SECONDS if self._live else CALM_SECONDS / 3):
            _tolerantly(self.look)

    def look(self) -> None:
        first = not self._token
        self._token, names = self.store.changed(self._token)
        if first:
            recent = time.time() - RECENT_SECONDS
            names = [(row.project, row.id) for row in self.store.runs() if row.seen >= recent]
        for name in {*names, *self._live}:
            if time.monotonic() >= self._due.get(name, 0.0):
                self._look_at(name)

    def _look_at(self, name: Name) -> None:
        from .destination import NotifyDestination

        began = time.monotonic()
        with contextlib.suppress(RunNotFound):
            run = self.store.run(*name)
            cursor = cursor_of(run.path, NAME, {})
            begun = cursor.path.exists()
            wanted = project_rules(self.store.changes.views, name[0]) or (begun and not has_everything(run, cursor))
            if not wanted or not is_run(run.path):
                self._live.discard(name)
                return
            try:
                cursor.acquire()
            except Owned:
                self._live.add(name)
                self._due[name] = time.monotonic() + CALM_SECONDS
                return
            try:
                self._serve(NotifyDestination(options=self.options), run, cursor, begun)
            except NotSent as error:
                notices.once(f"notify:{error}", f"a notification was not sent: {error}. It is tried again.")
            finally:
                cursor.release()
                if not begun:
                    with contextlib.suppress(OSError):
                        cursor.path.unlink()
            self._live.add(name) if run.status == "running" else self._live.discard(name)
        self._due[name] = time.monotonic() + max(CALM_SECONDS, SHARE * (time.monotonic() - began))

    def _serve(self, destination: Any, run: StoredRun, cursor: Cursor, begun: bool) -> None:
        destination.begin_at(run.path, everybody=not begun, absent=False)
        over = run.status != "running"
        held = destination.look(over=over)
        if begun and over and not held:
            cursor.closed, cursor.error = run.status, None
            cursor.through = [journal.path.stem for journal in run.journals]
