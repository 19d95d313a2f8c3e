"""LightGBM: a callback that records training in a run, with `lightgbm.train`, `lightgbm.cv` and the scikit-learn estimators."""

from __future__ import annotations

from typing import Any

from ..errors import guard, needed
from ..media import Table
from ._boosting import scores
from ._session import TrainingSession

with needed("lightgbm", "lightgbm", "fanfold.frameworks.lightgbm"):
    import lightgbm  # noqa: F401  # only to say what is missing

__all__ = ["FanfoldCallback"]


class FanfoldCallback:
    """Record boosting rounds in a run. Arguments are those of fanfold.init(), or `run`, your own run.

    Each round logs the metrics of every evaluation set, as `valid_0/l2`; of `cv` also their spread, as `valid/l2/std`. The
    last round adds a table of how much each feature matters. Early stopping gives LightGBM's callbacks no last call: the
    best value is in the summary all the same.
    """

    order = 25  # before early_stopping (30), which ends a training by an exception
    before_iteration = False

    def __init__(self, project: str | None = None, *, run: Any = None, **options: Any) -> None:
        self._session = TrainingSession(project, run, **options)

    @property
    def run(self) -> Any:
        """The run, once training has begun."""
        return self._session.run

    def __call__(self, env: Any) -> None:
        """Log a round."""
        results = list(env.evaluation_result_list or ())
        if env.iteration == env.begin_iteration:
            self._begin(env, results)
        values: dict[str, float] = {}
        for data, name, value, _, *spread in results:
            values.update(scores(f"{data}/{name}", (value, *spread)))
        self._session.run.log(values, step=env.iteration)
        if env.iteration == env.end_iteration - 1:
            with guard("record the end of a LightGBM training"):
                self._end(env.model)

    def _begin(self, env: Any, results: list[Any]) -> None:
        run = self._session.begin(config={name: value for name, value in env.params.items() if not callable(value)})
        for data, name, _, higher, *_ in results:
            run.define_metric(f"{data}/{name}", summary="max" if higher else "min")

    def _end(self, model: Any) -> None:
        if hasattr(model, "feature_importance") and hasattr(model, "feature_name") and not hasattr(model, "boosters"):
            gain = zip(model.feature_name(), model.feature_importance("gain").tolist(), strict=True)
            rows = sorted(([name, value] for name, value in gain), key=lambda row: -row[1])
            self._session.run.log({"feature importance": Table(columns=["feature", "gain"], data=rows)})
        self._session.end()
