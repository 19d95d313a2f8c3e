"""The order of events: our Trainer beside Transformers' own, in the same configuration; what differs is said here."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import fanfold  # noqa: E402
from fanfold.callbacks import EarlyStoppingCallback, Event, TrainerCallback  # noqa: E402

SAMPLES = 10  # of batches of 2: five to an epoch


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def forward(self, x, labels=None):
        guess = x @ self.weight
        return {"loss": (guess - labels).square().mean(), "guess": guess}


class Recorder:
    """Write down each event and the step it came at; a callback by its methods alone."""

    def __init__(self):
        self.seen = []


def _hear(event):
    def hear(self, args, state, control, **kwargs):
        self.seen.append(f"{event.removeprefix('on_')} {state.global_step}")

    return hear


for _event in Event:
    setattr(Recorder, _event.value, _hear(_event.value))


def dataset(count=SAMPLES):
    inputs = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": row.sum()} for row in inputs]


def worse_and_worse():
    """Metrics that never get better after the first evaluation."""
    count = iter(range(100))
    return lambda _: {"error": float(next(count))}


CONFIGURATIONS = {
    "accumulation": {"gradient_accumulation_steps": 2, "logging_steps": 2, "num_train_epochs": 2},
    "eval and save by steps": {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2,
                               "num_train_epochs": 2},
    "eval and save by epoch": {"eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch", "num_train_epochs": 2},
    "max_steps": {"max_steps": 7, "logging_steps": 3, "logging_first_step": True, "eval_strategy": "steps", "eval_steps": 4,
                  "eval_on_start": True},
    "half an epoch": {"num_train_epochs": 1.5, "logging_steps": 0.25, "save_strategy": "no"},
    "early stop": {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 4,
                   "metric_for_best_model": "error", "greater_is_better": False, "load_best_model_at_end": True, "logging_steps": 2},
    "save the best": {"eval_strategy": "epoch", "save_strategy": "best", "num_train_epochs": 2, "metric_for_best_model": "loss",
                      "logging_strategy": "no"},
}  # fmt: skip


def options(folder, **more):
    return {"output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "learning_rate": 0.01,
            "use_cpu": True, "disable_tqdm": True, "report_to": "none", **more}  # fmt: skip


def ours(folder, *, callbacks=(), resume=None, compute_metrics=None, **more):
    recorder = Recorder()
    trainer = fanfold.Trainer(Line(), fanfold.TrainingArguments(**options(folder, **more)), train_dataset=dataset(),
                              eval_dataset=dataset(6), callbacks=[recorder, *callbacks], compute_metrics=compute_metrics, run=False)  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return recorder.seen


def theirs(folder, *, callbacks=(), resume=None, compute_metrics=None, **more):
    recorder = Recorder()
    trainer = transformers.Trainer(
        Line(), transformers.TrainingArguments(**options(folder, dataloader_pin_memory=False, **more)), train_dataset=dataset(),
        eval_dataset=dataset(6), callbacks=[recorder, *callbacks], compute_metrics=compute_metrics)  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return recorder.seen


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_order_is_that_of_transformers(name, tmp_path, capsys):
    configuration = CONFIGURATIONS[name]
    metrics = worse_and_worse if name == "early stop" else lambda: None
    stop = lambda: [EarlyStoppingCallback(2)] if name == "early stop" else []  # noqa: E731
    mine = ours(tmp_path / "ours", callbacks=stop(), compute_metrics=metrics(), logging_last_step=False, **configuration)
    other = theirs(tmp_path / "theirs", callbacks=stop(), compute_metrics=metrics(), **configuration)
    assert mine == other
    assert mine[0] == "init_end 0"
    assert mine[-1].startswith("train_end")


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant_with_warmup", "inverse_sqrt"])
def test_the_weights_are_those_of_transformers_too(schedule, tmp_path, capsys):
    common = options(tmp_path, gradient_accumulation_steps=2, num_train_epochs=3, warmup_steps=2, weight_decay=0.1, optim="adamw_torch",
                     lr_scheduler_type=schedule, train_sampling_strategy="sequential", save_strategy="no", max_grad_norm=0.5)  # fmt: skip
    mine = fanfold.Trainer(Line(), fanfold.TrainingArguments(**common), train_dataset=dataset(), run=False)
    other = transformers.Trainer(
        Line(), transformers.TrainingArguments(**common, dataloader_pin_memory=False), train_dataset=dataset()
    )
    losses = [trainer.train().training_loss for trainer in (mine, other)]
    assert torch.equal(mine.model.weight, other.model.weight)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(("step", "epochs"), [(3, 2), (5, 2)], ids=["mid-epoch", "end of an epoch"])
def test_the_order_after_a_resume_is_that_of_transformers(step, epochs, tmp_path, capsys):
    configuration = {"num_train_epochs": epochs, "save_strategy": "steps", "save_steps": step, "logging_steps": 2}
    for train, folder in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        train(folder, **configuration)
    mine = ours(tmp_path / "ours", resume=str(tmp_path / "ours" / f"checkpoint-{step}"), logging_last_step=False, **configuration)
    other = theirs(tmp_path / "theirs", resume=str(tmp_path / "theirs" / f"checkpoint-{step}"), **configuration)
    assert mine == other
    assert mine[3] == f"step_begin {step}"


def test_a_finished_training_has_nothing_left_to_resume(tmp_path, capsys):
    configuration = {"num_train_epochs": 1, "save_strategy": "epoch"}
    ours(tmp_path, **configuration)
    assert ours(tmp_path, resume=True, **configuration) == ["init_end 0", "train_begin 5", "log 5", "train_end 5"]


def test_unlike_transformers_the_last_partial_interval_is_logged(tmp_path, capsys):
    configuration = {"num_train_epochs": 1, "logging_steps": 3, "save_strategy": "no"}
    assert [event for event in theirs(tmp_path, **configuration) if event.startswith("log")] == ["log 3", "log 5"]  # the summary
    assert [event for event in ours(tmp_path, **configuration) if event.startswith("log")] == ["log 3", "log 5", "log 5"]


class Breaks(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            raise ConnectionError("the tracker is down")


def test_unlike_transformers_an_exception_is_told_and_training_ends(tmp_path, capsys):
    def last_events(train):
        seen = []
        watcher = type("Watcher", (Recorder,), {"__init__": lambda self: setattr(self, "seen", seen)})()
        with pytest.raises(ConnectionError, match="the tracker is down") as caught:
            train(tmp_path, callbacks=[watcher, Breaks()], save_strategy="no")
        return seen[-3:], str(caught.value)

    assert last_events(theirs)[0] == ["pre_optimizer_step 1", "optimizer_step 1", "step_end 2"]
    seen, text = last_events(ours)
    assert seen == ["step_end 2", "exception 2", "train_end 2"]
    assert "callback Breaks raised in on_step_end, at step 2" in text
