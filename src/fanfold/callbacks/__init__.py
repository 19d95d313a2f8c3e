"""Callbacks: observe and steer a training loop. Drop-in replacement for `transformers.trainer_callback`."""

from __future__ import annotations

import importlib
from typing import Any

from .control import ExportableState, TrainerControl
from .early_stopping import EarlyStoppingCallback
from .events import Event, TrainerCallback, logger
from .failure import CallbackError
from .flow import DefaultFlowCallback
from .handler import CallbackHandler
from .progress import PrinterCallback, ProgressCallback
from .state import TrainerState

_HOMES: dict[str, tuple[str, ...]] = {
    "nonfinite": ("NonFiniteCallback",),
    "norms": ("NormsCallback",),
    "preemption": ("PreemptionCallback",),
    "reporting": (
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
    ),
    "stragglers": ("StragglerCallback",),
    "throughput": ("ThroughputCallback",),
    "tracking": ("TrackingCallback",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
# Names that scripts import from Transformers' module although they are defined elsewhere.
_BORROWED = {
    "IntervalStrategy": "transformers.trainer_utils",
    "SaveStrategy": "transformers.trainer_utils",
    "TrainingArguments": "transformers.training_args",
    "has_length": "transformers.trainer_utils",
    "tqdm": "tqdm.auto",
}

__all__ = [
    "AimCallback",
    "AzureMLCallback",
    "CallbackError",
    "CallbackHandler",
    "ClearMLCallback",
    "CodeCarbonCallback",
    "CometCallback",
    "DVCLiveCallback",
    "DagsHubCallback",
    "DefaultFlowCallback",
    "EarlyStoppingCallback",
    "Event",
    "ExportableState",
    "FlyteCallback",
    "KubeflowCallback",
    "MLflowCallback",
    "NeptuneCallback",
    "NonFiniteCallback",
    "NormsCallback",
    "PreemptionCallback",
    "PrinterCallback",
    "ProgressCallback",
    "StragglerCallback",
    "SwanLabCallback",
    "TensorBoardCallback",
    "ThroughputCallback",
    "TrackingCallback",
    "TrackioCallback",
    "TrainerCallback",
    "TrainerControl",
    "TrainerState",
    "WandbCallback",
    "get_available_reporting_integrations",
    "get_reporting_integration_callbacks",
    "logger",
    "rewrite_logs",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    if name in _BORROWED:
        return getattr(importlib.import_module(_BORROWED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
