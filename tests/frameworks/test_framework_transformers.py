"""Our callback inside the real Transformers Trainer: one process and two, restarts, crashes, searches."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import threading
import traceback
from pathlib import Path

import optuna
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

import fanfold
import reporting_readers as readers
import warm_python
from fanfold.callbacks import TensorBoardCallback
from fanfold.frameworks import _session
from fanfold.frameworks.transformers import FOLD, FanfoldCallback, Pace
from paths import TESTS

SOURCE = str(Path(fanfold.__file__).parent)
DATA = [{"x": torch.tensor([i / 10, 1.0]), "labels": torch.tensor(i / 5)} for i in range(16)]


class TinyConfig(transformers.PretrainedConfig):
    model_type = "tiny"


class Tiny(transformers.PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config=None, bad_step=None, error=None):
        super().__init__(config or TinyConfig(width=2, api_key="sk-not-for-the-journal"))
        self.layer = torch.nn.Linear(2, 1)
        self.post_init()
        self.calls, self.bad_step, self.error = 0, bad_step, error or RuntimeError("a bad batch")

    def _init_weights(self, module):
        torch.nn.init.constant_(module.weight, 0.5)
        torch.nn.init.zeros_(module.bias)

    def forward(self, x, labels=None):
        self.calls += 1
        if self.calls == self.bad_step:
            raise self.error
        logits = self.layer(x).squeeze(-1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


@pytest.fixture(autouse=True)
def fresh(in_a_framework):
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


def arguments(**more):
    given = {
        "output_dir": "out", "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "save_strategy": "no",
        "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False, "report_to": "none",
    }  # fmt: skip
    return TrainingArguments(**{**given, **more})


def trainer(callback=None, model=None, **more):
    return Trainer(
        model=model or Tiny(), args=arguments(**more), train_dataset=DATA, eval_dataset=DATA[:4],
        callbacks=None if callback is None else [callback],
    )  # fmt: skip


def points(run, key, **how):
    series = fanfold.open(run.path).series(key, **how)
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def statuses(stored):
    return [attempt.verdict()["status"] for attempt in stored.attempts]


def child(code, tmp_path, *, launcher=(), check=True):
    """Run a script of a user, with this file's model and data to hand."""
    script = tmp_path / f"script{len(list(tmp_path.glob('script*')))}.py"
    script.write_text("from test_framework_transformers import *\n" + textwrap.dedent(code))
    source = os.pathsep.join(map(str, (Path(fanfold.__file__).parents[1], Path(__file__).parent, TESTS / "helpers")))
    done = warm_python.run(
        [sys.executable, *launcher, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=200, libraries="transformers",
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr
    return done


# One process


def test_training_evaluation_and_prediction_are_one_run(runs_dir):
    """report_to="fanfold" is all it takes, and what Trainer.log was given is what is read back."""
    job = trainer(report_to="fanfold", logging_steps=2, max_steps=5, eval_strategy="steps", eval_steps=3, seed=7, run_name="first",
                  project="tiny")  # fmt: skip
    job.train()
    job.evaluate()
    metrics = job.predict(DATA[:4]).metrics
    run = fanfold.run
    said = {}
    for entry in job.state.log_history:
        step = entry.pop("step")
        for key, value in entry.items():
            said.setdefault(f"eval/{key[5:]}" if key.startswith("eval_") else f"train/{key}", []).append((step, value))
    assert [step for step, _ in said["eval/loss"]] == [3, 5, 5]
    said["train/epoch"] = sorted(set(said["train/epoch"]))  # an evaluation repeats it
    assert {key: points(run, key) for key in said} == said
    assert points(run, "test/loss") == [(5, metrics["test_loss"])]
    stored = fanfold.open(run.path)
    assert (stored.name, stored.project, stored.status, stored.ranks) == ("first", "tiny", "running", [0])
    assert [item.id for item in fanfold.runs(dir=runs_dir)] == [run.id]
    fanfold.finish()
    assert fanfold.open(run.path).status == "finished"


def test_each_rank_has_its_own_loss_also_for_the_last_partial_interval():
    callback = FanfoldCallback()
    job = trainer(callback, logging_steps=2, max_steps=5)
    job.train()
    own = points(callback.run, "rank/loss")
    assert own[:2] == points(callback.run, "train/loss")
    assert [step for step, _ in own] == [2, 4, 5]
    assert own[2][1] == pytest.approx(job._tr_loss.item(), abs=0)
    keys = set(fanfold.open(callback.run.path).keys())
    assert keys >= set(FOLD)
    assert min(value for _, value in points(callback.run, "rank/memory_bytes")) > 1e6


def test_the_configuration_is_arguments_and_model_without_secrets(runs_dir):
    callback = FanfoldCallback("tiny", config=None)
    trainer(callback, hub_token="hf_abcdefghijklmnopqrstuvwxyz0123456789", learning_rate=0.25, max_steps=1).train()
    config = fanfold.open(callback.run.path).config
    assert (config["learning_rate"], config["model"]["model_type"], config["model"]["width"]) == (0.25, "tiny", 2)
    assert (config["parameters"], config["trainable_parameters"]) == (3, 3)
    written = b"".join(path.read_bytes() for path in callback.run.path.rglob("*") if path.is_file())
    assert b"sk-not-for-the-journal" not in written
    assert b"hf_abcdefg" not in written
    assert config["model"]["api_key"] == "***"


def test_an_evaluation_without_training_opens_a_run():
    callback = FanfoldCallback()
    metrics = trainer(callback).evaluate()
    assert points(callback.run, "eval/loss") == [(0, metrics["eval_loss"])]
    assert fanfold.open(callback.run.path).config["parameters"] == 3
    other = FanfoldCallback()  # another trainer's evaluation is another run, although that one is still open
    trainer(other).evaluate()
    assert (other.run.id != callback.run.id, callback.run.status) == (True, "running")


def test_a_second_training_is_a_second_run_and_finishes_the_first(runs_dir):
    callback = FanfoldCallback()
    job = trainer(callback, max_steps=2)
    job.train()
    first = callback.run
    job.train()
    assert callback.run.id != first.id
    assert {run.id: run.status for run in fanfold.runs(dir=runs_dir)} == {first.id: "finished", callback.run.id: "running"}
    other = FanfoldCallback()
    trainer(other, max_steps=2).train()
    assert fanfold.open(callback.run.path).status == "finished"
    job.evaluate()  # the run it belongs to has ended, and goes on
    stored = fanfold.open(callback.run.path)
    assert (stored.id, len(stored.attempts), len(fanfold.runs(dir=runs_dir))) == (callback.run.id, 2, 3)


def test_a_run_of_the_users_is_used_and_left_open(runs_dir):
    run = fanfold.init("mine", config={"note": "kept"})
    job = trainer(report_to="fanfold", max_steps=2)
    job.train()
    job.train()
    assert run.status == "running"
    assert [step for step, _ in points(run, "train/loss")] == [1, 1, 2, 2]
    config = fanfold.open(run.path).config
    assert (config["note"], config["max_steps"]) == ("kept", 2)
    run.finish()
    given = fanfold.init("mine", name="given")
    fanfold.init("mine", name="current")
    trainer(FanfoldCallback(run=given), max_steps=1).train()
    assert [step for step, _ in points(given, "train/loss")] == [1]
    given.finish()


def test_disabled_it_records_nothing_and_training_goes_through(runs_dir, monkeypatch):
    monkeypatch.setenv("FANFOLD_MODE", "disabled")
    job = trainer(report_to="fanfold", save_strategy="steps", save_steps=2)
    assert job.train().global_step == 4
    assert not runs_dir.exists()
    assert json.loads(Path("out/checkpoint-2/trainer_state.json").read_text())["stateful_callbacks"]["fanfold"] == {}


# Restarts


def test_training_from_a_checkpoint_goes_on_in_the_same_run_as_a_new_attempt(runs_dir):
    callback = FanfoldCallback("tiny")
    first = trainer(callback, save_strategy="steps", save_steps=2)
    first.train()
    before = dict(points(callback.run, "train/loss"))
    again = FanfoldCallback()  # not told the project: the checkpoint knows it
    second = trainer(again, save_strategy="steps", save_steps=2, max_steps=6)
    second.train(resume_from_checkpoint="out/checkpoint-2")
    stored = fanfold.open(again.run.path)
    assert (again.run.id, stored.project, len(stored.attempts), stored.attempts[0].verdict()["status"]) == (
        callback.run.id,
        "tiny",
        2,
        "finished",
    )
    losses = dict(points(again.run, "train/loss"))
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert (losses[1], losses[2]) == (before[1], before[2])
    assert {entry["step"]: entry["loss"] for entry in second.state.log_history if "loss" in entry} == losses


def test_a_report_to_tensorboard_goes_on_in_its_folder_after_a_resume(runs_dir):
    first = trainer(FanfoldCallback("tiny"), save_strategy="steps", save_steps=2)
    first.add_callback(TensorBoardCallback())
    first.train()
    (folder,) = Path("out/runs").iterdir()
    again = trainer(FanfoldCallback(), save_strategy="steps", save_steps=2, max_steps=6)
    again.add_callback(callback := TensorBoardCallback())
    again.train(resume_from_checkpoint="out/checkpoint-4")
    assert list(Path("out/runs").iterdir()) == [folder]
    assert Path(callback.logging_dir).resolve() == folder.resolve()
    assert [step for step, _ in readers.tensorboard(Path("out"))["train/loss"]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("how", [{"resume": "never"}, {"project": "other"}, {"id": "chosen"}])
def test_a_checkpoints_run_is_left_alone_where_the_user_says_so(how, runs_dir, caplog):
    trainer(FanfoldCallback("tiny"), save_strategy="steps", save_steps=2).train()
    again = FanfoldCallback(**how)
    trainer(again).train(resume_from_checkpoint="out/checkpoint-2")
    assert len(fanfold.runs(dir=runs_dir)) == 2
    assert again.run.id == how.get("id", again.run.id)
    assert ("belongs to run" in caplog.text) == ("project" in how)
    assert [step for step, _ in points(again.run, "train/loss")] == [3, 4]


@pytest.mark.parametrize("restore", [False, True])
def test_a_checkpoint_from_before_fanfold_can_be_resumed_and_saved_again(restore):
    trainer(save_strategy="steps", save_steps=2).train()
    callback = FanfoldCallback("later")
    more = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": restore}
    job = trainer(callback, **more)
    job.train(resume_from_checkpoint="out/checkpoint-2")
    assert callback in job.callback_handler.callbacks
    again = FanfoldCallback("later")
    job = trainer(again, **more, max_steps=5)
    job.train(resume_from_checkpoint="out/checkpoint-4")
    assert again in job.callback_handler.callbacks
    assert again.run.id == callback.run.id


def test_after_kill_9_the_next_process_goes_on_in_the_run_from_any_folder(tmp_path, monkeypatch):
    """No FANFOLD_DIR: the second process starts elsewhere and finds the run through the checkpoint alone."""
    monkeypatch.delenv("FANFOLD_DIR")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    died = child("""
        import signal
        class Kill(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
        os.chdir("a")
        job = trainer(FanfoldCallback("tiny"), output_dir=sys.path[0] + "/out", save_strategy="steps", save_steps=2, max_steps=6)
        job.add_callback(Kill)
        job.train()
    """, tmp_path, check=False)  # fmt: skip
    assert died.returncode == -9, died.stderr
    done = child("""
        os.chdir("b")
        trainer(FanfoldCallback(), output_dir=sys.path[0] + "/out", max_steps=6).train(resume_from_checkpoint=True)
        raise ValueError("after training")
    """, tmp_path, check=False)  # fmt: skip
    assert ("after training" in done.stderr, done.returncode) == (True, 1), done.stderr
    (run,) = fanfold.runs(dir=tmp_path / "a" / ".fanfold")
    assert not (tmp_path / "b" / ".fanfold").exists()
    assert statuses(run) == ["killed", "failed"]
    assert "after training" in run.error  # in a script, an exception that nobody catches is seen at the end of the process
    assert run.series("train/loss").steps.tolist() == [1, 2, 3, 4, 5, 6]


# Crashes


@pytest.mark.parametrize(("error", "status"), [(RuntimeError("a bad batch"), "failed"), (KeyboardInterrupt(), "killed")])
def test_an_exception_that_somebody_catches_ends_the_run_at_once(error, status):
    """As in a notebook: the process lives on, and the run says what happened."""
    callback = FanfoldCallback()
    job = trainer(callback, Tiny(bad_step=4, error=error), save_strategy="steps", save_steps=2)
    with pytest.raises(type(error)):
        job.train()
    stored = fanfold.open(callback.run.path)
    assert stored.status == status
    assert type(error).__name__ in stored.error
    assert "test_framework_transformers.py" in stored.error  # where it was raised
    assert [step for step, _ in points(callback.run, "train/loss")] == [1, 2, 3]
    job.train(resume_from_checkpoint=True)
    stored = fanfold.open(callback.run.path)
    assert statuses(stored) == [status, "running"]
    assert stored.series("train/loss").steps.tolist() == [1, 2, 3, 4]


def test_an_exception_of_another_callback_fails_the_run_and_a_users_run_goes_on():
    class Bad(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ConnectionError("no server")

    callback = FanfoldCallback()
    job = trainer(callback)
    job.add_callback(Bad)
    with pytest.raises(ConnectionError):
        job.train()
    assert "no server" in fanfold.open(callback.run.path).error
    run = fanfold.init("mine")
    with pytest.raises(ConnectionError):
        job.train()
    assert run.status == "running"


# Searches


def test_every_trial_of_a_search_is_a_run_and_a_pruned_one_did_not_fail(runs_dir):
    optuna.logging.disable_default_handler()
    own = fanfold.init("search", name="the users own")
    job = Trainer(
        model_init=lambda trial: Tiny(), args=arguments(report_to="fanfold", eval_strategy="steps", eval_steps=1, max_steps=2, run_name="hpo"),
        train_dataset=DATA, eval_dataset=DATA[:4],
    )  # fmt: skip

    class Pruner(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return trial.number == 1

    job.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": [0.1, 0.2, 0.3][trial.number]},
        hp_name=lambda trial: f"trial-{trial.number}", n_trials=3, pruner=Pruner(),
    )  # fmt: skip
    assert fanfold.run is own  # and not the last trial's
    assert fanfold.open(own.path).keys() == []
    _session.finish_ended()
    trials = sorted((run for run in fanfold.runs(dir=runs_dir) if run.name.startswith("trial")), key=lambda run: run.name)
    assert [run.name for run in trials] == ["trial-0", "trial-1", "trial-2"]
    assert [run.config["learning_rate"] for run in trials] == [0.1, 0.2, 0.3]
    assert [(run.group, run.status, run.tags) for run in trials] == [
        ("hpo", "finished", []), ("hpo", "finished", ["pruned"]), ("hpo", "finished", []),
    ]  # fmt: skip
    assert [run.series("train/loss").steps.tolist() for run in trials] == [[1, 2], [1], [1, 2]]


# No wait for a device


class Reads(TorchDispatchMode):
    """Note who asks for the value of a tensor: on a device, each such question is a wait."""

    def __init__(self):
        super().__init__()
        self.by_fanfold, self.others = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            frames = [frame for frame in traceback.extract_stack() if frame.name != "watched"]  # it stands around all training
            ours = [Path(frame.filename).name for frame in frames if frame.filename.startswith(SOURCE)]
            self.by_fanfold += ours[-1:]
            self.others += not ours
        return func(*args, **(kwargs or {}))


class OnDevice(torch.Tensor):
    """A number on an accelerator that this machine does not have, and that notes which thread asks for it."""

    asked: list[str] = []  # noqa: RUF012 - the test's own notebook

    @staticmethod
    def __new__(cls, value):
        self = torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.float32, device="xpu")
        self.value = value
        return self

    def __init__(self, value):
        pass

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            cls.asked.append(threading.current_thread().name)
            return args[0].value
        return OnDevice(args[0].value)

    def __repr__(self):
        return "OnDevice()"


OnDevice.__module__ = "torch"  # by which a tensor is known


def test_no_value_of_a_tensor_is_asked_for_on_the_training_thread():
    callback = FanfoldCallback()
    job = trainer(callback, eval_strategy="steps", eval_steps=2, save_strategy="steps", save_steps=2)

    class Log(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            job.log({"extra": OnDevice(0.25 * state.global_step)})

    job.args.save_strategy = transformers.trainer_utils.SaveStrategy.NO  # a tensor in the history cannot be saved
    job.add_callback(Log)
    OnDevice.asked.clear()
    with Reads() as reads:
        job.train()
    assert reads.others > 0  # the Trainer's own, so the notebook works
    assert set(reads.by_fanfold) <= {"values.py"}  # CPU tensors (rank/loss), whose value is there already
    assert callback.run.flush(10)
    assert points(callback.run, "train/extra") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]
    assert len(OnDevice.asked) == 4
    assert threading.main_thread().name not in OnDevice.asked


def test_pace_counts_steps_and_data_and_leaves_out_evaluation():
    now = [0.0]
    pace = Pace(clock=lambda: now[0])

    def after(seconds, event):
        now[0] += seconds
        event()

    pace.start(10)
    after(1.0, pace.batch_came)
    after(2.0, pace.step_ended)
    after(50.0, pace.rest)  # an evaluation
    after(3.0, pace.batch_came)
    after(4.0, pace.step_ended)
    now[0] += 6.0  # the Trainer waits for the device before it logs
    figures = pace.take(12, samples=8)
    assert (figures["rank/step_seconds"], figures["rank/data_seconds"], figures["rank/samples_per_second"]) == (8.0, 2.0, 1.0)
    assert pace.take(12, samples=8) == {}


def test_evaluation_and_saving_do_not_count_as_training_time():
    now, callback = [0.0], FanfoldCallback()
    callback._pace = Pace(clock=lambda: now[0])

    class Slow(Tiny):
        def forward(self, x, labels=None):
            now[0] += 1.0 if self.training else 100.0
            return super().forward(x, labels)

        def save_pretrained(self, *args, **kwargs):
            now[0] += 1000.0
            return super().save_pretrained(*args, **kwargs)

    trainer(callback, Slow(), logging_steps=2, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1).train()
    assert points(callback.run, "rank/step_seconds") == [(2, 1.0), (4, 1.0)]
    assert points(callback.run, "rank/samples_per_second") == [(2, 2.0), (4, 2.0)]
    assert points(callback.run, "rank/data_seconds") == [(2, 0.0), (4, 0.0)]


# Two processes


def test_under_torchrun_every_rank_is_in_the_run_and_restarts_together(tmp_path, runs_dir):
    child("""
        callback = FanfoldCallback("ddp", trackers=["tensorboard"])
        job = trainer(callback, save_strategy="steps", save_steps=2, ddp_backend="gloo", logging_steps=2, max_steps=4)
        job.train()
        job.train(resume_from_checkpoint="out/checkpoint-2")
        job.evaluate()
    """, tmp_path, launcher=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"))  # fmt: skip
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.status, run.ranks, len(run.attempts)) == ("finished", [0, 1], 2)
    loss, mine = run.series("train/loss"), run.series("rank/loss", fold="mean")
    assert (loss.steps.tolist(), mine.steps.tolist(), mine.count.tolist()) == ([2, 4], [2, 4], [2, 2])
    assert mine.values.tolist() == pytest.approx(loss.values.tolist(), rel=1e-6)
    assert (mine.min < mine.max).all()  # ranks saw other batches
    for rank in (0, 1):
        assert run.series("rank/step_seconds", rank=rank).steps.tolist() == [2, 4]
        assert run.series("eval/loss", rank=rank).steps.tolist() == [4]
    assert scalars(run.path, "rank/loss")[4] == pytest.approx(mine.values[1], rel=1e-6)


def scalars(folder, tag):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for place in sorted({path.parent for path in Path(folder).rglob("events.out.*")}):
        reader = EventAccumulator(str(place), size_guidance={"scalars": 0}).Reload()
        if tag in reader.Tags()["scalars"]:
            found |= {event.step: event.value for event in reader.Scalars(tag)}
    return found
