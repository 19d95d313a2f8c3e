"""Reporting callbacks: send a Trainer's logs to tracking systems, under the names Transformers uses."""

from __future__ import annotations

import importlib
from typing import Any

from ..model_info import rewrite_logs
from .table import (
    HOME_OF,
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
    get_reporting_integration_callbacks,
)

__all__ = [
    "INTEGRATION_TO_CALLBACK",
    "AimCallback",
    "AzureMLCallback",
    "ClearMLCallback",
    "CodeCarbonCallback",
    "CometCallback",
    "DVCLiveCallback",
    "DagsHubCallback",
    "FlyteCallback",
    "KubeflowCallback",
    "MLflowCallback",
    "NeptuneCallback",
    "SwanLabCallback",
    "TensorBoardCallback",
    "TrackioCallback",
    "WandbCallback",
    "get_available_reporting_integrations",
    "get_reporting_integration_callbacks",
    "rewrite_logs",
]


def __getattr__(name: str) -> Any:
    if name in HOME_OF:
        return getattr(importlib.import_module(f".{HOME_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
