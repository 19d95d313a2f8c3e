"""The profile without the native part: torch.profiler for one step out of many. More expensive and coarser, but a profile."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from ..errors import guard, notices
from . import op_table, profiler_session, step_hooks, worker_tables

_SCOPE_NAMES = {0: "forward", 1: "backward", 2: "torchscript", 7: "user"}
_ENGINE = "autograd::engine::evaluate_function"
IDLE_NS = 60_000_000_000  # without a step for this long, warn that the profile is empty


def bucket_of(nanoseconds: int) -> int:
    """Return the histogram bucket of a duration, as in native/table.h."""
    if nanoseconds < 4:
        return max(nanoseconds, 0)
    exponent = nanoseconds.bit_length() - 1
    return min((exponent - 1) * 4 + ((nanoseconds >> (exponent - 2)) & 3), op_table.BUCKETS - 1)


def _scope(event: Any) -> str:
    """Return the scope of a call. Calls made by a node of backward are backward, though torch marks only the node."""
    above = event if event.scope == 0 else None
    while above is not None:
        if above.scope == 1 or above.name.startswith(_ENGINE):
            return "backward"
        above = above.cpu_parent
    return _SCOPE_NAMES.get(event.scope, "forward")


class ProfilerWindows:
    """A counter that profiles `window` optimizer steps out of every `every`, and adds up the events."""

    def __init__(self, window: int, every: int, *, inputs: bool, rank: int, node: str, rows: int = op_table.MAX_ROWS) -> None:
        self.id = secrets.token_hex(8)
        self._inputs = inputs
        self._round, self._phase = -1, 0
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._session: profiler_session.ProfilerSession | None = None
        self._whole = 0  # steps in this window
        self._stepping: int | None = None  # torch's id of the thread that calls the optimizer
        self._unhook: Callable[[], None] | None = None
        self._facts: dict[str, Any] = {
            "id": self.id, "rank": rank, "node": node, "pid": os.getpid(), "every": every, "window": window, "worker": 0,
            "sampling": 0.0, "steps": 0, "observed": 0, "windows": 0, "seen_ns": 0, "overflow": 0, "started": time.time_ns(),
            "now": 0, "profiler": True, "capacity": rows,
        }  # fmt: skip

    def start(self) -> None:
        self._unhook = step_hooks.after_step(self._stepped)
        with profiler_session.ProfilerTurns.lock:
            if self._due(1):
                self._open()

    def _due(self, step: int) -> bool:
        every = int(self._facts["every"])
        if (step - 1) // every != self._round:  # a fixed phase would see periodic work always or never
            self._round, self._phase = (step - 1) // every, secrets.randbelow(every)
        if step == 1:  # a program that never steps would be profiled forever
            return bool(self._facts["window"] >= every)
        return step == 3 or (step + self._phase) % every < self._facts["window"]

    def _stepped(self) -> None:
        with guard("profile operators in a window"), profiler_session.ProfilerTurns.lock:
            self._facts["steps"] += 1
            due = self._due(self._facts["steps"] + 1)
            if self._session is None:
                if due:
                    self._open()
                return
            self._whole += 1
            # Never close and reopen here: we are inside the optimizer's own range, whose end would be written to the freed
            # memory of the closed session. So if every step is due, every other one is profiled.
            if not due or self._facts["window"] >= self._facts["every"]:
                self._session.end()

    def _open(self) -> None:
        import torch

        if why := profiler_session.hindrance():
            notices.once(
                "ops profiler",
                f"a profile window was left out: {why}. Later ones are tried in their turn. Training continues; the native probe "
                "has no such limits.",
            )
            return
        self._session = profiler_session.ProfilerSession(
            self._closed, activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=self._inputs
        )
        self._whole = 0

    def _closed(self, seen: profiler_session.ProfilerSession, early: bool) -> None:
        """Add up a window; one cut short by the program's own profiler holds a partial step, and is left out."""
        self._session = None
        if not seen.read() or early:
            return
        self._facts["windows"] += 1
        self._facts["observed"] += self._whole
        events = list(seen.profiler.events())
        # The step that ends a window is not among its events: then the thread is that of the previous window.
        self._stepping = next((event.thread for event in events if event.name.startswith("Optimizer.")), self._stepping)
        # A call of another thread that had not ended has no duration: torch gives it a negative one.
        over = [event for event in events if event.time_range.end >= event.time_range.start]
        rows = [self._row(event, "main" if event.thread == self._stepping else "thread") for event in over]
        self._facts["overflow"] += worker_tables.merge(self._rows, rows, room=self._facts["capacity"])

    def _row(self, event: Any, thread: str) -> dict[str, Any]:
        total = max(0, int(event.cpu_time_total * 1000))
        own = max(0, int(event.self_cpu_time_total * 1000))  # times are rounded: the parts may be longer than the whole
        shapes = " ".join(str(shape) for shape in event.input_shapes or () if shape) if self._inputs else ""
        return {
            "op": event.name, "overload": "", "scope": _scope(event), "thread": thread, "label": "",
            "inputs": shapes, "all": False, "count": 1, "total_ns": total, "self_ns": own, "own_ns": own, "max_ns": total,
            "device_count": 0, "device_ns": 0, "hist": {bucket_of(total): 1},
        }  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        with profiler_session.ProfilerTurns.lock:
            self._facts["now"] = time.time_ns()
            worker_tables.say_full(self._facts)
            if self._facts["now"] - self._facts["started"] > IDLE_NS:
                self._say_idle()
            return {"id": self.id, "facts": dict(self._facts), "table": worker_tables.pack_rows(list(self._rows.values()))}

    def stop(self) -> None:
        if self._unhook is not None:
            self._unhook()
        with guard("close a profile window"), profiler_session.ProfilerTurns.lock:
            if self._session is not None:
                self._session.end()
            self._say_idle()

    def _say_idle(self) -> None:
        if not self._facts["steps"] and not self._rows:
            notices.once(
                "ops no steps",
                "no optimizer has taken a step, and without the native probe only steps are profiled: the operator profile is "
                "empty. The program continues. See docs/operator-native.md for what the native probe needs.",
            )

    def done(self) -> None:
        """Do nothing: there is no file to delete."""
