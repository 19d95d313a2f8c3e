"""Optuna, Ray Tune and Hydra: real studies whose trials are runs."""

from __future__ import annotations

import re
import subprocess
import sys

import optuna
import pytest

import fanfold
from fanfold.frameworks.optuna import JournalPruner, StudyCallback, trial_run
from paths import DOCS

optuna.logging.set_verbosity(optuna.logging.WARNING)


def study_of(name: str = "search", **options) -> optuna.Study:
    return optuna.create_study(study_name=name, sampler=optuna.samplers.RandomSampler(seed=1), **options)


def train(trial: optuna.Trial, losses, *, reports: bool = True) -> float:
    with trial_run(trial, project="p", system=False) as run:
        trial.suggest_float("lr", 0.0, 1.0)
        for step, loss in enumerate(losses):
            run.log({"val/loss": loss}, step=step)
            if reports and trial.should_prune():
                raise optuna.TrialPruned
    return losses[-1]


def test_every_trial_is_a_run_of_the_group(runs_dir):
    study = study_of()
    study.optimize(lambda trial: train(trial, [1.0, trial.number]), n_trials=3)
    runs = {run.name: run for run in fanfold.runs("p")}
    assert sorted(runs) == ["search-0", "search-1", "search-2"]
    assert {run.group for run in runs.values()} == {"search"}
    assert [runs[f"search-{trial.number}"].config for trial in study.trials] == [trial.params for trial in study.trials]


def test_the_pruner_decides_by_what_the_journal_has(runs_dir):
    pruner = JournalPruner("val/loss", optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1))
    study = study_of(pruner=pruner)
    curves = [[1.0, 0.9, 0.8], [1.0, 0.8, 0.7], [9.0, 9.0, 9.0], [1.0, 0.1, 0.1]]
    study.optimize(lambda trial: train(trial, curves[trial.number]), n_trials=4, callbacks=[StudyCallback()])
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    assert study.trials[0].intermediate_values == {0: 1.0, 1: 0.9, 2: 0.8}
    pruned = fanfold.open("search-2")
    assert (pruned.status, pruned.tags, len(pruned.series("val/loss"))) == ("finished", ["pruned"], 2)
    assert "TrialPruned" in pruned.verdict["reason"]
    assert [run.name for run in fanfold.runs(filter="tag:best")] == ["search-3"]


def test_a_trial_may_train_in_another_process(runs_dir):
    child = "import fanfold, sys\nrun = fanfold.init('p', id=sys.argv[1], system=False)\n[run.log({'val/loss': 9.0}, step=s) for s in range(3)]"

    def objective(trial):
        if trial.number < 2:
            return train(trial, [1.0, 0.5, 0.2])
        run_id = f"trial-{trial.number}"
        subprocess.run([sys.executable, "-c", child, run_id], check=True)
        trial.set_user_attr("fanfold_run", str(runs_dir / "p" / run_id))
        if trial.should_prune():
            raise optuna.TrialPruned
        return 0.0

    study = study_of(pruner=JournalPruner("val/loss", optuna.pruners.MedianPruner(n_startup_trials=2)))
    study.optimize(objective, n_trials=3)
    assert study.trials[2].state.name == "PRUNED"
    assert study.trials[2].intermediate_values == {0: 9.0, 1: 9.0, 2: 9.0}


def test_the_callback_makes_runs_of_trials_that_have_none(runs_dir):
    def objective(trial):
        trial.report(5.0, 0)
        value = trial.suggest_float("x", 0.0, 1.0)
        if trial.number == 1:
            raise ValueError("no")
        return value

    study = study_of(direction="maximize")
    study.optimize(objective, n_trials=4, callbacks=[StudyCallback("p", metric="score")], catch=(ValueError,))
    runs = {run.name: run for run in fanfold.runs("p")}
    assert [runs[f"search-{n}"].status for n in range(4)] == ["finished", "failed", "finished", "finished"]
    assert runs["search-2"].summary["score"] == study.trials[2].value
    assert [run.name for run in runs.values() if "best" in run.tags] == [f"search-{study.best_trial.number}"]


def test_several_objectives_are_named(runs_dir):
    study = optuna.create_study(study_name="two", directions=["minimize", "maximize"])
    study.optimize(lambda trial: (1.0, trial.suggest_float("x", 0, 1)), n_trials=2, callbacks=[StudyCallback("p")])
    assert set(fanfold.open("two-0").summary) == {"value/0", "value/1"}


def test_a_run_that_disappears_does_not_stop_the_study(runs_dir, caplog):
    import shutil

    def objective(trial):
        value = train(trial, [1.0])
        shutil.rmtree(trial.user_attrs["fanfold_run"])
        return value

    study = study_of()
    study.optimize(objective, n_trials=2, callbacks=[StudyCallback()])
    assert len(study.trials) == 2
    assert "The study continues" in caplog.text


def block(number: int) -> str:
    return re.findall(r"^```py\n(.*?)^```", (DOCS / "searches.md").read_text(), re.DOTALL | re.MULTILINE)[number]


@pytest.mark.parametrize(("words", "lrs"), [([], [0.1]), (["-m", "lr=0.01,0.2"], [0.01, 0.2])])
def test_the_recipe_for_hydra_records_every_job(tmp_path, words, lrs):
    script = tmp_path / "train.py"
    script.write_text(block(1))
    subprocess.run([sys.executable, str(script), *words], cwd=tmp_path, check=True, capture_output=True)
    runs = fanfold.runs("search", dir=tmp_path / ".fanfold")
    assert sorted(run.config["lr"] for run in runs) == lrs
    assert len({run.group for run in runs}) == 1


def test_the_recipe_for_ray_tune_records_every_trial(tmp_path):
    script = tmp_path / "tune.py"
    script.write_text(block(0))
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    runs = fanfold.runs("search", dir=tmp_path / ".fanfold")
    assert sorted(run.config["lr"] for run in runs) == [0.01, 0.1]
    assert {(run.group, run.status, len(run.series("val/loss"))) for run in runs} == {("ray-search", "finished", 5)}
