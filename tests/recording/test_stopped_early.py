"""A trial that a tuner ended on purpose is not a failure: Optuna, Ray Tune, generators; real ones are."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

import fanfold


def start(runs_dir, **options):
    return fanfold.init("p", dir=runs_dir, quiet=True, system=False, **options)


def script(code, runs_dir):
    return subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "FANFOLD_DIR": str(runs_dir), "FANFOLD_SYSTEM": "0",
                               "RAY_raylet_start_wait_time_s": "120"})  # fmt: skip


def test_a_pruned_optuna_trial_is_finished_and_says_why(runs_dir):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial):
        with start(runs_dir, id=f"trial-{trial.number}") as run:
            for step in range(5):
                run.log({"loss": 1.0 + trial.number}, step=step)
                trial.report(1.0 + trial.number, step)
                if trial.number == 1 and step == 2:
                    raise optuna.TrialPruned(f"worse at step {step}")
                if trial.number == 2:
                    raise ValueError("a bug")
        return 1.0

    study = optuna.create_study()
    study.optimize(objective, n_trials=3, catch=ValueError)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "FAIL"]
    found = [fanfold.open(f"trial-{number}", dir=runs_dir) for number in range(3)]
    assert [run.status for run in found] == ["finished", "finished", "failed"]
    assert found[0].verdict["reason"] is None and found[0].error is None
    assert found[1].verdict["reason"] == "stopped early by optuna.exceptions.TrialPruned: worse at step 2"
    assert found[1].error is None and len(found[1].series("loss")) == 3
    assert "ValueError: a bug" in found[2].error


def test_show_tells_why_a_finished_run_stopped_early(runs_dir):
    import optuna

    with pytest.raises(optuna.TrialPruned), start(runs_dir, id="pruned"):
        raise optuna.TrialPruned("plateau")
    shown = subprocess.run([sys.executable, "-m", "fanfold", "show", "pruned"], capture_output=True, text=True, timeout=60)
    assert "stopped early by optuna.exceptions.TrialPruned: plateau" in shown.stdout
    told = subprocess.run(
        [sys.executable, "-m", "fanfold", "show", "pruned", "--json"], capture_output=True, text=True, timeout=60
    )
    assert json.loads(told.stdout)["status"] == "finished"
    listed = subprocess.run([sys.executable, "-m", "fanfold", "ls"], capture_output=True, text=True, timeout=60)
    assert "stopped early by optuna.exceptions.TrialPruned: plateau" in listed.stdout


def test_a_subclass_of_trial_pruned_counts_but_not_a_namesake(runs_dir):
    import optuna

    class Worse(optuna.TrialPruned):
        pass

    class TrialPruned(Exception):
        pass

    for error, status in ((Worse(), "finished"), (TrialPruned(), "failed"), (StopIteration(), "failed")):
        with pytest.raises(type(error)), start(runs_dir) as run:
            raise error
        assert fanfold.open(run.path).status == status


def test_a_generator_that_nobody_asks_any_more_leaves_a_finished_run(runs_dir):
    def trial():
        with start(runs_dir, id="generator") as run:
            for step in range(10):
                run.log({"x": step}, step=step)
                yield step

    steps = trial()
    assert [next(steps), next(steps)] == [0, 1]
    steps.close()
    assert fanfold.open("generator", dir=runs_dir).status == "finished"


def test_a_script_that_ends_by_trial_pruned_keeps_its_exit_code(runs_dir):
    code = """
        import fanfold, optuna
        fanfold.init("p", id="left").log({"x": 1.0})
        raise optuna.TrialPruned("enough")
    """
    done = script(code, runs_dir)
    assert done.returncode == 1 and "TrialPruned: enough" in done.stderr
    run = fanfold.open("left", dir=runs_dir)
    assert (run.status, run.verdict["reason"]) == ("finished", "stopped early by optuna.exceptions.TrialPruned: enough")


@pytest.mark.timeout(900)  # Ray alone takes minutes to start on a busy machine
def test_a_trial_that_ray_tune_stops_is_finished(runs_dir, tmp_path):
    code = f"""
        import time, fanfold, ray
        from ray import tune

        def trainable(config):
            with fanfold.init("p", id=f"ray-{{config['x']}}") as run:
                for step in range(1000):
                    run.log({{"loss": 1.0 * step}}, step=step)
                    tune.report({{"loss": 1.0 * step}})

        class Patience(tune.Callback):  # Ray kills trials that take over 5 s to stop at the end, as on a busy machine
            def on_step_end(self, iteration, trials, **info):
                until = time.monotonic() + 60
                while all(trial.is_finished() for trial in trials) and time.monotonic() < until:
                    if all(run.status != "running" for run in fanfold.runs()):
                        break
                    time.sleep(0.1)

        for chance in range(4):  # Ray gives its own processes 30 s to start, which is too little on a busy machine
            try:
                ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
                break
            except Exception as error:
                if "timed out during startup" not in str(error) or chance == 3: raise
                ray.shutdown()
        tuner = tune.Tuner(trainable, param_space={{"x": tune.grid_search([0, 1])}},
                           run_config=tune.RunConfig(stop={{"training_iteration": 4}}, storage_path={str(tmp_path / "ray")!r}, verbose=0,
                                                     callbacks=[Patience()]))
        print("errors", tuner.fit().num_errors)
        ray.shutdown()
    """
    done = script(code, runs_dir)
    assert "errors 0" in done.stdout, done.stderr[-2000:]
    found = [fanfold.open(f"ray-{number}", dir=runs_dir) for number in range(2)]
    assert [run.status for run in found] == ["finished", "finished"]
    assert all(4 <= len(run.series("loss")) < 1000 for run in found)
