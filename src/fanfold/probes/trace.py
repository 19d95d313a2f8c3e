"""A trace of the next steps of a running job, asked for from outside: `fanfold ops trace RUN` leaves a request in the run.

A request puts a hook on the optimizers' step, which is taken off again at the end of the trace; without a request there is
none. The program's own profiler ends a trace early (see session.py).
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import guard, notices
from ..journal.files import open_regular
from . import profiler_session, step_hooks

REQUEST = "trace-request.json"
MAX_STEPS, MAX_WAITING = 1000, 8


def request(folder: Path, steps: int, token: str) -> None:
    """Ask every process of a run for a trace."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = folder / f".{REQUEST}.{token}"
    for _ in range(5):  # somebody may ask at the same moment, and write over ours
        aside.write_text(json.dumps([*asked(folder)[-MAX_WAITING + 1 :], {"token": token, "steps": steps}]), encoding="ascii")
        aside.replace(folder / REQUEST)
        time.sleep(0.1)
        if any(one["token"] == token for one in asked(folder)):
            return


def asked(folder: Path) -> list[dict[str, Any]]:
    """Return the latest requests in a run, the oldest first. One file, since a thousand processes look for it each second."""
    try:
        with open_regular(folder / REQUEST) as file:
            found = json.loads(file.read(4096))
    except (OSError, ValueError):
        return []
    return [one for one in found if _fine(one)] if isinstance(found, list) else []


def _fine(one: Any) -> bool:
    token, steps = (one.get("token"), one.get("steps")) if isinstance(one, dict) else (None, None)
    return isinstance(token, str) and token.isalnum() and len(token) < 64 and isinstance(steps, int)


def file_name(token: str, rank: int) -> str:
    return f"trace-{token}-rank{rank}.json"


class Requests:
    """Watch for requests, and answer them one at a time."""

    def __init__(self, folder: Path, rank: int, write: Callable[[Mapping[str, Any]], bool]) -> None:
        self._folder, self._rank, self._write = folder, rank, write
        self._seen = {one["token"] for one in asked(folder)}  # an old request is not for us
        self._trace: Trace | None = None
        self._exporting: threading.Thread | None = None

    def look(self) -> None:
        """Begin a trace when one is asked for."""
        writing = self._exporting is not None and self._exporting.is_alive()
        if writing or (self._trace is not None and not self._trace.over):
            return  # that one first
        new = next((one for one in asked(self._folder) if one["token"] not in self._seen), None)
        if new is None:
            return
        self._seen.add(new["token"])
        with guard("trace the next steps"):
            self._trace = Trace(max(1, min(new["steps"], MAX_STEPS)), functools.partial(self._finish, new["token"]))

    def _finish(self, token: str, traced: profiler_session.Session, steps: int) -> None:
        """Write the trace from a thread of its own: it can be large, and training has gone on."""
        self._exporting = threading.Thread(target=self._export, args=(token, traced, steps), name="fanfold-trace", daemon=True)
        self._exporting.start()

    def _export(self, token: str, traced: profiler_session.Session, steps: int) -> None:
        with guard("write a trace"):
            if not traced.read():
                notices.once("trace empty", "a trace holds no events, so none was written. Training goes on. Ask again.")
                return  # torch would crash
            path = self._folder / file_name(token, self._rank)
            aside = path.with_suffix(".part.json")
            traced.profiler.export_chrome_trace(str(aside))
            aside.replace(path)
            self._write({"event": "trace", "path": f"ops/{path.name}", "steps": steps, "size": path.stat().st_size})

    def stop(self, timeout: float) -> None:
        """Give up a trace that waits for steps or is under way; one that is being written is waited for."""
        given_up, self._trace = self._trace, None
        if given_up is not None:
            given_up.stop()
        if self._exporting is not None:
            self._exporting.join(timeout)


class Trace:
    """Hook the optimizers: start at the end of a step, stop `steps` later, or when the program begins a profile of its own."""

    def __init__(self, steps: int, done: Callable[[profiler_session.Session, int], None]) -> None:
        self._steps, self._taken, self._done = steps, 0, done
        self._session: profiler_session.Session | None = None
        self._wanted, self.over = True, False
        self._unhook = step_hooks.after_step(self._stepped)

    def _stepped(self) -> None:
        with guard("trace the next steps"), profiler_session.Turns.lock:
            if self.over:
                return  # another thread's step was the last
            if self._session is None:
                self._begin()
                return
            self._taken += 1
            if self._taken >= self._steps:
                self._session.end()

    def _begin(self) -> None:
        if why := profiler_session.hindrance():
            notices.once("trace", f"a trace that was asked for waits: {why}. It begins when that is over. Training goes on.")
            return
        try:
            self._session = profiler_session.Session(self._ended, record_shapes=True)
        except RuntimeError as error:
            self._remove()
            notices.once("trace", f"no trace could be started: {error}. Training goes on. Ask again when no other profiler runs.")

    def _ended(self, traced: profiler_session.Session, early: bool) -> None:
        self._remove()
        if not self._wanted:
            traced.read()
            return
        if early:
            notices.once(
                "trace early",
                f"a trace ended after {self._taken} of {self._steps} steps: the program began a profile of its own, and torch "
                "has room for one. What was traced is kept. Training and that profile go on.",
            )
        self._done(traced, self._taken)

    def _remove(self) -> None:
        self._unhook()
        self.over = True

    def stop(self) -> None:
        """Leave nothing on."""
        with guard("stop a trace"), profiler_session.Turns.lock:
            self._wanted = False
            if self._session is not None:
                self._session.end()
            self._remove()
