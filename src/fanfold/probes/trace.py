"""A trace of the next steps of a running job, asked for from outside: `fanfold ops trace RUN` leaves a request in the run.

torch.profiler has to start and stop on the training thread, so a request puts a hook on the optimizers' step and takes it
off again when the trace is written; without a request there is none.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import guard, notices
from . import hooks

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
        with (folder / REQUEST).open("rb") as file:
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
        if self._trace is not None and not self._trace.over:
            return  # that one first
        new = next((one for one in asked(self._folder) if one["token"] not in self._seen), None)
        if new is None:
            return
        token, steps = new["token"], new["steps"]
        self._seen.add(token)
        with guard("trace the next steps"):
            self._trace = Trace(max(1, min(steps, MAX_STEPS)), lambda profiler: self._finish(profiler, token, steps))

    def _finish(self, profiler: Any, token: str, steps: int) -> None:
        """Write the trace from a thread of its own: it can be large, and training has gone on."""
        self._exporting = threading.Thread(target=self._export, args=(profiler, token, steps), name="fanfold-trace", daemon=True)
        self._exporting.start()

    def _export(self, profiler: Any, token: str, steps: int) -> None:
        with guard("write a trace"):
            path = self._folder / file_name(token, self._rank)
            aside = path.with_suffix(".part.json")
            profiler.export_chrome_trace(str(aside))
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
    """Hook the optimizers: start at the end of a step, stop `steps` later."""

    def __init__(self, steps: int, done: Callable[[Any], None]) -> None:
        self._left, self._done = steps, done
        self._profiler: Any = None
        self._thread = 0
        self._wanted, self.over = True, False
        self._unhook = hooks.after_step(self._stepped)

    def _stepped(self) -> None:
        with guard("trace the next steps"):
            if self._profiler is None:
                self._begin()
            elif threading.get_ident() == self._thread:  # another thread's optimizer cannot stop it, so it does not count
                self._left -= 1
                if self._left <= 0 or not self._wanted:
                    self._end()

    def _begin(self) -> None:
        import torch

        if torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - torch would end the other one without a word
            notices.once(
                "trace",
                "a trace was asked for while another profiler is on. It begins when that one has ended. Training goes on.",
            )
            return
        profiler = torch.profiler.profile(record_shapes=True)
        try:
            profiler.start()
        except RuntimeError as error:
            self._remove()
            notices.once("trace", f"no trace could be started: {error}. Training goes on. Ask again when no other profiler runs.")
            return
        self._profiler, self._thread = profiler, threading.get_ident()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._remove()
        profiler.stop()
        if self._wanted:
            self._done(profiler)

    def _remove(self) -> None:
        self._unhook()
        self.over = True

    def stop(self) -> None:
        """Leave nothing on; a profiler that another thread started ends with that thread's next step."""
        self._wanted = False
        if self._profiler is None:
            self._remove()
        elif threading.get_ident() == self._thread:
            with guard("stop a trace"):
                self._end()
