"""Our logger inside the real Lightning Trainer: one process and two, restarts, crashes, media."""

from __future__ import annotations

import os
import pickle
import sys
import textwrap
import threading
from pathlib import Path

import lightning.pytorch
import numpy as np
import pytest
import pytorch_lightning
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import fanfold
import warm_python
from fanfold.frameworks.lightning import MARK, FanfoldLogger, _note_in
from paths import HELPERS

# Lightning's own: advice to users, and a call that torch has renamed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists and is not empty.*"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]
DATA = torch.arange(16.0).reshape(8, 2) / 10


def model_class(library):
    class Model(library.LightningModule):
        def __init__(self, lr=0.125, api_key="sk-not-for-the-journal", bad_step=None, error=None):
            super().__init__()
            self.save_hyperparameters(ignore=["error"])
            self.layer = torch.nn.Linear(2, 1)
            torch.nn.init.constant_(self.layer.weight, 0.5)
            torch.nn.init.zeros_(self.layer.bias)
            self.losses, self.error = [], error or RuntimeError("a bad batch")

        def training_step(self, batch, index):
            if self.hparams.bad_step == self.global_step:
                raise self.error
            loss = self.layer(batch).square().mean()
            self.losses.append(loss.item())
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch, index):
            self.log("val_loss", self.layer(batch).square().mean(), sync_dist=True)

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    return Model


Model = model_class(lightning.pytorch)


@pytest.fixture(autouse=True)
def fresh(in_a_framework):
    """Every test stands alone."""


def trainer(logger, library=lightning.pytorch, **more):
    given = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "log_every_n_steps": 1}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    return library.Trainer(logger=logger, **{**given, **quiet, **more})


def loader():
    return torch.utils.data.DataLoader(DATA, batch_size=2)


def points(run, key, **how):
    series = fanfold.open(run.path).series(key, **how)
    return list(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def statuses(run):
    return [attempt.verdict()["status"] for attempt in fanfold.open(run.path).attempts]


@pytest.mark.parametrize("library", [lightning.pytorch, pytorch_lightning], ids=lambda library: library.__name__)
def test_fit_and_test_are_one_run_with_lightnings_own_numbers(library, runs_dir):
    logger, model = FanfoldLogger("lit", name="first"), model_class(library)()
    job = trainer(logger, library)
    job.fit(model, loader(), loader())
    (scores,) = job.test(model, loader(), verbose=False)
    run = logger.experiment
    assert points(run, "train_loss") == list(enumerate(model.losses))
    assert points(run, "val_loss") == [(3, job.logged_metrics["val_loss"].item()), (4, scores["val_loss"])]
    stored = fanfold.open(run.path)
    assert (stored.name, stored.status, stored.ranks) == ("first", "running", [0])
    assert (stored.config["lr"], stored.config["api_key"]) == (0.125, "***")
    assert stored.config["model"] == {"class": "Model", "parameters": 3, "trainable_parameters": 3}
    assert "(layer): Linear" in stored.media("model/graph")[0].load().text
    assert (logger.name, logger.version) == ("lit", run.id)
    assert Path(job.checkpoint_callback.dirpath) == Path.cwd() / "lit" / run.id / "checkpoints"
    written = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    assert b"sk-not-for" not in written
    fanfold.finish()
    assert [item.status for item in fanfold.runs(dir=runs_dir)] == ["finished"]


def test_media_in_the_words_of_other_loggers():
    logger = FanfoldLogger("lit", save_dir="elsewhere")
    pictures = [np.zeros((4, 4, 3), np.uint8), np.full((4, 4, 3), 255, np.uint8)]
    logger.log_metrics({"loss": 0.5}, step=7)
    logger.log_image("pictures", pictures, caption=["black", "white"])
    logger.log_table("table", columns=["a", "b"], data=[[1, "x"], [2, "y"]], step=8)
    logger.log_text("words", "a text", step=9)
    logger.log_text("rows", columns=["a"], data=[["x"]], step=9)
    logger.log_audio("tone", [np.zeros(100, np.float32)], sample_rate=[8000], step=9)
    assert logger.experiment.flush(20)
    stored = fanfold.open(logger.experiment.path)
    assert [(item.step, item.load().caption) for item in stored.media("pictures")] == [(7, "black"), (7, "white")]
    assert stored.media("table")[0].load().columns == ["a", "b"]
    assert [(item.step, item.load().text) for item in stored.media("words")] == [(9, "a text")]
    assert stored.media("rows")[0].load().columns == ["a"]
    assert stored.media("tone")[0].load().sample_rate == 8000
    assert logger.save_dir == "elsewhere"
    with pytest.raises(TypeError, match="Pass a list"):
        logger.log_image("pictures", pictures[0])
    with pytest.raises(ValueError, match="caption of 'pictures': not 2 items"):
        logger.log_image("pictures", pictures, caption=["one"])


def test_fit_from_a_checkpoint_goes_on_in_the_same_run_as_a_new_attempt(runs_dir):
    first, model = FanfoldLogger("lit"), Model()
    job = trainer(first)
    job.fit(model, loader(), loader())
    again, later = FanfoldLogger(), Model()  # not told the project: the checkpoint knows it
    trainer(again, max_epochs=2).fit(later, loader(), loader(), ckpt_path=job.checkpoint_callback.best_model_path)
    assert (again.version, again.name) == (first.version, "lit")
    assert points(again.experiment, "train_loss") == list(enumerate(model.losses + later.losses))
    assert statuses(again.experiment) == ["finished", "running"]
    other = FanfoldLogger("lit", resume="never")
    trainer(other, max_epochs=2).fit(Model(), loader(), ckpt_path=job.checkpoint_callback.best_model_path)
    assert other.version != first.version
    assert len(fanfold.runs(dir=runs_dir)) == 2


def test_a_checkpoint_from_before_fanfold_starts_a_new_run(caplog):
    job = trainer(False)
    job.fit(Model(), loader())
    job.save_checkpoint("plain.ckpt")
    logger = FanfoldLogger()
    trainer(logger, max_epochs=2).fit(Model(), loader(), ckpt_path="plain.ckpt")
    assert [step for step, _ in points(logger.experiment, "train_loss")] == [4, 5, 6, 7]
    assert "does not tell" not in caplog.text
    Path("odd.ckpt").write_bytes(b"no archive")
    assert _note_in("odd.ckpt") is None
    assert "odd.ckpt does not name the run it belongs to (File is not a zip file). Training continues" in caplog.text


def test_a_checkpoint_saved_by_hand_names_its_run_too_and_is_never_run_as_code():
    logger = FanfoldLogger("lit")
    job = trainer(logger, enable_checkpointing=False)
    job.fit(Model(), loader())
    job.save_checkpoint("mine.ckpt")
    again = FanfoldLogger()
    trainer(again, max_epochs=2).fit(Model(), loader(), ckpt_path="mine.ckpt")
    assert again.version == logger.version

    class Trap:
        def __reduce__(self):
            return (os.mkdir, ("trapped",))

    torch.save({"fanfold": MARK + '{"run": "x"}', "trap": Trap()}, "trap.ckpt")
    assert _note_in("trap.ckpt") == {"run": "x"}
    assert not Path("trapped").exists()


def test_checkpoints_are_kept_with_the_run_when_asked():
    logger = FanfoldLogger("lit", log_checkpoints=True)
    job = trainer(logger)
    job.fit(Model(), loader())
    (artifact,) = fanfold.open(logger.experiment.path).artifacts
    assert artifact["kind"] == "checkpoint"
    path = Path(job.checkpoint_callback.best_model_path)
    assert [(item["path"], item["size"]) for item in artifact["files"]] == [(path.name, path.stat().st_size)]


def test_a_caught_exception_ends_the_run_and_fit_continues_in_it():
    logger = FanfoldLogger()
    with pytest.raises(RuntimeError, match="a bad batch"):
        trainer(logger).fit(Model(bad_step=2), loader())
    stored = fanfold.open(logger.experiment.path)
    assert (stored.status, "a bad batch" in stored.error) == ("failed", True)
    assert [step for step, _ in points(logger.experiment, "train_loss")] == [0, 1]
    trainer(logger).fit(Model(), loader())
    assert statuses(logger.experiment) == ["failed", "running"]


def test_a_run_of_the_users_is_used_and_left_open():
    run = fanfold.init("mine", config={"note": "kept"})
    logger = FanfoldLogger()
    trainer(logger).fit(Model(), loader())
    with pytest.raises(RuntimeError):
        trainer(logger).fit(Model(bad_step=0), loader())
    assert (logger.experiment is run, run.status) == (True, "running")
    assert (run.config.note, run.config.lr) == ("kept", 0.125)


SCRIPT = """
from test_framework_lightning import *

class Interrupt(lightning.pytorch.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if trainer.global_step == 2:
            raise KeyboardInterrupt

if __name__ == "__main__":
    logger, model = FanfoldLogger("ddp"), Model()
    job = trainer(logger, devices=2, strategy="ddp")
    job.fit(model, loader(), loader())
    job.test(model, loader(), verbose=False)
    again = FanfoldLogger()
    job = trainer(again, devices=2, strategy="ddp", max_epochs=2, callbacks=[Interrupt()] if "interrupt" in sys.argv else None)
    job.fit(Model(), loader(), loader(), ckpt_path=job.strategy.broadcast(
        str(next((Path("ddp") / logger.version / "checkpoints").glob("*.ckpt")))))
"""


@pytest.mark.parametrize("launcher", ["lightning", "torchrun"])
def test_with_two_processes_every_rank_is_in_the_run_and_restarts_together(launcher, tmp_path, runs_dir):
    """Lightning's own launcher starts the script a second time; under torchrun it is started twice."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2") if launcher == "torchrun" else ()
    source = os.pathsep.join([str(Path(fanfold.__file__).parents[1]), str(Path(__file__).parent), str(HELPERS)])
    done = warm_python.run(
        [sys.executable, "-W", "ignore", *start, str(script), "" if start else "interrupt"], cwd=tmp_path, capture_output=True,
        text=True, timeout=200, libraries="lightning", env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == (0 if start else 1), done.stderr
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.ranks, len(run.attempts), run.status) == ([0, 1], 2, "finished" if start else "killed")
    fold = run.series("train_loss", fold="mean")
    steps = [0, 1, 2, 3] if start else [0, 1]
    assert (fold.steps.tolist(), fold.count.tolist()) == (steps, [2] * len(steps))
    assert (fold.min < fold.max).all()  # ranks saw other batches
    value = run.series("val_loss", fold="mean")
    assert (value.min == value.max).all()  # what Lightning has folded itself is the same on both
    assert run.config["lr"] == 0.125


# LightningCLI

COMMAND_LINE = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
import warnings
warnings.simplefilter("ignore")
trainer = LightningCLI(BoringModel).trainer
print(trainer.logger.experiment.project, trainer.logger.experiment.name, trainer.log_dir, sep="|")
"""


def test_lightning_cli_takes_the_options_of_a_run_and_keeps_its_config(tmp_path, runs_dir):
    (tmp_path / "script.py").write_text(COMMAND_LINE)
    words = "--trainer.logger=fanfold.frameworks.lightning.FanfoldLogger --trainer.logger.project=cli --trainer.logger.tags=[a,b]"
    limits = "--trainer.max_steps=2 --trainer.limit_val_batches=1 --trainer.accelerator=cpu --trainer.enable_progress_bar=false"
    environment = {**os.environ, "PYTHONPATH": str(Path(fanfold.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    for name in ("first", "second"):  # Lightning refuses to overwrite a config.yaml, so each run needs a folder of its own
        done = warm_python.run(
            [sys.executable, "script.py", "fit", *words.split(), *limits.split(), f"--trainer.logger.name={name}"],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment, libraries="lightning",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        project, shown, folder = done.stdout.splitlines()[-1].split("|")
        assert (project, shown) == ("cli", name)
        assert f"name: {name}" in (Path(folder) / "config.yaml").read_text()
        assert list((Path(folder) / "checkpoints").glob("*.ckpt"))
    assert sorted((run.name, tuple(run.tags)) for run in fanfold.runs(dir=runs_dir)) == [
        ("first", ("a", "b")), ("second", ("a", "b")),
    ]  # fmt: skip


def test_lightning_cli_continues_a_run_from_its_checkpoint(tmp_path, runs_dir):
    (tmp_path / "script.py").write_text(COMMAND_LINE)
    words = (
        "--trainer.logger=fanfold.frameworks.lightning.FanfoldLogger --trainer.logger.name=baseline --trainer.limit_train_batches=4 "
        "--trainer.limit_val_batches=1 --trainer.accelerator=cpu --trainer.enable_progress_bar=false"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(fanfold.__file__).parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    folders: list[Path] = []
    more: list[str] = []
    for epochs in (1, 2, 3):
        done = warm_python.run(
            [sys.executable, "script.py", "fit", *words.split(), f"--trainer.max_epochs={epochs}", *more],
            cwd=tmp_path, capture_output=True, text=True, timeout=120, env=environment, libraries="lightning",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        folders.append(Path(done.stdout.splitlines()[-1].split("|")[2]))
        more = [f"--ckpt_path={folders[0]}/checkpoints/epoch={epochs - 1}-step={4 * epochs}.ckpt"]
        assert f"max_epochs: {epochs}" in (folders[-1] / "config.yaml").read_text()
        assert Path(more[0].partition("=")[2]).exists()
    assert folders == [folders[0], folders[0] / "attempt-2", folders[0] / "attempt-3"]
    (run,) = fanfold.runs(dir=runs_dir)
    assert (run.name, run.status, len(run.attempts)) == ("baseline", "finished", 3)


def test_save_dir_is_the_trainers_folder_unless_one_is_given(tmp_path):
    logger = FanfoldLogger("lit")
    job = trainer(logger, default_root_dir=tmp_path / "home", max_steps=1)
    job.fit(model_class(lightning.pytorch)(), loader())
    assert Path(job.checkpoint_callback.dirpath) == tmp_path / "home" / "lit" / logger.version / "checkpoints"
    assert Path(job.log_dir) == tmp_path / "home" / "lit" / logger.version
    assert logger.save_dir == os.getcwd()  # nobody's Trainer asks
    assert FanfoldLogger("lit", save_dir="there").save_dir == "there"


def test_a_logger_goes_through_pickle_with_its_name_and_folder():
    logger = FanfoldLogger("lit")
    logger.log_metrics({"a": 1.0})
    again = pickle.loads(pickle.dumps(logger))
    again.log_metrics({"b": 1.0})
    assert (again.name, again.save_dir) == (logger.name, logger.save_dir)


# The rules that Lightning's own suite has for every logger (tests_pytorch/loggers/test_all.py)


class History(FanfoldLogger):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.history = []

    def log_metrics(self, metrics, step):
        super().log_metrics(metrics, step)
        self.history.append((step, sorted(metrics)))


@pytest.fixture
def no_threads_left():
    """Stop threads the way Lightning's suite does: a daemon thread must have a `stop` that ends it, others must have ended."""
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        assert thread.daemon, thread
        if thread.name.startswith("fanfold-"):
            thread.stop()
            assert not thread.is_alive(), thread


def test_fit_and_test_hand_over_the_names_and_steps_of_every_logger(no_threads_left, monkeypatch):
    monkeypatch.setenv("FANFOLD_SYSTEM", "1")
    logger, model = History("lit"), Model()
    job = trainer(logger, limit_train_batches=1, limit_val_batches=1)
    job.fit(model, loader(), loader())
    job.test(model, loader(), verbose=False)
    assert logger.history == [(0, ["epoch", "train_loss"]), (0, ["epoch", "val_loss"]), (1, ["epoch", "val_loss"])]
    assert {one.name for one in threading.enumerate()} >= {"fanfold-keeper", "fanfold-system"}


def test_a_trainer_goes_through_pickle_with_its_logger(no_threads_left):
    logger = FanfoldLogger("lit")
    logger.log_metrics({"a": 1})
    logger.save()
    job = pickle.loads(pickle.dumps(trainer(logger)))
    job.logger.log_metrics({"acc": 1.0})
    assert (job.logger.name, job.logger.save_dir) == (logger.name, logger.save_dir)


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_the_tuner_leaves_the_logger_alone(method):
    class Tuned(Model):
        def __init__(self, lr=0.1, batch_size=1):
            super().__init__(lr=lr)
            self.save_hyperparameters()

        def train_dataloader(self):
            return torch.utils.data.DataLoader(DATA, batch_size=self.hparams.batch_size)

        val_dataloader = train_dataloader

    logger = FanfoldLogger("lit")
    job, model = trainer(logger, max_steps=2), Tuned()
    getattr(lightning.pytorch.tuner.tuning.Tuner(job), method)(model)
    assert job.logger is logger
    assert model.logger is logger


class RankCheck(lightning.pytorch.Callback):
    """On ranks above 0 an experiment takes any call, as Lightning's dummy does; what a run has works on all."""

    def on_train_batch_start(self, trainer, module, batch, index):
        experiment = trainer.logger.experiment
        assert isinstance(experiment, lightning.pytorch.loggers.logger.DummyExperiment) == (trainer.global_rank > 0)
        if trainer.global_rank > 0:
            assert experiment.something(foo="bar") is None
        experiment.log({"by_hand": float(trainer.global_rank)}, step=0)


@pytest.mark.filterwarnings("ignore")  # Lightning's and torch's, in two processes
def test_spawned_ranks_have_an_experiment_that_takes_any_call(runs_dir):
    job = trainer(FanfoldLogger("lit"), strategy="ddp_spawn", devices=2, max_steps=1, callbacks=[RankCheck()])
    job.fit(BoringModel())
    (run,) = fanfold.runs(dir=runs_dir)
    assert [run.series("by_hand", rank=rank).values.tolist() for rank in run.ranks] == [[0.0], [1.0]]
