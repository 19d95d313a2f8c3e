"""Which PyTorch APIs a process uses, once per key, and every model file it writes or reads. Collected natively, kept locally.

torch calls its usage handler inside initialisation locks, where a Python function could deadlock: the native library
collects, and Python comes to fetch. Nothing leaves the machine.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

from ..errors import notices, outcome
from . import op_table
from .native import library as native

MAX_PENDING, MAX_KEY = 4096, 512
_lock = threading.Lock()
_once: dict[str, str] = {}  # each key, and the run that has it
_pending: list[dict[str, Any]] = []
_watching = False


def watch() -> bool:
    """Collect usage from now on; earliest of all before `import torch`. False where the native library cannot serve."""
    global _watching  # noqa: PLW0603 - torch has one handler per process
    early = "torch" not in sys.modules
    if not _watching:
        try:
            _watching = bool(native.load().ff_usage_watch())
        except native.Unavailable:
            _watching = False
    if not early:  # its own announcement has passed unheard, or an earlier run has it; that it was imported is known all the same
        _note("torch.python.import")
    return _watching


def log_once(key: str, run: str = "") -> bool:
    """Say that an API was used; each key counts once per process and run. Returns whether it was the first time."""
    if type(key) is not str or key not in _once:  # library code calls this: whatever it is given, it must not raise
        text, _ = outcome(lambda: str(key))
        key = (type(key).__name__ if text is None else text).encode("utf-8", "replace").decode().replace("\0", " ")[:MAX_KEY]
    with _lock:
        last = _once.get(key)
        if last == run:
            return False
        natively = last is None and _watching and hasattr(sys.modules.get("torch"), "_C")  # torch passes each key on once
        room = bool(run) or natively or len(_pending) < MAX_PENDING  # a run comes for its keys at once
        if room:  # else the key is said anew the next time, when there may be a run
            _once[key] = run
    if not room:
        notices.once(
            "api usage",
            f"more than {MAX_PENDING} API keys wait for a run to write them. Further ones are not recorded until then. "
            "Start the run earlier, or use fewer keys: one for an API, not one for each call.",
        )
        return False
    if natively:
        sys.modules["torch"]._C._log_api_usage_once(key)  # noqa: SLF001 - torch offers it to libraries; others may listen as well
    else:
        _note(key)
    return True


def _note(key: str) -> None:
    with _lock:
        _pending.append({"key": key, "t": time.time_ns(), "data": {}})


def take() -> list[dict[str, Any]]:
    """Hand over what was collected since the last time."""
    with _lock:
        found, _pending[:] = list(_pending), []
    library = native.current()
    if library is None or not _watching:
        return found
    size = op_table.ROWS - op_table.USAGE
    buffer = ctypes.create_string_buffer(size)
    got = library.ff_usage_take(buffer, size)
    return found + op_table.usage_records(buffer.raw[: max(got, 0)])
