"""The available reporting callbacks, and the meaning of `report_to`: all, none, a name, or several."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterable
from typing import Any

from ...errors import SettingError
from ...trackers.registry import installed, without_setup
from ..model_info import TRUE

_HOMES = {
    "aim": ("aim", "AimCallback"),
    "azure_ml": ("azureml", "AzureMLCallback"),
    "clearml": ("clearml", "ClearMLCallback"),
    "codecarbon": ("codecarbon", "CodeCarbonCallback"),
    "comet_ml": ("comet", "CometCallback"),
    "dagshub": ("mlflow", "DagsHubCallback"),
    "dvclive": ("dvclive", "DVCLiveCallback"),
    "flyte": ("flyte", "FlyteCallback"),
    "kubeflow": ("kubeflow", "KubeflowCallback"),
    "mlflow": ("mlflow", "MLflowCallback"),
    "neptune": ("neptune", "NeptuneCallback"),
    "swanlab": ("swanlab", "SwanLabCallback"),
    "tensorboard": ("tensorboard", "TensorBoardCallback"),
    "trackio": ("trackio", "TrackioCallback"),
    "wandb": ("wandb", "WandbCallback"),
}
HOME_OF = {name: module for module, name in _HOMES.values()}
# The order in which "all" reports. A Deck belongs to a task, so Flyte is used only if named.
_ORDER = (
    "azure_ml", "comet_ml", "dagshub", "dvclive", "mlflow", "neptune", "tensorboard", "wandb", "codecarbon", "clearml",
    "swanlab", "trackio", "kubeflow", "aim",
)  # fmt: skip


class _Integrations(dict[str, Any]):
    """name → callback class, imported on first use; entries may be added or replaced."""

    def __missing__(self, name: str) -> Any:
        if name not in _HOMES:
            raise KeyError(name)
        module, cls = _HOMES[name]
        self[name] = found = getattr(importlib.import_module(f".{module}", __package__), cls)
        return found

    def names(self) -> list[str]:
        """Return all known names."""
        return sorted({*_HOMES, *self})


INTEGRATION_TO_CALLBACK = _Integrations()


def get_available_reporting_integrations() -> list[str]:
    """Return the names whose library is installed, in the order of "all"."""
    return [name for name in _ORDER if _installed(name)]


def _installed(name: str) -> bool:
    if name == "codecarbon":
        return importlib.util.find_spec("codecarbon") is not None
    if name == "kubeflow":  # not a library, but the environment of this process
        off = os.environ.get("DISABLE_KUBEFLOW_INTEGRATION", "").upper() in TRUE
        return bool(os.environ.get("KUBEFLOW_TRAINER_SERVER_URL")) and not off
    if name == "mlflow" and os.environ.get("DISABLE_MLFLOW_INTEGRATION", "").upper() in TRUE:
        return False
    if name == "azure_ml" and _installed("mlflow"):
        return False  # Azure itself recommends logging through MLflow
    return installed(name)


def get_reporting_integration_callbacks(report_to: Any) -> list[Any]:
    """Return the callback classes for "all", "none", None, a name or several; raise for unknown names and list the known."""
    names: list[str] = []
    for item in _listed(report_to):
        found = [] if item in (None, "none") else _usable() if str(item) == "all" else [_known(str(item))]
        names += [name for name in found if name not in names]
    return [INTEGRATION_TO_CALLBACK[name] for name in names]


def _listed(report_to: Any) -> Iterable[Any]:
    return report_to if isinstance(report_to, (list, tuple, set, frozenset)) else [report_to]


def _known(name: str) -> str:
    if name not in INTEGRATION_TO_CALLBACK.names():
        known = ", ".join(INTEGRATION_TO_CALLBACK.names())
        raise SettingError(f"{name} is not supported, only {known} are supported. Nothing was started; correct report_to.")
    return name


def _usable() -> list[str]:
    """Return the installed integrations that work without further setup; log one warning that names the others."""
    known: dict[str, str | None] = {"codecarbon": None, "kubeflow": None}
    if not os.environ.get("MLFLOW_TRACKING_URI", "").rstrip("/").endswith(".mlflow"):
        known["dagshub"] = "MLFLOW_TRACKING_URI names no repository: run `dagshub.init()`"
    found = without_setup(get_available_reporting_integrations(), "report_to='all'", known)
    return [name for name in found if not (name == "mlflow" and "dagshub" in found)]  # they use the same server
