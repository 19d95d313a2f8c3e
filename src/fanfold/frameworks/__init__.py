"""Framework integrations, each in its own module, imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["accelerate", "keras", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
