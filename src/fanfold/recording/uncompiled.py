"""Protection of log() from torch.compile: in a compiled function it breaks the graph once and runs as plain Python.

If traced, our bookkeeping would be recompiled again and again, and the check for CUDA graph capture would run once, while
tracing, instead of on every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_functions: list[Any] = []


def uncompiled(function: F) -> F:
    """Mark a function so that torch.compile neither traces nor compiles it, nor anything it calls."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="fanfold records values as plain Python")
    _functions.append(function)
    return function


def skip_frames() -> None:
    """Make torch, once loaded, skip the frames of marked functions; the mark itself only prevents inlining."""
    if not _functions or "torch" not in sys.modules:
        return
    try:
        from torch._C._dynamo import eval_frame  # part of torch's core: imports nothing heavy

        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)  # noqa: SLF001
        while _functions:
            eval_frame.set_code_exec_strategy(_functions.pop().__code__, skip)
    except (ImportError, AttributeError):  # older torch: calls from compiled functions work, but are slow at first
        _functions.clear()
