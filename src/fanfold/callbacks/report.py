"""A report: a Trainer's logs for one tracker, written to a journal first, so that a kill loses none of them.

It is a small run inside the directory of the training's run, with a thread relay to its one tracker: retries, the order of calls,
the end, and later delivery by `fanfold sync` are handled by the relay, as for any run.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from .. import approvals
from ..errors import guard, notices
from ..journal.directory import REPORTS, decode_name, run_directories
from ..recording import api
from ..recording.options import read_options
from ..recording.start import start, start_alone
from ..relay.cursor import cursors
from ..relay.process import split_options
from ..settings import find_directory, read_file, resolve

END_SECONDS, FAILING_SECONDS = 30.0, 10.0  # for the end of a report, and if its tracker has just failed


_hosts: weakref.WeakSet[Any] = weakref.WeakSet()  # runs opened here, which are never the current run


class Target(NamedTuple):
    """The target of a report: how its tracker is created, here and in another process.

    `arguments` are stored with the report and must be plain data; those in `here` are only valid in this process. A report that
    has `joined` a run the user opened leaves it open.
    """

    make: Callable[..., Any]
    arguments: Mapping[str, Any] = {}
    here: Mapping[str, Any] = {}
    joined: bool = False
    name: str | None = None  # of a joined run, which keeps it
    given: Any = None  # the library's own object, if the user passed one


class TrackerReport:
    """One tracker's part of a training. Opening it starts the tracker on this thread; after that, nothing waits for it."""

    def __init__(self, host: Any, system: str, destination: Target, number: int, **facts: Any) -> None:
        self.host = host
        self.destination = destination
        self._facts = facts
        self._id = _id(host, system, number)
        self.open()

    def open(self) -> None:
        """Start the tracker, or restart it in the same run for values logged after training."""
        where, self.pid = self.destination, os.getpid()
        _, own = split_options(where.arguments)
        self.tracker = where.make(**{**own, **where.here})
        if where.given is not None:
            self.tracker.given = where.given
        kept = {**where.arguments, **({"joined": True} if where.joined else {})}
        given = {
            "project": self.host.project, "id": self._id, "resume": "allow", "quiet": True, "console": False,
            "trackers": [self.tracker], "tracker_kwargs": {self.tracker.name: kept}, "relay": "thread", **self._facts,
        }  # fmt: skip
        self.run, self._relay = start_alone(read_options(self.host.path / REPORTS, given, file={}))

    @property
    def started(self) -> bool:
        """Whether the library's own objects exist."""
        return bool(self._relay.started)

    @property
    def ended(self) -> bool:
        return bool(self.run.status != "running")

    def log(self, values: Mapping[str, Any], step: int | None, **arguments: Any) -> None:
        """Record values for the tracker; arguments go to its log function."""
        self.run.log(values, step, log_kwargs={self.tracker.name: arguments} if arguments else None)

    def later(self, action: Callable[..., Any], *args: Any) -> None:
        """Run something with the tracker on the relay's thread, after everything logged so far."""
        self._relay.later(partial(action, *args))

    def catch_up(self, *, settled: bool = False) -> None:
        """Wait until the tracker has everything logged so far, for a few seconds at most."""
        self.run.flush(FAILING_SECONDS)
        self._relay.catch_up(settled=settled)

    def finish(self, status: str) -> None:
        """End the report; anything undelivered by then is left for `fanfold sync`."""
        failing = self._relay.cursor().error is not None
        self.run.finish(FAILING_SECONDS if failing else END_SECONDS, status)


def host_run(args: Any, name: str | None, config: Mapping[str, Any], project: str) -> tuple[Any, bool]:
    """Return the run that holds the reports, and whether it was opened here: the current one, or a new one.

    It is None if fanfold is disabled or no run can be written.
    """
    current = api.run
    disabled = current is not None and current.status == "disabled"
    for run in () if disabled else (current, *_hosts):
        if run is not None and run.status == "running":
            return run, False
    opened = None
    with guard("open a run for the reports of this training, so they are not sent"):
        root = find_directory(None, writing=True)
        # As with init(trackers=…): a delivery starts from a journal, and a disabled run has none.
        if disabled or resolve("mode", file=read_file(root)) == "disabled":
            notices.once(
                "report:disabled",
                "fanfold is disabled (mode=disabled), so nothing is reported to trackers either. Training continues. Unset "
                "FANFOLD_MODE to report.",
            )
            return None, False
        given = {"project": getattr(args, "project", None) or project, "name": name, "config": config}
        options = read_options(root, {**given, "id": resolve("run_id") or secrets.token_hex(6)})
        opened = start(options, alone=True)
        _hosts.add(opened)
    return opened, opened is not None


def latest_number(host: Any, system: str) -> int:
    """Return the number of a run's last report to one system, or 0 if there is none."""
    known = {decode_name(folder.name) for folder in run_directories(host.path / REPORTS)}
    return next(number for number in itertools.count() if _id(host, system, number + 1) not in known)


def earlier_arguments(host: Any, system: str, number: int) -> Mapping[str, Any]:
    """Return the arguments with which a report reached its tracker before, if this user chose them; else nothing."""
    wanted = _id(host, system, number)
    for folder in run_directories(host.path / REPORTS):
        if decode_name(folder.name) == wanted:
            return next((one.kwargs for one in cursors(folder) if approvals.is_approved(one.tracker, one.kwargs)), {})
    return {}


def _id(host: Any, system: str, number: int) -> str:
    return f"{host.id}-{system}" if number == 1 else f"{host.id}-{system}-{number}"
