"""Azure Machine Learning's reporting callback: metrics of the job this process belongs to, under their own names."""

from __future__ import annotations

from typing import Any, ClassVar

from ...trackers.azureml import AzureMLTracker
from ..report import Target
from ..tracking import TrackingCallback


class AzureMLCallback(TrackingCallback):
    """Log to `azureml_run`, or to the current job's run. The job's status is left to the platform."""

    system: ClassVar[str] = "azure_ml"
    ends_with_training: ClassVar[bool] = False
    keeps_names: ClassVar[bool] = True
    keeps_config: ClassVar[bool] = False  # the platform records a job's arguments

    def __init__(self, azureml_run: Any = None) -> None:
        super().__init__()
        self._given = azureml_run

    @property
    def azureml_run(self) -> Any:
        """The run, once it is known."""
        return getattr(self.tracker, "azureml_run", None) or self._given

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._given is None and state.is_world_process_zero:
            from azureml.core.run import Run

            self._given = Run.get_context()

    def destination(self, args: Any, state: Any) -> Target:
        return Target(AzureMLTracker, {"run_name": "job"}, {"azureml_run": self._given}, joined=True)
