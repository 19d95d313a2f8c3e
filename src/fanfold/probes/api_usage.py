"""The PyTorch APIs a process uses, once per key, and every model file it writes or reads. Collected natively, kept locally.

torch calls its usage handler while holding initialization locks, where a Python function could deadlock: so the native
library collects the records, and Python fetches them later. Nothing leaves the machine.
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
_once: dict[str, str] = {}  # each key, and the last run that recorded it
_pending: list[dict[str, Any]] = []
_watching = False


def watch() -> bool:
    """Start collecting usage, best before `import torch`; return False if the native library is not available."""
    global _watching  # noqa: PLW0603 - torch has one handler per process
    early = "torch" not in sys.modules
    if not _watching:
        try:
            _watching = bool(native.load().ff_usage_watch())
        except native.NativeUnavailable:
            _watching = False
    if not early:  # torch reported its import before we listened, or to an earlier run
        _note("torch.python.import")
    return _watching


def log_once(key: str, run: str = "") -> bool:
    """Record that an API was used, once per key, process and run; return whether this was the first time."""
    if type(key) is not str or key not in _once:  # called by library code: must not raise, whatever the key is
        text, _ = outcome(str, key)
        key = (type(key).__name__ if text is None else text).encode("utf-8", "replace").decode().replace("\0", " ")[:MAX_KEY]
    with _lock:
        last = _once.get(key)
        if last == run:
            return False
        natively = last is None and _watching and hasattr(sys.modules.get("torch"), "_C")  # torch reports each key only once
        room = bool(run) or natively or len(_pending) < MAX_PENDING  # a run fetches its keys at once
        if room:  # otherwise the key is tried again at its next use, when there may be a run
            _once[key] = run
    if not room:
        notices.once(
            "api usage",
            f"more than {MAX_PENDING} API keys wait for a run to write them. Further ones are not recorded until then. "
            "Start the run earlier, or use fewer keys: one for an API, not one for each call.",
        )
        return False
    if natively:
        sys.modules["torch"]._C._log_api_usage_once(key)  # noqa: SLF001 - meant for libraries; others may listen as well
    else:
        _note(key)
    return True


def _note(key: str) -> None:
    with _lock:
        _pending.append({"key": key, "t": time.time_ns(), "data": {}})


def take() -> list[dict[str, Any]]:
    """Return and clear the records collected since the last call."""
    with _lock:
        found, _pending[:] = list(_pending), []
    library = native.current()
    if library is None or not _watching:
        return found
    size = op_table.ROWS - op_table.USAGE
    buffer = ctypes.create_string_buffer(size)
    got = library.ff_usage_take(buffer, size)
    return found + op_table.usage_records(buffer.raw[: max(got, 0)])
