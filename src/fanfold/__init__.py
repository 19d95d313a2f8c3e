"""Fan out to every tracker, fold over every rank.

One `log()` call, from any process of a training job, reaches every tracker the team uses. Importing fanfold does nothing:
each name below is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from .errors import (
        FanfoldError,
        JournalError,
        MissingExtra,
        RunError,
        RunNotFound,
        SettingError,
        ValueRefused,
    )
    from .media import Audio, Figure, Histogram, Html, Image, Table, Text, Video
    from .notebook import ui
    from .probes.labels import label
    from .process import is_main_process, on_main_process
    from .provenance import inspect
    from .recording.api import (
        alert,
        artifact,
        config,
        define_metric,
        finish,
        flush,
        init,
        log,
        log_api_usage_once,
        run,
        stamp,
        summary,
    )
    from .recording.run import Run
    from .store import StoredRun
    from .stores import open as open
    from .stores import runs
    from .train import Loop, Trainer, TrainingArguments
    from .transfer.importing import import_runs

_HOMES = {
    "recording.api": (
        "alert",
        "artifact",
        "config",
        "define_metric",
        "finish",
        "flush",
        "init",
        "log",
        "log_api_usage_once",
        "run",
        "stamp",
        "summary",
    ),
    "recording.run": ("Run",),
    "errors": (
        "FanfoldError",
        "JournalError",
        "MissingExtra",
        "RunError",
        "RunNotFound",
        "SettingError",
        "ValueRefused",
    ),
    "media": ("Audio", "Figure", "Histogram", "Html", "Image", "Table", "Text", "Video"),
    "notebook": ("ui",),
    "probes.labels": ("label",),
    "process": ("is_main_process", "on_main_process"),
    "provenance": ("inspect",),
    "store": ("StoredRun",),
    "stores": ("open", "runs"),
    "train": ("Loop", "Trainer", "TrainingArguments"),
    "transfer.importing": ("import_runs",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_ROOMS = frozenset({"callbacks"})  # modules available without importing them first
_CURRENT = frozenset({"config", "run", "summary"})  # of the current run: looked up on every access
# Verbs of wandb that plain scripts call: they work after `import fanfold as wandb`, and are not listed among ours.
_WANDB = frozenset(
    "login Settings watch unwatch save Artifact log_artifact log_model plot log_code mark_preempting restore setup teardown "
    "use_artifact use_model link_model termlog termwarn termerror Api sweep agent controller Object3D Molecule Graph JoinedTable "
    "PartitionedTable AlertLevel Plotly link_artifact require".split()
)

# `open` is left out: `from fanfold import *` must not replace the built-in function.
__all__ = [
    "Audio",
    "FanfoldError",
    "Figure",
    "Histogram",
    "Html",
    "Image",
    "JournalError",
    "Loop",
    "MissingExtra",
    "Run",
    "RunError",
    "RunNotFound",
    "SettingError",
    "StoredRun",
    "Table",
    "Text",
    "Trainer",
    "TrainingArguments",
    "ValueRefused",
    "Video",
    "__version__",
    "alert",
    "artifact",
    "config",
    "define_metric",
    "finish",
    "flush",
    "import_runs",
    "init",
    "inspect",
    "is_main_process",
    "label",
    "log",
    "log_api_usage_once",
    "on_main_process",
    "run",
    "runs",
    "stamp",
    "summary",
    "ui",
]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    home = _HOME_OF.get(name)
    if name in _WANDB:
        return getattr(importlib.import_module(".recording.wandb", __name__), name)
    if home is None:
        raise AttributeError(f"module 'fanfold' has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{home}", __name__), name)
    if name not in _CURRENT:
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
