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

# Imported on first use; names of __all__ that are not listed here are in `reporting`.
_HOME_OF = {
    "ControlCallback": "tell",
    "NonFiniteCallback": "nonfinite",
    "NormsCallback": "norms",
    "PreemptionCallback": "preemption",
    "StragglerCallback": "stragglers",
    "ThroughputCallback": "throughput",
    "TrackingCallback": "tracking",
}
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
    "ControlCallback",
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
    if name in __all__:
        return getattr(importlib.import_module(f".{_HOME_OF.get(name, 'reporting')}", __name__), name)
    if name in _BORROWED:
        return getattr(importlib.import_module(_BORROWED[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
