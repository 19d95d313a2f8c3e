"""MLflow's reporting callback, and DagsHub's, which is the same with a repository's address.

MLflow's active run belongs to the Trainer's thread; logging names the run explicitly, so it works from any thread.
"""

from __future__ import annotations

import inspect
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from ...errors import SettingError, logger, outcome
from ...values import flatten
from ..model_info import configuration, truth, unstage
from ..report import Target
from ..tracking import TrackingCallback

_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


class MLflowCallback(TrackingCallback):
    """Log to the active MLflow run, or to a new one that ends with training; later evaluations still go there.

    `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`, `MLFLOW_TAGS`, `MLFLOW_NESTED_RUN` and `MLFLOW_RUN_ID` select the run,
    `MLFLOW_FLATTEN_PARAMS` and `MLFLOW_MAX_LOG_PARAMS` the params; `HF_MLFLOW_LOG_ARTIFACTS` uploads checkpoints.
    """

    system: ClassVar[str] = "mlflow"
    keeps_names: ClassVar[bool] = True
    ends_evaluations: ClassVar[bool] = True  # otherwise the active run would conflict with one of the user's

    def __init__(self) -> None:
        super().__init__()
        import mlflow

        self._ml_flow = mlflow
        self._log_artifacts = truth("HF_MLFLOW_LOG_ARTIFACTS")

    def destination(self, args: Any, state: Any) -> Target:
        self._log_artifacts = truth("HF_MLFLOW_LOG_ARTIFACTS")
        with _impatient():
            if (uri := os.environ.get("MLFLOW_TRACKING_URI")) and not self._ml_flow.is_tracking_uri_set():
                self._ml_flow.set_tracking_uri(uri)
            nested, wanted = truth("MLFLOW_NESTED_RUN"), os.environ.get("MLFLOW_RUN_ID")
            active = self._ml_flow.active_run()
            if active is not None and not nested and wanted in (None, active.info.run_id):
                return self._of(active, joined=True)
            run, error = outcome(self._start_run, args, nested)
        if error is None:
            return self._of(run)
        logger.debug("MLflow did not answer; the relay opens the run when it does", exc_info=error)
        return Target(self._class, self._place())

    def _start_run(self, args: Any, nested: bool) -> Any:
        """Start a run on the Trainer's thread, which makes it the active run there."""
        if name := os.environ.get("MLFLOW_EXPERIMENT_NAME"):
            self._ml_flow.set_experiment(name)
        return self._ml_flow.start_run(run_name=getattr(args, "run_name", None), nested=nested)

    def _of(self, run: Any, *, joined: bool = False) -> Target:
        return Target(self._class, {**self._place(), "run_id": run.info.run_id}, joined=joined, name=run.info.run_name)

    def _place(self) -> dict[str, Any]:
        first = next(iter(inspect.signature(self._class).parameters))  # the experiment, for both classes
        return {first: os.environ.get("MLFLOW_EXPERIMENT_NAME") or "Default", "tracking_uri": self._uri()}

    def _uri(self) -> str:
        return str(self._ml_flow.get_tracking_uri())

    def current(self) -> Target | None:
        run = self._ml_flow.active_run()
        return None if run is None else self._of(run, joined=True)

    def config(self, args: Any, model: Any) -> dict[str, Any]:
        return _params(configuration(args, model, peft=False))

    def opened(self, args: Any, state: Any, model: Any) -> None:
        client = self._ml_flow.MlflowClient(tracking_uri=self._uri())
        for key, value in json.loads(os.environ.get("MLFLOW_TAGS") or "{}").items():
            client.set_tag(self.tracker.tracker.info.run_id, key, value)

    def checkpoint_saved(self, args: Any, state: Any) -> None:
        if self._log_artifacts:
            self._upload_later(self._keep_checkpoint, args, state)

    def _keep_checkpoint(self, folder: Path) -> None:
        """Upload a checkpoint as a pyfunc model under its name; saved first and then sent, which needs no active run."""
        with tempfile.TemporaryDirectory() as place:
            self._ml_flow.pyfunc.save_model(
                f"{place}/model",
                artifacts={"model_path": str(folder)},
                python_model=self._ml_flow.pyfunc.PythonModel(),
                pip_requirements=[],
            )
            client = self._ml_flow.MlflowClient(tracking_uri=self._uri())
            client.log_artifacts(self.tracker.tracker.info.run_id, f"{place}/model", artifact_path=folder.name)
        unstage(folder)


class DagsHubCallback(MLflowCallback):
    """Log to the MLflow server of a DagsHub repository, named by `MLFLOW_TRACKING_URI` (`dagshub.init()` sets it).

    `HF_DAGSHUB_LOG_ARTIFACTS` uploads `output_dir` at the end, to the folder `artifacts` of the branch `BRANCH` ("main").
    """

    system: ClassVar[str] = "dagshub"

    def destination(self, args: Any, state: Any) -> Target:
        self.log_artifacts = truth("HF_DAGSHUB_LOG_ARTIFACTS")
        self.remote = os.environ.get("MLFLOW_TRACKING_URI")
        if not self.remote:
            raise SettingError(
                "DagsHubCallback requires the `MLFLOW_TRACKING_URI` environment variable to be set, so nothing goes to DagsHub. "
                "Did you run `dagshub.init()`?"
            )
        return super().destination(args, state)

    def _uri(self) -> str:
        return str(self.remote)

    def training_ended(self, args: Any, state: Any, **kwargs: Any) -> None:
        if self.log_artifacts:
            self.later(self._upload, Path(args.output_dir))

    def _upload(self, folder: Path) -> None:
        from dagshub.upload import Repo

        assert self.remote is not None
        *_, owner, name = self.remote.rstrip("/").split("/")
        repository = Repo(owner, name.removesuffix(".mlflow"), branch=os.environ.get("BRANCH") or "main")
        repository.directory("artifacts").add_dir(str(folder))


def _params(config: dict[str, Any]) -> dict[str, Any]:
    """Return params as the environment requests: nested ones as text or flattened, and limited in number."""
    if truth("MLFLOW_FLATTEN_PARAMS"):
        found = {key.replace("/", "."): value for key, value in flatten(config)}
    else:
        found = {key: str(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    most = os.environ.get("MLFLOW_MAX_LOG_PARAMS", "")
    return dict(list(found.items())[: int(most)]) if most.isdigit() else found


@contextmanager
def _impatient() -> Iterator[None]:
    """Wait only seconds for a server at the start, where MLflow would wait four minutes and delay training."""
    mine = {key: value for key, value in _PATIENCE.items() if key not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for key in mine:
            os.environ.pop(key, None)
