"""Loop, Trainer and TrainingArguments: training with callbacks, in your own loop or a ready-made one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arguments import LoopArguments, TrainingArguments
    from .loop import Loop
    from .trainer import Trainer

_HOME_OF = {"Loop": "loop", "LoopArguments": "arguments", "Trainer": "trainer", "TrainingArguments": "arguments"}
__all__ = ["Loop", "LoopArguments", "Trainer", "TrainingArguments"]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
