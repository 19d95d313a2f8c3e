"""Where a thread is in Python: its frames as plain data, a signature that stays the same while it waits, and slow activities."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ..facts.mask import mask_text

MAX_FRAMES, MAX_THREADS, MAX_LINE = 48, 64, 200
DEEPEST = 1000  # frames that are looked at
# Frames of these modules poll while they wait: only the frames that called them show whether a thread moves.
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_OURS = str(Path(__file__).parents[1]) + os.sep  # wrappers around data loaders and savers
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", "<string>", _OURS)
_WAITING = (f"{os.sep}torch{os.sep}utils{os.sep}data{os.sep}", f"{os.sep}torch{os.sep}multiprocessing{os.sep}")
# Activities that may stay on one line for minutes without being a hang, by how a function's name begins, or by its file.
_Words = tuple[tuple[str, tuple[str, ...]], ...]
_SLOW_NAMES: _Words = (
    ("saving", ("save", "checkpoint", "write_checkpoint")),
    ("evaluating", ("evaluate", "evaluation", "validate", "validation", "eval_")),
    ("loading", ("from_pretrained", "load_", "download", "restore")),
)
_SLOW_FILES: _Words = (
    ("compiling", ("/torch/_dynamo/", "/torch/_inductor/", "/triton/compiler/", "/torch/utils/cpp_extension")),
    ("saving", ("/torch/serialization.py", "/torch/distributed/checkpoint/", "/safetensors/")),
    ("importing", ("<frozen importlib",)),
)
_NOT_SLOW = ("/torch/utils/checkpoint.py",)  # activations, not files
_IDLE_FILES = ("/asyncio/base_events.py", "/ipykernel/", "/code.py", "/pdb.py", "/cmd.py", "/debugpy/", "/pydevd")
IDLE_FRAMES = 4  # innermost frames that show an event loop without work, or a person at a prompt
Signature = tuple[tuple[CodeType, int], ...]


def frame_of(thread: int) -> FrameType | None:
    """Return the innermost Python frame of a thread."""
    return sys._current_frames().get(thread)  # noqa: SLF001 - the documented way to see other threads


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def signature(frame: FrameType | None) -> Signature:
    """Return the lines a thread is on, without innermost frames of the standard library and of data loaders, which poll."""
    lines = [(one.f_code, one.f_lineno or 0) for one in _outward(frame)]
    start = next((at for at, (code, _) in enumerate(lines) if not _polls(code.co_filename)), 0)
    return tuple(lines[start:])


def _polls(file: str) -> bool:
    return (file.startswith(_STDLIB) and "site-packages" not in file) or any(part in file for part in _WAITING)


def slow_activity(frame: FrameType | None) -> str:
    """Return what a thread does that may take long on one line (saving, compiling, …); "" for anything else."""
    if frame is None:
        return "idle"  # at the prompt of an interpreter
    for depth, one in enumerate(_outward(frame)):
        file, name = one.f_code.co_filename.replace(os.sep, "/"), one.f_code.co_name.lower().lstrip("_")
        if depth < IDLE_FRAMES and any(part in file for part in _IDLE_FILES):
            return "idle"
        if any(part in file for part in _NOT_SLOW):
            continue
        for word, parts in _SLOW_FILES:
            if any(part in file for part in parts):
                return word
        for word, parts in _SLOW_NAMES:
            if name.startswith(parts):
                return word
    return ""


def spots(frame: FrameType | None, *, most: int = MAX_FRAMES) -> list[dict[str, Any]]:
    """Return a thread's frames as data, the innermost first.

    If libraries have called each other more than `most` deep, the last one is the innermost of the program itself.
    """
    frames = list(itertools.islice(_outward(frame), DEEPEST))
    own = next((depth for depth, one in enumerate(frames) if not in_library(one.f_code.co_filename)), 0)
    return [_spot(one) for one in (frames[:most] if own < most else [*frames[: most - 1], frames[own]])]


def _spot(frame: FrameType) -> dict[str, Any]:
    file, number = frame.f_code.co_filename, frame.f_lineno or 0  # None between two lines
    return {"file": file, "line": number, "name": frame.f_code.co_name, "code": line_text(file, number)}


def in_library(file: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to us."""
    return any(part in file for part in _LIBRARIES)


@functools.lru_cache(maxsize=4096)
def line_text(file: str, line: int) -> str:
    """Return a line of a source file, masked and without its indentation; "" if there is none."""
    return mask_text(linecache.getline(file, line).strip()[:MAX_LINE], code=True)


def all_threads() -> list[dict[str, Any]]:
    """Return every Python thread of this process with its frames."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = list(sys._current_frames().items())[:MAX_THREADS]  # noqa: SLF001 - the documented way to see other threads
    return [{"id": ident, "name": names.get(ident, ""), "frames": spots(frame)} for ident, frame in frames]
