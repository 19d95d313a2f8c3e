"""XGBoost, LightGBM, scikit-learn and Ignite record what they compute, in runs with config, metrics and an end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fanfold

RNG = np.random.default_rng(0)
X = RNG.normal(size=(300, 4))
Y = X[:, 0] * 3 + X[:, 1] + RNG.normal(size=300) * 0.1

JIT = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # ignite compiles a module when it is imported


@pytest.fixture(autouse=True)
def place(runs_dir: Path) -> None:
    pass


def test_xgboost_logs_every_round_and_which_features_matter():
    import xgboost

    from fanfold.frameworks.xgboost import FanfoldCallback

    data, held_out = xgboost.DMatrix(X[:200], Y[:200]), xgboost.DMatrix(X[200:], Y[200:])
    tracking = FanfoldCallback("trees", name="xgb", system=False)
    booster = xgboost.train({"max_depth": 2, "eta": 0.3}, data, 12, evals=[(data, "train"), (held_out, "held_out")],
                            early_stopping_rounds=50, callbacks=[tracking], verbose_eval=False)  # fmt: skip
    tracking.run.finish()
    run = fanfold.open("xgb")
    loss = run.series("held_out/rmse")
    assert loss.steps.tolist() == list(range(12))
    assert loss.values[-1] < loss.values[0]
    assert run.config["max_depth"] == 2
    assert run.config["objective"] == "reg:squarederror"
    assert run.summary["best_iteration"] == booster.best_iteration
    rows = run.table("feature importance").rows
    assert rows[0][0] == "f0"
    assert run.status == "finished"


def test_xgboost_cross_validation_and_estimators():
    import xgboost

    from fanfold.frameworks.xgboost import FanfoldCallback

    data = xgboost.DMatrix(X, Y)
    tracking = FanfoldCallback("trees", name="cv", system=False)
    xgboost.cv({"max_depth": 2}, data, 5, nfold=3, callbacks=[tracking])
    tracking.run.finish()
    run = fanfold.open("cv")
    assert {"train/rmse", "train/rmse/std", "test/rmse", "test/rmse/std"} <= set(run.keys("number"))
    with fanfold.init("trees", name="mine", system=False) as mine:  # a run of one's own is written to, and not ended
        xgboost.XGBRegressor(n_estimators=4, callbacks=[FanfoldCallback()]).fit(X, Y, eval_set=[(X, Y)], verbose=False)
        assert mine.status == "running"
    assert len(fanfold.open("mine").series("validation_0/rmse")) == 4


def test_lightgbm_logs_every_round_and_knows_which_way_is_better():
    import lightgbm

    from fanfold.frameworks.lightgbm import FanfoldCallback

    data = lightgbm.Dataset(X[:200], (Y[:200] > 0).astype(int))
    held_out = lightgbm.Dataset(X[200:], (Y[200:] > 0).astype(int), reference=data)
    tracking = FanfoldCallback("trees", name="lgb", system=False)
    options = {"objective": "binary", "metric": ["auc", "binary_logloss"], "num_leaves": 4, "verbose": -1, "num_threads": 1}
    lightgbm.train(options, data, 10, valid_sets=[held_out], valid_names=["held_out"], callbacks=[tracking])
    tracking.run.finish()
    run = fanfold.open("lgb")
    auc = run.series("held_out/auc").values
    assert len(auc) == 10
    assert run.summary["held_out/auc"] == auc.max()
    assert run.summary["held_out/binary_logloss"] == run.series("held_out/binary_logloss").values.min()
    assert run.config["num_leaves"] == 4
    assert run.table("feature importance").rows[0][0] == "Column_0"


def test_a_lightgbm_training_that_stops_early_is_recorded_to_its_last_round():
    import lightgbm

    from fanfold.frameworks.lightgbm import FanfoldCallback

    noise = lightgbm.Dataset(X[:100], RNG.normal(size=100))
    held_out = lightgbm.Dataset(X[100:], RNG.normal(size=200), reference=noise)
    tracking = FanfoldCallback("trees", name="early", system=False)
    booster = lightgbm.train({"verbose": -1, "num_threads": 1}, noise, 500, valid_sets=[held_out],
                             callbacks=[lightgbm.early_stopping(3, verbose=False), tracking])  # fmt: skip
    tracking.run.finish()
    assert len(fanfold.open("early").series("valid_0/l2")) == booster.best_iteration + 3


def test_a_search_of_scikit_learn_becomes_runs():
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GridSearchCV

    from fanfold.frameworks.sklearn import record_search

    search = GridSearchCV(Ridge(), {"alpha": [0.1, 1.0, 1000.0]}, cv=4).fit(X, Y)
    ids = record_search(search, "ridge")
    runs = [fanfold.open(one) for one in ids]
    assert [run.config["alpha"] for run in runs] == [0.1, 1.0, 1000.0]
    assert [run.tags == ["best"] for run in runs] == [place == search.best_index_ for place in range(3)]
    assert {run.group for run in runs} == {"Ridge"}
    assert runs[2].series("score").values.tolist() == [search.cv_results_[f"split{k}_test_score"][2] for k in range(4)]
    assert runs[0].summary["mean score"] == search.cv_results_["mean_test_score"][0]


@JIT
def test_ignite_logs_outputs_metrics_and_the_learning_rate():
    import torch
    from ignite.engine import Engine, Events
    from ignite.metrics import Average

    from fanfold.frameworks.ignite import FanfoldLogger

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def step(engine, batch):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    trainer = Engine(step)
    Average().attach(trainer, "mean loss")
    with FanfoldLogger("ignite", name="linear", system=False) as tracking:
        tracking.attach_output_handler(
            trainer, Events.ITERATION_COMPLETED, tag="train", output_transform=lambda loss: {"loss": loss}
        )
        tracking.attach_output_handler(
            trainer, Events.EPOCH_COMPLETED, tag="epoch", metric_names="all", state_attributes=["epoch"]
        )
        tracking.attach_opt_params_handler(trainer, Events.ITERATION_COMPLETED, optimizer=optimizer)
        trainer.run(torch.randn(10, 8, 4), max_epochs=2)
    run = fanfold.open("linear")
    assert run.series("train/loss").steps.tolist() == list(range(1, 21))
    assert run.series("epoch/mean loss").steps.tolist() == [1, 2]
    assert run.series("epoch/epoch").values.tolist() == [1, 2]
    assert set(run.series("lr/group_0").values.tolist()) == {0.05}
    assert run.status == "finished"


@JIT
def test_ignite_marks_a_training_that_raised():
    from fanfold.frameworks.ignite import FanfoldLogger

    with pytest.raises(ZeroDivisionError), FanfoldLogger("ignite", name="broken", system=False):
        raise ZeroDivisionError
    assert fanfold.open("broken").status == "failed"


@pytest.mark.parametrize(("module", "extra"), [("xgboost", "xgboost"), ("lightgbm", "lightgbm"), ("ignite", "ignite")])
def test_a_missing_library_names_its_extra(module, extra):
    code = f"import sys; sys.modules[{module!r}] = None; import fanfold.frameworks.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert f"pip install 'fanfold[{extra}]'" in done.stderr
