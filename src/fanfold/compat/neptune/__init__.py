"""The part of Neptune's client that training scripts use, on fanfold's verbs.

Write `import fanfold.compat.neptune as neptune` for `import neptune`. A series (`append`, `extend`) becomes a metric of its path;
an assigned value goes to the config below `parameters` and the like, and to the summary elsewhere; files become media or
artifacts. What has no counterpart warns once and says what to use. docs/neptune-compat.md lists it all.
"""

from __future__ import annotations

from typing import Any

from .client import Handler, Run, init_run
from .types import File
from .utils import stringify_unsupported

__all__ = ["File", "Handler", "NeptuneLogger", "Run", "init_run", "stringify_unsupported"]


def __getattr__(name: str) -> Any:
    if name == "NeptuneLogger":
        from .lightning import NeptuneLogger

        return NeptuneLogger
    if name in ("init", "init_project", "init_model", "init_model_version"):
        raise AttributeError(f"fanfold.compat.neptune has no {name}(), only runs. Use init_run(), and upload() for models.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
