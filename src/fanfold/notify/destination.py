"""The notifier as a relay's destination: it takes no points, and reads the run itself each time the relay looks at it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..store import open_run
from ..store.changes import OnDisk
from ..store.rules import Rule
from ..store.run import StoredRun
from ..trackers.base import Identity
from ..trackers.destination import Destination
from . import NAME
from .ledger import LEDGER, FilePages, Ledger
from .notifier import Notifier, parse_rules
from .options import NotifyOptions, read_options
from .project_rules import project_rules, run_rules
from .services import Absent, open_services

LOOK_SECONDS = 1.0
SHARE = 10.0  # a look that takes a second is followed by a pause of this many


class NotifyDestination(Destination):
    """Messages to people about one run. `secrets` are the options of init(notify=…) as JSON; else the user's own are used."""

    name = NAME
    takes_points = False

    def __init__(self, run_name: Any = None, secrets: str = "", *, options: NotifyOptions | None = None) -> None:
        super().__init__(run_name)
        self.options = options or (NotifyOptions.from_json(secrets) if secrets else read_options())
        self._given = bool(secrets)
        self._notifier: Notifier | None = None
        self._stored: StoredRun | None = None
        self._over = False  # at the last look
        self._next = 0.0
        self._known: dict[str, list[Rule]] = {}  # parsed rules

    def open(self, identity: Identity | None, remote: str | None = None) -> None:  # noqa: ARG002 - the interface
        if identity is None or identity.directory is None:
            raise SettingError("the notifier is started by fanfold.init(notify=…), not by itself.")
        self.begin_at(Path(identity.directory).parent.parent, everybody=self._given)

    def begin_at(self, path: Path, *, everybody: bool, absent: bool = True) -> None:
        """Open the run in a directory. Unless `everybody`, only those who were meant from the start are told about it.

        Those of them whose address is not known here are an error, unless `absent` is False.
        """
        self._stored = open_run(path)
        ledger = Ledger(FilePages(path / "relay" / LEDGER))
        services, _ = open_services(self.options.to)
        if not everybody:
            known = {service.name: service for service in services}
            services = [known.get(name) or Absent(name) for name in ledger.since if absent or name in known]
        ledger.begin(
            self._stored.attempts[-1].started / 1e9 if self._stored.attempts else time.time(), [s.name for s in services]
        )
        self._notifier = Notifier(ledger, services, self.options, OnDisk(path.parent.parent), ledger.since)
        self.run = path

    @property
    def remote(self) -> str | None:
        return None

    def set_summary(self, values: Mapping[str, Any]) -> None:
        pass  # read from the run, where needed

    def define_metric(self, key: str, *, x: str | None, summary: str | None) -> None:
        pass

    def look(self, *, over: bool) -> bool:
        if self._notifier is None or self._stored is None:
            return False
        if time.monotonic() < self._next and not (over and not self._over):
            return True  # only a look can tell that nothing is left
        self._over, began = over, time.monotonic()
        held = self._notifier.look(self._stored.refresh(), self._applied(self._stored), over=over)
        self._next = time.monotonic() + max(LOOK_SECONDS, SHARE * (time.monotonic() - began))
        return held

    def _applied(self, run: StoredRun) -> Sequence[tuple[Rule, float]]:
        """Return the rules of the run's program, of this user and of the project, and the time from which on each applies."""
        shared = project_rules(OnDisk(run.path.parent.parent).views, run.project)
        own = [*self.options.rules, *run_rules(run)]
        found = [(rule, 0.0) for rule in self._parsed(own, stalled=not any(text.startswith("stalled") for text in shared))]
        return [*found, *((rule, shared[rule.text]) for rule in self._parsed(list(shared), stalled=False))]

    def _parsed(self, texts: Sequence[str], *, stalled: bool) -> list[Rule]:
        key = repr((tuple(texts), stalled))
        if key not in self._known:
            self._known[key] = parse_rules(texts, stalled=stalled)
        return self._known[key]
