"""Keep torch.compile out of log(): inside a compiled function it breaks the graph once and runs as plain Python.

Traced, our own bookkeeping would be compiled again and again, and the test for a CUDA graph under capture would be made
once, while tracing, instead of at every call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_functions: list[Any] = []


def uncompiled(function: F) -> F:
    """Mark a function that torch.compile neither traces into nor compiles, nor anything it calls."""
    vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="fanfold records values as plain Python")
    _functions.append(function)
    return function


def skip_frames() -> None:
    """Tell torch, once it is loaded, to leave the frames of marked functions alone; the mark itself only stops inlining."""
    if not _functions or "torch" not in sys.modules:
        return
    try:
        from torch._C._dynamo import eval_frame  # a part of torch's core: nothing heavy is imported

        skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)  # noqa: SLF001
        while _functions:
            eval_frame.set_code_exec_strategy(_functions.pop().__code__, skip)
    except (ImportError, AttributeError):  # an older torch: calls from compiled functions are right, but slow at first
        _functions.clear()
