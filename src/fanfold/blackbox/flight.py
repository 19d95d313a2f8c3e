"""PyTorch's flight recorder: which collectives a process has started and not finished. Its JSON form only, never its pickles."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import outcome

BUFFER = "TORCH_FR_BUFFER_SIZE"
OLD_BUFFER = "TORCH_NCCL_TRACE_BUFFER_SIZE"  # before torch 2.9
DUMP, OLD_DUMP = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
ENTRIES = "2000"
FILE = "flight-recorder-rank"
MAX_ACTIVE, MAX_RECENT, MAX_TENSORS = 8, 100, 8


def turn_on(folder: Path) -> None:
    """Give the recorder a buffer, and torch's own dump at a timeout of NCCL a place in the run, unless the user chose them.

    Both are for process groups created later. torch appends the rank to the file's name; fanfold never reads it.
    """
    if BUFFER not in os.environ and OLD_BUFFER not in os.environ:
        os.environ[BUFFER] = ENTRIES
    before = os.environ.get(DUMP, "")
    if OLD_DUMP not in os.environ and (not before or before.endswith(FILE)):  # of an earlier run of this process
        os.environ[DUMP] = str(folder / FILE)


def _dump(*, active: bool) -> Mapping[str, Any]:
    """Return the recorder's content; empty without torch, a process group or a recorder."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not outcome(lambda: dist.is_available() and dist.is_initialized())[0]:
        return {}
    library = sys.modules.get("torch._C._distributed_c10d")
    calls = (getattr(library, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    found = (_called(call, active) for call in calls if call is not None)
    return next((one for one in found if one.get("entries") or one.get("pg_status")), {})


def _called(call: Callable[..., bytes], active: bool) -> Mapping[str, Any]:
    found, _ = outcome(lambda: json.loads(call(includeCollectives=True, onlyActive=active)))
    return found if isinstance(found, dict) else {}


def waiting() -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the collectives that have not finished, oldest first, and the last sequence number of each process group."""
    found = _dump(active=True)
    active = [_entry(one) for one in found.get("entries") or [] if not one.get("retired")]
    status = found.get("pg_status") or {}
    last = {str(group): int(one.get("last_enqueued_collective", -1)) for group, one in status.items()}
    return active[:MAX_ACTIVE], last


def recent() -> list[dict[str, Any]]:
    """Return the last collectives, oldest first."""
    return [_entry(one) for one in (_dump(active=False).get("entries") or [])[-MAX_RECENT:]]


def _entry(one: Mapping[str, Any]) -> dict[str, Any]:
    group = list(one.get("process_group") or ["?"])
    return {
        "group": str(one.get("process_group", ["?"])[0]),
        "group_name": str(group[-1]),
        "name": str(one.get("profiling_name") or "?"),
        "seq": int(one.get("p2p_seq_id" if one.get("is_p2p") else "collective_seq_id") or 0),
        "p2p": bool(one.get("is_p2p")),
        "sizes": [list(map(int, size)) for size in (one.get("input_sizes") or [])[:MAX_TENSORS]],
        "dtypes": [str(kind) for kind in (one.get("input_dtypes") or [])[:MAX_TENSORS]],
        "state": "done" if one.get("retired") else str(one.get("state") or "?"),
        "since": int(one.get("time_created_ns") or 0) / 1e9,
    }
