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
        self._stop: Callable[[], None] | None = None

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
        self._seen = token
        self.stop()
        with guard("trace the next steps"):
            self._stop = _trace(max(1, min(steps, MAX_STEPS)), lambda profiler: self._finish(profiler, token, steps))

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
        """Give up a trace that waits for steps."""
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def _trace(steps: int, done: Callable[[Any], None]) -> Callable[[], None]:
    """Hook the optimizers: start at the end of a step, stop `steps` later."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    profiler: Any = None
    left = steps

    def stepped(*_args: Any) -> None:
        nonlocal profiler, left
        with guard("trace the next steps"):
            if profiler is None:
                profiler = torch.profiler.profile(record_shapes=True)
                try:
                    profiler.start()
                except RuntimeError as error:
                    handle.remove()
                    notices.once(
                        "trace", f"no trace could be started: {error}. Training goes on. Ask again when no other profiler runs."
                    )
                return
            left -= 1
            if left <= 0:
                handle.remove()
                profiler.stop()
                done(profiler)

    handle = register_optimizer_step_post_hook(stepped)
    return handle.remove  # type: ignore[no-any-return]
