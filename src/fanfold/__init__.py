"""Fan out to every tracker, fold over every rank.

One `log()` call, from any process of a training job, reaches every tracker the team uses. Importing does nothing: each
name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from ._api import (
        alert,
        artifact,
        config,
        define_metric,
        finish,
        flush,
        init,
        log,
        run,
        summary,
    )
    from ._run import Run
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
    from .process import is_main_process, on_main_process
    from .store import StoredRun, open, runs

_HOMES = {
    "_api": ("alert", "artifact", "config", "define_metric", "finish", "flush", "init", "log", "run", "summary"),
    "_run": ("Run",),
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
    "process": ("is_main_process", "on_main_process"),
    "store": ("StoredRun", "open", "runs"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_CURRENT = frozenset({"config", "run", "summary"})  # of the current run: looked up anew each time

__all__ = [
    "Audio",
    "FanfoldError",
    "Figure",
    "Histogram",
    "Html",
    "Image",
    "JournalError",
    "MissingExtra",
    "Run",
    "RunError",
    "RunNotFound",
    "SettingError",
    "StoredRun",
    "Table",
    "Text",
    "ValueRefused",
    "Video",
    "__version__",
    "alert",
    "artifact",
    "config",
    "define_metric",
    "finish",
    "flush",
    "init",
    "is_main_process",
    "log",
    "on_main_process",
    "open",
    "run",
    "runs",
    "summary",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'fanfold' has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{home}", __name__), name)
    if name not in _CURRENT:
        globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
