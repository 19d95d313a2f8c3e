"""XGBoost: a callback that records training in a run, with `xgboost.train`, `xgboost.cv` and the scikit-learn estimators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..errors import guard, needed
from ..media import Table
from ._boosting import number, scores
from ._session import TrainingSession

with needed("xgboost", "xgboost", "fanfold.frameworks.xgboost"):
    import xgboost

__all__ = ["FanfoldCallback"]


class FanfoldCallback(xgboost.callback.TrainingCallback):  # type: ignore[misc]  # xgboost may be installed without types
    """Record boosting rounds in a run. Arguments are those of fanfold.init(), or `run`, your own run.

    Each round logs the metrics of every evaluation set, as `validation/rmse`; of `cv` also their spread, as
    `validation/rmse/std`. The end adds the best round and a table of how much each feature matters.
    """

    def __init__(self, project: str | None = None, *, run: Any = None, **options: Any) -> None:
        super().__init__()
        self._session = TrainingSession(project, run, **options)

    @property
    def run(self) -> Any:
        """The run, once training has begun."""
        return self._session.run

    def before_training(self, model: Any) -> Any:
        config: dict[str, Any] = {}
        with guard("read the parameters of an XGBoost model"):
            config = _config(model)
        self._session.begin(config=config)
        return model

    def after_iteration(self, model: Any, epoch: int, evals_log: Mapping[str, Mapping[str, list[Any]]]) -> bool:
        values: dict[str, float] = {}
        for data, metrics in evals_log.items():
            for name, history in metrics.items():
                values.update(scores(f"{data}/{name}", history[-1]))
        self._session.run.log(values, step=epoch)
        return False

    def after_training(self, model: Any) -> Any:
        with guard("record the end of an XGBoost training"):
            self._end(model)
        self._session.end()
        return model

    def _end(self, model: Any) -> None:
        run = self._session.run
        attributes = model.attributes() if hasattr(model, "attributes") else {}
        run.summary.update({name: number(attributes[name]) for name in ("best_iteration", "best_score") if name in attributes})
        gain = model.get_score(importance_type="gain") if hasattr(model, "get_score") else {}
        if gain:
            rows = sorted(([name, float(value)] for name, value in gain.items()), key=lambda row: -row[1])
            run.log({"feature importance": Table(columns=["feature", "gain"], data=rows)})


def _config(model: Any) -> dict[str, Any]:
    """Return the objective and the parameters of the trees; `cv` has a model per fold, which hide theirs."""
    if not hasattr(model, "save_config"):
        return {}
    learner = json.loads(model.save_config())["learner"]
    trees = learner.get("gradient_booster", {}).get("tree_train_param", {})
    return {"objective": learner.get("objective", {}).get("name"), **{name: number(value) for name, value in trees.items()}}
