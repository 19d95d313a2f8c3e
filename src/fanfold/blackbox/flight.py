"""PyTorch's flight recorder: which collectives a process has started and not finished. Its JSON form only, never its pickles."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import outcome

BUFFER = "TORCH_FR_BUFFER_SIZE"
OLD_BUFFER = "TORCH_NCCL_TRACE_BUFFER_SIZE"  # before torch 2.9
DUMP, OLD_DUMP = "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"
ENTRIES = "2000"
FILE = "flight-recorder-rank"
MAX_ACTIVE, MAX_RECENT, MAX_TENSORS, MAX_MEMBERS = 8, 100, 8, 512


def turn_on(folder: Path) -> None:
    """Give the recorder a buffer, and torch's own dump at a timeout of NCCL a place in the run, unless the user chose them.

    Both are for process groups created later. torch appends the rank to the file's name; fanfold never reads it.
    """
    if BUFFER not in os.environ and OLD_BUFFER not in os.environ:
        os.environ[BUFFER] = ENTRIES
    before = os.environ.get(DUMP, "")
    if OLD_DUMP not in os.environ and (not before or before.endswith(FILE)):  # of an earlier run of this process
        os.environ[DUMP] = str(folder / FILE)


def _dumps(*, active: bool) -> list[Mapping[str, Any]]:
    """Return the content of each recorder: gloo and NCCL have one each. None without torch or a process group."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not outcome(lambda: dist.is_available() and dist.is_initialized())[0]:
        return []
    library = sys.modules.get("torch._C._distributed_c10d")
    calls = (getattr(library, name, None) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"))
    return [_called(call, active) for call in calls if call is not None]


def _called(call: Callable[..., bytes], active: bool) -> Mapping[str, Any]:
    found, _ = outcome(lambda: json.loads(call(includeCollectives=True, onlyActive=active)))
    return found if isinstance(found, dict) else {}


def waiting() -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the collectives that have not finished, oldest first, and the last sequence number of each process group."""
    dumps = _dumps(active=True)
    active = [_entry(one) for dump in dumps for one in dump.get("entries") or [] if not one.get("retired")]
    active.sort(key=lambda one: float(one["since"]))
    members = _members() if active else {}
    for one in active[:MAX_ACTIVE]:
        one["members"] = members.get(one["group"].partition("/")[2], [])
    return active[:MAX_ACTIVE], _enqueued(dumps)


def _members() -> dict[str, list[int]]:
    """Return the ranks of each process group that has not all of them. torch has no public list of a process's groups."""
    world: Any = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    groups, _ = outcome(lambda: {name: sorted(world.pg_group_ranks[group]) for group, name in list(world.pg_names.items())})
    everyone = max(map(len, groups.values()), default=0) if groups else 0
    return {name: ranks for name, ranks in (groups or {}).items() if len(ranks) < everyone and len(ranks) <= MAX_MEMBERS}


def recent() -> list[dict[str, Any]]:
    """Return the last collectives, oldest first."""
    found = [_entry(one) for dump in _dumps(active=False) for one in (dump.get("entries") or [])[-MAX_RECENT:]]
    return sorted(found, key=lambda one: float(one["since"]))[-MAX_RECENT:]


def _enqueued(dumps: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the last sequence number of each process group, by its name.

    A recorder gives groups numbers of its own, which differ between ranks. Only its entries have both number and name.
    """
    names = _names(dumps)
    status = [
        (place, str(number), one) for place, dump in enumerate(dumps) for number, one in (dump.get("pg_status") or {}).items()
    ]
    if any((place, number) not in names for place, number, _ in status):
        names |= _names(_dumps(active=False))
    return {
        names[place, number]: int(one.get("last_enqueued_collective", -1))
        for place, number, one in status
        if (place, number) in names
    }


def _names(dumps: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], str]:
    return {(place, str(one.get("pg_id"))): _group(one) for place, dump in enumerate(dumps) for one in dump.get("entries") or []}


def _group(one: Mapping[str, Any]) -> str:
    """Return the name of an entry's process group. Each backend of a group counts for itself."""
    backend = str(one.get("profiling_name") or "?").partition(":")[0]
    return f"{backend}/{(list(one.get('process_group') or []) or ['?'])[0]}"


def _entry(one: Mapping[str, Any]) -> dict[str, Any]:
    group = list(one.get("process_group") or ["?"])
    return {
        "group": _group(one),
        "group_name": str(group[0] if group[-1] == "undefined" else group[-1]),
        "name": str(one.get("profiling_name") or "?"),
        "seq": int(one.get("p2p_seq_id" if one.get("is_p2p") else "collective_seq_id") or 0),
        "p2p": bool(one.get("is_p2p")),
        "sizes": [list(map(int, size)) for size in (one.get("input_sizes") or [])[:MAX_TENSORS]],
        "dtypes": [str(kind) for kind in (one.get("input_dtypes") or [])[:MAX_TENSORS]],
        "state": "done" if one.get("retired") else str(one.get("state") or "?"),
        "since": int(one.get("time_created_ns") or 0) / 1e9,
    }
