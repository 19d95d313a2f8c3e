"""The profile without the native part: torch.profiler switched on for one step of many. Dearer and coarser, but never nothing."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import guard, notices
from . import hooks, image, workers

_SCOPE_NAMES = {0: "forward", 1: "backward", 2: "torchscript", 7: "user"}


def bucket_of(nanoseconds: int) -> int:
    """Return the histogram bucket of a duration, as native/table.h has it."""
    if nanoseconds < 4:
        return max(nanoseconds, 0)
    exponent = nanoseconds.bit_length() - 1
    return min((exponent - 1) * 4 + ((nanoseconds >> (exponent - 2)) & 3), image.BUCKETS - 1)


class ProfilerWindows:
    """Profile `window` optimizer steps of each `every`, and add up what was seen."""

    def __init__(self, window: int, every: int, *, inputs: bool, rank: int, node: str, rows: int = image.MAX_ROWS) -> None:
        self.id = secrets.token_hex(8)
        self._inputs = inputs
        self._round, self._phase = -1, 0
        self._rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._profiler: Any = None
        self._unhook: Callable[[], None] | None = None
        self._facts: dict[str, Any] = {
            "id": self.id, "rank": rank, "node": node, "pid": os.getpid(), "every": every, "window": window, "worker": 0,
            "sampling": 0.0, "steps": 0, "observed": 0, "windows": 0, "seen_ns": 0, "overflow": 0, "started": time.time_ns(),
            "now": 0, "profiler": True, "capacity": rows,
        }  # fmt: skip

    def start(self) -> None:
        self._unhook = hooks.after_step(self._stepped)
        if self._due(1):
            self._open()

    def _due(self, step: int) -> bool:
        every = int(self._facts["every"])
        if (step - 1) // every != self._round:  # one phase for all would see what comes every so many steps each time or never
            self._round, self._phase = (step - 1) // every, secrets.randbelow(every)
        if step == 1:  # a program that never steps would be observed in full for good
            return bool(self._facts["window"] >= every)
        return step == 3 or (step + self._phase) % every < self._facts["window"]

    def _stepped(self) -> None:
        with guard("profile operators in a window"):
            self._facts["steps"] += 1
            due = self._due(self._facts["steps"] + 1)
            if self._profiler is None:
                if due:
                    self._open()
                return
            self._facts["observed"] += 1
            # Never close and open in one go: we are inside the optimizer's own range, whose end would be written into memory
            # of the profiler that is gone. So where every step is due, every other one is seen.
            if not due or self._facts["window"] >= self._facts["every"]:
                self._close()

    def _open(self) -> None:
        import torch
        from torch._C._profiler import _ExperimentalConfig

        if torch.autograd.profiler._is_profiler_enabled:  # noqa: SLF001 - torch would end the other one without a word
            notices.once(
                "ops profiler",
                "a profile window was left out: another profiler is on. The next is tried in its turn. Training goes on; "
                "with the native probe, both can be on.",
            )
            return
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            record_shapes=self._inputs,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),  # without it, one thread alone is seen
        )
        profiler.start()
        self._profiler = profiler
        self._facts["windows"] += 1

    def _close(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        with self._lock:
            events = list(profiler.events())
            stepping = next((event.thread for event in events if event.name.startswith("Optimizer.step#")), None)
            rows = [self._row(event, "main" if event.thread == stepping else "thread") for event in events]
            self._facts["overflow"] += workers.merge(self._rows, rows, room=self._facts["capacity"])

    def _row(self, event: Any, thread: str) -> dict[str, Any]:
        total, own = int(event.cpu_time_total * 1000), int(event.self_cpu_time_total * 1000)
        shapes = " ".join(str(shape) for shape in event.input_shapes or () if shape) if self._inputs else ""
        return {
            "op": event.name, "overload": "", "scope": _SCOPE_NAMES.get(event.scope, "forward"), "thread": thread, "label": "",
            "inputs": shapes, "all": False, "count": 1, "total_ns": total, "self_ns": own, "max_ns": total,
            "device_count": 0, "device_ns": 0, "hist": {bucket_of(total): 1},
        }  # fmt: skip

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            self._facts["now"] = time.time_ns()
            workers.say_full(self._facts)
            return {"id": self.id, "facts": dict(self._facts), "table": workers.pack_rows(list(self._rows.values()))}

    def stop(self) -> None:
        if self._unhook is not None:
            self._unhook()
        with guard("close a profile window"):
            self._close()

    def done(self) -> None:
        """Nothing is left behind."""
