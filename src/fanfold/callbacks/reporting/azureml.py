"""Azure Machine Learning's reporting callback: the metrics of the job this process is in, under the names they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...trackers.azureml import AzureMLTracker
from ..tracking import TrackingCallback


class AzureMLCallback(TrackingCallback):
    """Log to `azureml_run`, or to the run of the job this process is part of. The job's status is the platform's to set."""

    system: ClassVar[str] = "azure_ml"
    ends_with_training: ClassVar[bool] = False

    def __init__(self, azureml_run: Any = None) -> None:
        super().__init__()
        self._given = azureml_run

    @property
    def azureml_run(self) -> Any:
        """The run, once it is known."""
        return getattr(self.tracker, "azureml_run", None) or self._given

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        del control
        self._ready(args, state, model, **kwargs)

    def make(self, args: Any, state: Any) -> Any:
        del args, state
        return AzureMLTracker("", azureml_run=self._given)

    def keep(self, args: Any, state: Any, model: Any) -> None:
        """Leave the job's own record as it is: the platform keeps what a job was started with."""

    def rewrite(self, logs: Mapping[str, Any], state: Any) -> dict[str, Any]:
        del state
        return dict(logs)

    def end(self, status: str) -> None:
        """Only hand over what is still on its way: the script may go on after training."""
        self.tracker.settle()
