"""A trace of the next steps of a running job, asked for from outside: `fanfold ops trace RUN` leaves a request in the run.

torch.profiler has to start and stop on the training thread, so a request puts a hook on the optimizers' step and takes it
off again when the trace is written; without a request there is none.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import guard, notices

REQUEST = "trace-request.json"
MAX_STEPS = 1000


def request(folder: Path, steps: int, token: str) -> None:
    """Ask every process of a run for a trace."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    aside = folder / f".{REQUEST}.{token}"
    aside.write_text(json.dumps({"token": token, "steps": steps}), encoding="ascii")
    aside.replace(folder / REQUEST)


def file_name(token: str, rank: int) -> str:
    return f"trace-{token}-rank{rank}.json"


class Requests:
    """Watch for requests, and answer them one at a time."""

    def __init__(self, folder: Path, rank: int, write: Callable[[Mapping[str, Any]], bool]) -> None:
        self._file, self._folder, self._rank, self._write = folder / REQUEST, folder, rank, write
        self._seen = self._read().get("token")  # an old request is not for us
        self._trace: Trace | None = None

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._file.read_bytes()[:4096])
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def look(self) -> None:
        """Begin a trace when one is asked for."""
        asked = self._read()
        token, steps = asked.get("token"), asked.get("steps")
        if token == self._seen or not isinstance(token, str) or not token.isalnum() or not isinstance(steps, int):
            return
        if self._trace is not None and self._trace.running:
            return  # that one first: it is over in a few steps
        self._seen = token
        self.stop()
        with guard("trace the next steps"):
            self._trace = Trace(max(1, min(steps, MAX_STEPS)), lambda profiler: self._finish(profiler, token, steps))

    def _finish(self, profiler: Any, token: str, steps: int) -> None:
        """Write the trace from a thread of its own: it can be large, and training has gone on."""
        threading.Thread(target=self._export, args=(profiler, token, steps), name="fanfold-trace", daemon=True).start()

    def _export(self, profiler: Any, token: str, steps: int) -> None:
        with guard("write a trace"):
            path = self._folder / file_name(token, self._rank)
            aside = path.with_suffix(".part.json")
            profiler.export_chrome_trace(str(aside))
            aside.replace(path)
            self._write({"event": "trace", "path": f"ops/{path.name}", "steps": steps, "size": path.stat().st_size})

    def stop(self) -> None:
        """Give up a trace that waits for steps or is under way."""
        given_up, self._trace = self._trace, None
        if given_up is not None:
            given_up.stop()


class Trace:
    """Hook the optimizers: start at the end of a step, stop `steps` later."""

    def __init__(self, steps: int, done: Callable[[Any], None]) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._left, self._done = steps, done
        self._profiler: Any = None
        self._thread = 0
        self._wanted = True
        self._handle: Any = register_optimizer_step_post_hook(self._stepped)

    @property
    def running(self) -> bool:
        return self._profiler is not None

    def _stepped(self, *_args: Any) -> None:
        with guard("trace the next steps"):
            if self._profiler is None:
                self._begin()
            elif threading.get_ident() == self._thread:  # another thread's optimizer cannot stop it, so it does not count
                self._left -= 1
                if self._left <= 0 or not self._wanted:
                    self._end()

    def _begin(self) -> None:
        import torch

        profiler = torch.profiler.profile(record_shapes=True)
        try:
            profiler.start()
        except RuntimeError as error:
            self._handle.remove()
            notices.once("trace", f"no trace could be started: {error}. Training goes on. Ask again when no other profiler runs.")
            return
        self._profiler, self._thread = profiler, threading.get_ident()

    def _end(self) -> None:
        profiler, self._profiler = self._profiler, None
        self._handle.remove()
        profiler.stop()
        if self._wanted:
            self._done(profiler)

    def stop(self) -> None:
        """Leave nothing on; a profiler that another thread started ends with that thread's next step."""
        self._wanted = False
        if self._profiler is None:
            self._handle.remove()
        elif threading.get_ident() == self._thread:
            with guard("stop a trace"):
                self._end()
