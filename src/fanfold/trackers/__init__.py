"""Trackers: adapters to the systems teams use. Drop-in replacement for `accelerate.tracking`."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from ..errors import logger
from .base import Alert, GeneralTracker, Identity, Point, Refusal, Refused, on_main_process
from .destination import Destination, Item
from .face import Tracker
from .registry import (
    LOGGER_TYPE_TO_CLASS,
    TABLE,
    LoggerType,
    filter_trackers,
    get_available_trackers,
    installed,
    register_tracker_class,
)

_CLASSES = {row.cls: row.module for row in TABLE}
_CHECKS = {f"is_{row.name}_available": row.name for row in TABLE}

__all__ = [
    "LOGGER_TYPE_TO_CLASS",
    "AimTracker",
    "Alert",
    "AzureMLTracker",
    "ClearMLTracker",
    "CometMLTracker",
    "DVCLiveTracker",
    "DagsHubTracker",
    "Destination",
    "FlyteTracker",
    "GeneralTracker",
    "Identity",
    "Item",
    "LoggerType",
    "MLflowTracker",
    "NeptuneTracker",
    "Point",
    "Refusal",
    "Refused",
    "SwanLabTracker",
    "TensorBoardTracker",
    "Tracker",
    "TrackioTracker",
    "WandBTracker",
    "filter_trackers",
    "get_available_trackers",
    "logger",
    "on_main_process",
    "register_tracker_class",
]


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        return getattr(importlib.import_module(f".{_CLASSES[name]}", __name__), name)
    if name in _CHECKS:
        return functools.partial(installed, _CHECKS[name])
    if name == "_available_trackers":
        return get_available_trackers()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
