"""What the kernel sees of a process: CPU time of it and of its children, bytes read and written, and how it ended."""

from __future__ import annotations

import contextlib
import os
import struct
from pathlib import Path

from ..process import stat_of

TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
MAX_CHILDREN = 256
# struct pidfd_info of Linux 6.15 and later: mask, cgroup, eleven ids, exit status. The request is _IOWR(0xFF, 11) of its size.
_INFO = struct.Struct("QQ11Ii")
_GET_INFO, _WANTED_EXIT, _EXIT_FIELD = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11, 1 << 3, 49


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process, without its children."""
    fields = stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS if len(fields) > 12 else 0.0


def bytes_moved(pid: int) -> int:
    """Return how many bytes a process has read and written."""
    try:
        text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
    except OSError:
        return 0
    values = dict(line.split(": ") for line in text.splitlines() if ": " in line)
    return int(values.get("rchar", 0)) + int(values.get("wchar", 0))


def children_of(pid: int) -> list[int]:
    """Return the processes below a process, except fanfold's own helpers."""
    found: list[int] = []
    ahead = [pid]
    while ahead and len(found) < MAX_CHILDREN:
        for child in _direct(ahead.pop()):
            if not _is_ours(child):
                found.append(child)
                ahead.append(child)
    return found


def _direct(pid: int) -> list[int]:
    try:
        texts = [(thread / "children").read_text(encoding="ascii") for thread in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(word) for text in texts for word in text.split()]


def _is_ours(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return True  # gone
    return b"-m" in words and any(word.startswith(b"fanfold") for word in words)


def thread_state(pid: int, thread: int) -> str:
    """Return the state of a thread: R (runs or wants to), S (sleeps), D (waits for a disk), T (stopped), or ""."""
    try:
        text = Path(f"/proc/{pid}/task/{thread}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return next(iter(text.rpartition(")")[2].split()), "")


def catches(pid: int, number: int) -> bool:
    """Return whether a process handles a signal."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    mask = next((line.split()[1] for line in text.splitlines() if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)


def cpu_of_all(pid: int) -> float:
    """Return the CPU seconds of a process and of those below it."""
    return cpu_of(pid) + sum(map(cpu_of, children_of(pid)))


def descriptor_of(pid: int) -> int:
    """Return a descriptor that becomes readable when a process ends; -1 if the system has none, or the process is gone."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def exit_status(pid: int, descriptor: int) -> int | None:
    """Return the status of a process that has ended, in the form of waitpid(); None if the kernel no longer tells it."""
    with contextlib.suppress(OSError, ImportError):
        import fcntl

        answer = bytearray(_INFO.pack(_WANTED_EXIT, *[0] * 13))
        fcntl.ioctl(descriptor, _GET_INFO, answer)
        mask, *_, status = _INFO.unpack(answer)
        if mask & _WANTED_EXIT:
            return int(status)
    fields = stat_of(pid)  # until its parent has asked for it
    return int(fields[_EXIT_FIELD]) if len(fields) > _EXIT_FIELD and fields[0] == "Z" else None
