"""Traces of the next steps of a running job, requested from outside: `fanfold ops trace RUN` leaves a request in the run.

A request adds a listener to optimizer steps, which is removed at the end of the trace; without a request there is none.
The program's own profiler ends a trace early (see profiler_session.py).
"""

from __future__ import annotations

import functools
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from ..errors import guard, notices
from ..journal.files import read_list
from . import profiler_session, step_hooks

REQUEST = "trace-request.json"
MAX_STEPS, MAX_WAITING = 1000, 8
MOST_BYTES = 4096


def request(folder: Path, steps: int, token: str) -> None:
    """Request a trace from every process of a run."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for _ in range(5):  # a request at the same moment may overwrite ours
        replace_text(folder / REQUEST, json.dumps([*asked(folder)[-MAX_WAITING + 1 :], {"token": token, "steps": steps}]))
        time.sleep(0.1)
        if any(one["token"] == token for one in asked(folder)):
            return


def asked(folder: Path) -> list[dict[str, Any]]:
    """Return the latest requests in a run, oldest first. One file, since a thousand processes check it every second."""
    return [one for one in read_list(folder / REQUEST, MOST_BYTES) if _fine(one)]


def _fine(one: Any) -> bool:
    token, steps = (one.get("token"), one.get("steps")) if isinstance(one, dict) else (None, None)
    return isinstance(token, str) and token.isalnum() and len(token) < 64 and isinstance(steps, int)


def file_name(token: str, rank: int) -> str:
    return f"trace-{token}-rank{rank}.json"


class Requests:
    """A watcher that serves trace requests one at a time."""

    def __init__(self, folder: Path, rank: int, write: Callable[[Mapping[str, Any]], bool]) -> None:
        self._folder, self._rank, self._write = folder, rank, write
        self._seen = {one["token"] for one in asked(folder)}  # old requests are not for us
        self._trace: StepTrace | None = None
        self._exporting: threading.Thread | None = None

    def look(self) -> None:
        """Start a trace if one is requested."""
        writing = self._exporting is not None and self._exporting.is_alive()
        if writing or (self._trace is not None and not self._trace.over):
            return  # finish the current one first
        new = next((one for one in asked(self._folder) if one["token"] not in self._seen), None)
        if new is None:
            return
        self._seen.add(new["token"])
        with guard("trace the next steps"):
            self._trace = StepTrace(max(1, min(new["steps"], MAX_STEPS)), functools.partial(self._finish, new["token"]))

    def _finish(self, token: str, traced: profiler_session.ProfilerSession, steps: int) -> None:
        """Write the trace from another thread: it can be large, and training continues."""
        self._exporting = threading.Thread(target=self._export, args=(token, traced, steps), name="fanfold-trace", daemon=True)
        self._exporting.start()

    def _export(self, token: str, traced: profiler_session.ProfilerSession, steps: int) -> None:
        with guard("write a trace"):
            if not traced.read():
                notices.once("trace empty", "a trace holds no events, so none was written. Training continues. Ask again.")
                return  # torch would crash
            path = self._folder / file_name(token, self._rank)
            aside = path.with_name(f".{path.stem}.{secrets.token_hex(8)}.json")  # a name that nobody can have put a link at
            traced.profiler.export_chrome_trace(str(aside))
            aside.replace(path)
            self._write({"event": "trace", "path": f"ops/{path.name}", "steps": steps, "size": path.stat().st_size})

    def stop(self, timeout: float) -> None:
        """Abandon a trace that is waiting or running; wait for one that is being written."""
        given_up, self._trace = self._trace, None
        if given_up is not None:
            given_up.stop()
        if self._exporting is not None:
            self._exporting.join(timeout)


class StepTrace:
    """A trace from the end of one step to `steps` later, or until the program starts its own profiler."""

    def __init__(self, steps: int, done: Callable[[profiler_session.ProfilerSession, int], None]) -> None:
        self._steps, self._taken, self._done = steps, 0, done
        self._session: profiler_session.ProfilerSession | None = None
        self._wanted, self.over = True, False
        self._unhook = step_hooks.after_step(self._stepped)

    def _stepped(self) -> None:
        with guard("trace the next steps"), profiler_session.ProfilerTurns.lock:
            if self.over:
                return  # a step on another thread was the last
            if self._session is None:
                self._begin()
                return
            self._taken += 1
            if self._taken >= self._steps:
                self._session.end()

    def _begin(self) -> None:
        if why := profiler_session.hindrance():
            notices.once("trace", f"a requested trace is waiting: {why}. It starts when that is over. Training continues.")
            return
        try:
            self._session = profiler_session.ProfilerSession(self._ended, record_shapes=True)
        except RuntimeError as error:
            self._remove()
            notices.once("trace", f"no trace could be started: {error}. Training continues. Ask again once no profiler runs.")

    def _ended(self, traced: profiler_session.ProfilerSession, early: bool) -> None:
        self._remove()
        if not self._wanted:
            traced.read()
            return
        if early:
            notices.once(
                "trace early",
                f"a trace ended after {self._taken} of {self._steps} steps: the program began a profile of its own, and torch "
                "has room for one. What was traced is kept. Training and that profile continue.",
            )
        self._done(traced, self._taken)

    def _remove(self) -> None:
        self._unhook()
        self.over = True

    def stop(self) -> None:
        """Stop without writing anything, and remove the listener."""
        with guard("stop a trace"), profiler_session.ProfilerTurns.lock:
            self._wanted = False
            if self._session is not None:
                self._session.end()
            self._remove()
