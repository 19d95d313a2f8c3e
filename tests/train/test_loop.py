"""Loop: the right events from iteration alone; steering, logging, evaluating, saving, resuming and failing by hand."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import torch

import fanfold
from fanfold.callbacks import DefaultFlowCallback, EarlyStoppingCallback, Event, TrainerCallback
from fanfold.errors import RunError, SettingError


class Recorder(TrainerCallback):
    """Write down each event and the step it came at."""

    def __init__(self):
        self.seen = []
        self.logs = []
        self.errors = []


def _hear(event):
    def hear(self, args, state, control, logs=None, exception=None, **kwargs):
        self.seen.append(f"{event.removeprefix('on_')} {state.global_step}")
        self.logs += [dict(logs)] if logs is not None else []
        self.errors += [exception] if exception is not None else []

    return hear


for _event in Event:
    setattr(Recorder, _event.value, _hear(_event.value))


def looping(recorder=None, *, run=False, **options):
    callbacks = [*([recorder] if recorder is not None else []), *options.pop("callbacks", ())]
    return fanfold.Loop(run, callbacks=callbacks, **options)


def iterate(loop, batches=4):
    for _epoch in loop.epochs():
        for batch in loop.steps(range(batches)):
            loop.log({"loss": float(batch)})


def test_accumulation(runs_dir):
    recorder = Recorder()
    loop = looping(recorder, epochs=1, gradient_accumulation_steps=2, logging_steps=2)
    synced, sizes = [], []
    for _epoch in loop.epochs():
        for batch in loop.steps(range(5)):
            synced.append(loop.sync_gradients)
            sizes.append(loop.accumulation_steps)
            loop.log({"loss": batch})
    assert recorder.seen == [
        "init_end 0", "train_begin 0", "epoch_begin 0",
        "step_begin 0", "substep_end 0", "step_end 1",
        "step_begin 1", "substep_end 1", "step_end 2", "log 2",
        "step_begin 2", "step_end 3", "log 3",  # one batch was left; and the interval that is not full is logged, too
        "epoch_end 3", "train_end 3",
    ]  # fmt: skip
    assert synced == [False, True, False, True, True]
    assert sizes == [2, 2, 2, 2, 1]
    assert [logs["loss"] for logs in recorder.logs] == [(0.5 + 2.5) / 2, 4]  # means over batches, then over steps
    assert loop.state.epoch == 1.0


def test_a_stream_without_length_ends_its_last_step(runs_dir):
    recorder = Recorder()
    loop = looping(recorder, epochs=1, gradient_accumulation_steps=2)
    for _epoch in loop.epochs():
        for _batch in loop.steps(iter(range(3))):
            pass
    assert recorder.seen[3:] == [
        "step_begin 0",
        "substep_end 0",
        "step_end 1",
        "step_begin 1",
        "step_end 2",
        "epoch_end 2",
        "train_end 2",
    ]
    assert loop.state.epoch == 1.0


def test_evaluating_and_saving_by_steps(runs_dir, tmp_path):
    recorder, saved = Recorder(), []
    loop = looping(
        recorder, epochs=1, eval_steps=2, save_steps=3, evaluate=lambda: {"loss": 0.5}, save=saved.append, output_dir=tmp_path
    )
    iterate(loop)
    assert recorder.seen[3:] == [
        "step_begin 0", "step_end 1",
        "step_begin 1", "step_end 2", "log 2", "evaluate 2",
        "step_begin 2", "step_end 3", "save 3",
        "step_begin 3", "step_end 4", "log 4", "log 4", "evaluate 4", "save 4",  # the end: logged, evaluated, saved
        "epoch_end 4", "train_end 4",
    ]  # fmt: skip
    assert [path.name for path in saved] == ["checkpoint-3", "checkpoint-4"]
    assert recorder.logs[0] == {"eval_loss": 0.5, "epoch": 0.5}


def test_evaluating_and_saving_by_epoch_with_questions_in_the_body(runs_dir, tmp_path):
    recorder = Recorder()
    loop = looping(
        recorder, epochs=2, eval_strategy="epoch", save_strategy="epoch", logging_strategy="epoch", output_dir=tmp_path
    )
    for _epoch in loop.epochs():
        for batch in loop.steps(range(2)):
            loop.log({"loss": float(batch)})
            assert not loop.should_evaluate
        if loop.should_evaluate:
            loop.evaluated({"accuracy": 0.9})
        if loop.should_save:
            folder = tmp_path / f"mine-{loop.state.global_step}"
            folder.mkdir()
            loop.saved(folder)
    one_epoch = "epoch_begin {0}|step_begin {0}|step_end {1}|step_begin {1}|step_end {2}|epoch_end {2}|log {2}|log {2}|evaluate {2}|save {2}"
    assert recorder.seen[2:] == [*one_epoch.format(0, 1, 2).split("|"), *one_epoch.format(2, 3, 4).split("|"), "train_end 4"]
    assert json.loads((tmp_path / "mine-2" / "trainer_state.json").read_text())["global_step"] == 2


def test_questions_in_the_body_end_the_step_they_are_asked_in(runs_dir):
    recorder = Recorder()
    loop = looping(recorder, epochs=1, eval_steps=2, gradient_accumulation_steps=2)
    evaluated = []
    for _epoch in loop.epochs():
        for batch in loop.steps(range(4)):
            loop.log({"loss": batch})
            if loop.should_evaluate:
                evaluated.append(loop.state.global_step)
                loop.evaluated({"eval_loss": 1.0})
    assert evaluated == [2]
    assert recorder.seen[-6:] == ["step_end 2", "log 2", "log 2", "evaluate 2", "epoch_end 2", "train_end 2"]


def test_max_steps_goes_over_epochs_and_stops(runs_dir):
    recorder = Recorder()
    loop = looping(recorder, max_steps=3, logging_steps=2)
    iterate(loop, batches=2)
    assert recorder.seen[2:] == [
        "epoch_begin 0", "step_begin 0", "step_end 1", "step_begin 1", "step_end 2", "log 2", "epoch_end 2",
        "epoch_begin 2", "step_begin 2", "step_end 3", "log 3", "epoch_end 3", "train_end 3",
    ]  # fmt: skip
    assert loop.state.num_train_epochs == 2


def test_early_stopping_by_a_loop_of_ones_own(runs_dir):
    recorder, scores = Recorder(), iter([1.0, 2.0, 3.0, 4.0])
    loop = looping(recorder, epochs=9, eval_steps=2, metric_for_best_model="loss", evaluate=lambda: {"loss": next(scores)},
                   callbacks=[EarlyStoppingCallback(2)])  # fmt: skip
    iterate(loop)
    assert loop.state.global_step == 6
    assert (loop.state.best_metric, loop.state.best_global_step) == (1.0, 2)
    assert recorder.seen[-3:] == ["epoch_end 6", "log 6", "train_end 6"]


def test_early_stopping_without_a_metric_says_what_to_set(runs_dir):
    with pytest.raises(SettingError, match="metric_for_best_model"):
        iterate(looping(epochs=1, callbacks=[EarlyStoppingCallback]))


def test_a_callback_can_end_an_epoch(runs_dir):
    class Half(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 2 == 0

    recorder = Recorder()
    iterate(looping(recorder, epochs=2, callbacks=[Half]))
    assert [event for event in recorder.seen if event.startswith("epoch")] == [
        "epoch_begin 0", "epoch_end 2", "epoch_begin 2", "epoch_end 4",
    ]  # fmt: skip


# Leaving


def test_an_exception_in_the_body_is_told_and_fails_the_run(runs_dir):
    recorder, run = Recorder(), fanfold.init("p")
    with pytest.raises(ZeroDivisionError):
        with looping(recorder, run=run, epochs=1) as loop:
            for _epoch in loop.epochs():
                for batch in loop.steps(range(4)):
                    loop.log({"loss": 1 / (2 - batch)})
    assert recorder.seen[-3:] == ["step_begin 2", "exception 2", "train_end 2"]
    assert isinstance(recorder.errors[0], ZeroDivisionError)
    assert run.status == "failed"
    stored = fanfold.open(run.path)
    assert stored.status == "failed"
    assert list(stored.series("loss").values) == [0.5, 1.0]  # and no half a step


def test_an_exception_after_training_fails_the_loops_own_run_too(runs_dir):
    recorder = Recorder()
    with pytest.raises(ValueError, match="late"):
        with looping(recorder, run=None, epochs=1, project="p") as loop:
            iterate(loop)
            raise ValueError("late")
    assert recorder.seen[-2:] == ["train_end 4", "exception 4"]
    assert loop.run.status == "failed"


def test_without_a_with_training_ends_all_the_same(runs_dir):
    recorder = Recorder()
    loop = looping(recorder, epochs=1)

    def train():
        for _epoch in loop.epochs():
            for batch in loop.steps(range(4)):
                if batch == 2:
                    raise KeyError("body")

    with pytest.raises(KeyError):
        train()
    assert recorder.seen[-2:] == ["step_begin 2", "train_end 2"]  # Python does not say that it was an exception
    iterate(loop, batches=1)  # and the loop can be used again
    assert recorder.seen[-2:] == ["epoch_end 1", "train_end 1"]


@pytest.mark.parametrize("where", ["loader", "evaluate", "callback"])
def test_an_exception_of_what_the_loop_calls_is_told_without_a_with(where, runs_dir):
    def bad(*_):
        raise OSError("gone")

    def loader():
        yield 1
        bad()

    class Breaks(TrainerCallback):
        on_step_end = lambda self, *args, **kwargs: bad() if where == "callback" else None  # noqa: E731

    recorder, run = Recorder(), fanfold.init("p")
    loop = looping(recorder, run=run, epochs=1, eval_steps=1, evaluate=bad if where == "evaluate" else lambda: {"loss": 1},
                   callbacks=[Breaks])  # fmt: skip
    with pytest.raises(OSError, match="gone"):
        for _epoch in loop.epochs():
            for _batch in loop.steps(loader()):
                pass
    assert recorder.seen[-2:] == ["exception 1", "train_end 1"]
    assert recorder.seen.count("train_end 1") == 1
    assert run.status == "failed"


def test_leaving_by_break_ends_step_epoch_and_training(runs_dir):
    recorder = Recorder()
    with looping(recorder, epochs=2, logging_steps=1) as loop:
        for epoch in loop.epochs():
            for batch in loop.steps(range(9)):
                if batch == 2 and epoch == 1:
                    break  # before anything was done with it
                loop.log({"loss": batch})
                if batch == 1 and epoch == 0:
                    break
            if epoch == 1:
                break
    assert recorder.seen[2:] == [
        "epoch_begin 0", "step_begin 0", "step_end 1", "log 1", "step_begin 1", "step_end 2", "log 2", "epoch_end 2",
        "epoch_begin 2", "step_begin 2", "step_end 3", "log 3", "step_begin 3", "step_end 4", "log 4", "step_begin 4",
        "epoch_end 4", "train_end 4",
    ]  # fmt: skip


# Values


def test_the_run_gets_each_step_and_callbacks_each_interval(runs_dir):
    recorder = Recorder()
    with looping(recorder, run=None, epochs=1, logging_steps=3, project="p") as loop:
        for _epoch in loop.epochs():
            for batch in loop.steps(range(4)):
                loop.log({"loss": float(batch)})
                loop.log({"lr": 0.1 * batch, "phase": "warm"}, mean=False)
        loop.log({"test": 7})
        run = loop.run
    assert run.status == "finished"  # the loop's own, which ends with its `with`
    stored = fanfold.open(run.path)
    assert list(stored.series("loss").values) == [0, 1, 2, 3]
    assert list(stored.series("loss").steps) == [1, 2, 3, 4]
    assert recorder.logs[0] == pytest.approx({"loss": 1.0, "lr": 0.2, "phase": "warm", "epoch": 0.75})
    assert recorder.logs[-1] == {"test": 7, "epoch": 1.0}
    assert loop.state.log_history[-1] == {"test": 7, "epoch": 1.0, "step": 4}
    assert stored.config["num_train_epochs"] == 1
    assert "learning_rate" not in stored.config  # nobody told the loop, and it does not invent one


def test_a_run_of_the_users_is_left_open(runs_dir):
    run = fanfold.init("p")
    iterate(looping(run=None, epochs=1))
    assert run.status == "running"
    run.finish()
    assert len(fanfold.open(run.path).series("loss").values) == 4


def test_numbers_on_a_device_are_fetched_only_when_somebody_reads_them(runs_dir):
    fetched = []

    class Device:
        """A number that says when it is fetched, as a tensor on a GPU would."""

        shape, dtype = (), "float32"

        def __init__(self, value):
            self.value = value

        def __add__(self, other):
            return Device(self.value + other.value)

        def __truediv__(self, count):
            return Device(self.value / count)

        def item(self):
            fetched.append(self.value)
            return self.value

    class Reads(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs):
            if state.global_step == 4:
                self.read = {**logs}, json.dumps(logs), logs["loss"]

    reads = Reads()
    loop = looping(epochs=1, logging_steps=2, callbacks=[reads])
    for _epoch in loop.epochs():
        for batch in loop.steps(range(4)):
            loop.log({"loss": Device(batch)})
            assert fetched == []
    assert reads.read == ({"loss": 2.5, "epoch": 1.0}, '{"loss": 2.5, "epoch": 1.0}', 2.5)
    assert [entry["loss"] for entry in loop.state.log_history] == [0.5, 2.5]


def test_tensors_and_jax_arrays_are_averaged_where_they_are(runs_dir):
    buffer, recorder = torch.zeros(()), Recorder()
    loop = looping(recorder, epochs=1, logging_steps=4)
    for _epoch in loop.epochs():
        for batch in loop.steps(range(4)):
            buffer.fill_(batch)  # the same memory each step, as under a captured graph
            loop.log({"torch": buffer, "one": torch.tensor([2.0], requires_grad=True), "jax": jax.numpy.float32(batch)})
    assert recorder.logs[0] == {"torch": 1.5, "one": 2.0, "jax": 1.5, "epoch": 1.0}
    assert all(type(value) is float for value in recorder.logs[0].values())


# The optimizer


def test_a_torch_optimizer_tells_of_its_steps(runs_dir, caplog):
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    recorder = Recorder()

    def train(always):
        loop = looping(recorder, epochs=1, gradient_accumulation_steps=2, optimizer=optimizer)
        for _epoch in loop.epochs():
            for _batch in loop.steps(range(2)):
                parameter.sum().backward()
                if always or loop.sync_gradients:
                    optimizer.step()

    train(always=False)
    assert recorder.seen[3:] == ["step_begin 0", "substep_end 0", "pre_optimizer_step 0", "optimizer_step 0", "step_end 1", "epoch_end 1",
                                 "train_end 1"]  # fmt: skip
    assert caplog.text == ""
    train(always=True)
    assert "Step only `if loop.sync_gradients:`" in caplog.text
    count = len(recorder.seen)
    optimizer.step()
    assert len(recorder.seen) == count  # after training, the optimizer tells nobody


def test_other_optimizers_are_told_of_by_hand(runs_dir):
    recorder = Recorder()
    loop = looping(recorder, epochs=1)
    for _epoch in loop.epochs():
        for _batch in loop.steps([1]):
            with loop.optimizer_step():
                recorder.seen.append("update")
    assert recorder.seen[4:7] == ["pre_optimizer_step 0", "update", "optimizer_step 0"]


# Going on


def test_a_loop_goes_on_from_its_latest_checkpoint_in_the_same_run(runs_dir, tmp_path):
    def train(stop_at):
        recorder, batches = Recorder(), []
        loop = looping(recorder, run=None, epochs=2, save_steps=3, save=lambda folder: (folder / "w.txt").write_text("w"), project="p",
                       output_dir=tmp_path / "out", gradient_accumulation_steps=2, save_total_limit=1, callbacks=[EarlyStoppingCallback(9)],
                       eval_steps=3, evaluate=lambda: {"loss": 1.0}, metric_for_best_model="loss")  # fmt: skip
        folder = loop.resume()
        with loop:
            for epoch in loop.epochs():
                for batch in loop.steps(range(7)):
                    if len(batches) == stop_at:
                        raise SystemExit(1)
                    batches.append((epoch, batch))
                    loop.log({"loss": float(batch)})
        return loop, recorder, batches, folder

    with pytest.raises(SystemExit):
        train(stop_at=10)
    first = fanfold.runs(dir=runs_dir)[0]
    loop, recorder, batches, folder = train(stop_at=None)
    assert (folder / "w.txt").read_text() == "w"
    assert folder.name == "checkpoint-3"
    assert batches == [(0, 6), *((1, batch) for batch in range(7))]
    assert recorder.seen[:4] == ["init_end 0", "train_begin 3", "epoch_begin 3", "step_begin 3"]
    assert loop.state.global_step == 8
    assert loop.callbacks[-1].early_stopping_patience_counter == 2  # it went on counting: 0 at step 3, then 6 and 8
    assert loop.run.id == first.id
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["checkpoint-3", "checkpoint-8"]  # the best, the latest


def test_a_run_the_user_opened_again_is_continued_and_another_one_is_named(runs_dir, tmp_path, caplog):
    def train(run):
        loop = looping(run=run, epochs=2, save_strategy="epoch", save=lambda folder: None, output_dir=tmp_path / "out")
        loop.resume()
        with loop:
            iterate(loop)

    with fanfold.init("p", config={"lr": 0.1}) as first:
        train(first)
        assert dict(first.config) == {"lr": 0.1}  # the loop's own arguments are not the user's config
    with fanfold.init("p", id=first.id) as again:
        train(again)
    assert not [message for message in caplog.messages if "saved by run" in message]
    with fanfold.init("p") as other:
        train(other)
    warned = [
        message for message in caplog.messages if f"saved by run {first.id}, but training now logs to run {other.id}" in message
    ]
    assert len(warned) == 1
    assert f"fanfold.init('p', id=\"{first.id}\")" in warned[0]


def test_a_state_can_be_kept_anywhere(runs_dir):
    def train(kept=None, stop=None):
        seen = []
        loop = looping(epochs=2, logging_steps=1)
        if kept is not None:
            loop.load_state_dict(json.loads(json.dumps(kept)))
        for epoch in loop.epochs():
            for batch in loop.steps(range(3), skip=lambda loader, done: list(loader)[done:]):
                seen.append((epoch, batch))
                loop.log({"loss": 1.0})
                if loop.should_evaluate or loop.state.global_step == stop:
                    return loop.state_dict(), seen
        return loop.state_dict(), seen

    for stop in (1, 3, 4):
        kept, before = train(stop=stop)
        after = train(kept)[1]
        assert before + after == [(epoch, batch) for epoch in range(2) for batch in range(3)]
    done = train()[0]
    assert train(done)[1] == []


def test_what_was_saved_is_loaded_on_a_resume_and_the_best_at_the_end(runs_dir, tmp_path):
    def train():
        loaded, scores = [], iter([2.0, 1.0, 3.0])
        loop = looping(epochs=3, eval_strategy="epoch", save_strategy="epoch", evaluate=lambda: {"loss": next(scores)}, output_dir=tmp_path,
                       save=lambda folder: None, load=lambda folder: loaded.append(folder.name), load_best_model_at_end=True)  # fmt: skip
        loop.resume()
        iterate(loop, batches=2)
        return loaded

    assert train() == ["checkpoint-4"]
    assert train() == ["checkpoint-6", "checkpoint-4"]  # nothing was left to train
    with pytest.raises(SettingError, match="needs load=…"):
        looping(epochs=1, eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True)


# Using it wrongly


def test_what_is_due_and_not_done_is_said(runs_dir, caplog, tmp_path):
    iterate(looping(epochs=1, eval_steps=2, save_steps=4, output_dir=tmp_path))
    assert "evaluation was due at step 2, but nothing handled it" in caplog.text
    assert "checkpoint was due at step 4, but nothing handled it" in caplog.text


def test_a_generator_that_is_used_up_is_said(runs_dir, caplog):
    loop, loader = looping(epochs=3), iter([1, 2])
    for _epoch in loop.epochs():
        for _batch in loop.steps(loader):
            pass
    assert loop.state.global_step == 2
    assert "gives its items only once" in caplog.text


def test_wrong_uses_are_refused(runs_dir):
    with pytest.raises(SettingError, match="Give epochs=… or max_steps=…"):
        looping()
    with pytest.raises(
        SettingError, match=r"^Loop does not know epoch\. Nothing was started\. Did you mean epochs\? Known: .*callbacks"
    ):
        fanfold.Loop(epoch=3)
    with pytest.raises(SettingError, match=r"does not know evaluation_steps.*eval_steps"):
        looping(epochs=1, evaluation_steps=3)
    with pytest.raises(TypeError, match=r"<object object at .* of type object is not a callback"):
        looping(epochs=1, callbacks=[object()])
    with pytest.raises(RunError, match=r"steps.. belongs once into each"):
        next(looping(epochs=1).steps([1]))
    with pytest.raises(RunError, match="an epoch passed without steps"):
        list(looping(epochs=1).epochs())
    loop = looping(epochs=1)
    for _epoch in loop.epochs():
        with pytest.raises(RunError, match="being iterated already"):
            next(loop.epochs())
        break
    with pytest.raises(SettingError, match="below 1 is a share of all steps"):
        loop = looping(epochs=1, logging_steps=0.5)
        for _epoch in loop.epochs():
            next(loop.steps(iter([1])))
    with pytest.raises(SettingError, match=r"evaluate.. returned nothing"):
        iterate(looping(epochs=1, eval_steps=1, evaluate=lambda: None))


def test_the_flow_can_be_taken_out_and_training_still_ends(runs_dir):
    recorder = Recorder()
    loop = looping(recorder, max_steps=3)
    loop.pop_callback(DefaultFlowCallback)
    iterate(loop)
    assert recorder.seen[-1] == "train_end 3"


def test_a_loop_imports_no_framework(tmp_path):
    code = """
import fanfold, sys
with fanfold.Loop(epochs=1, run=False, callbacks=[fanfold.callbacks.PrinterCallback]) as loop:
    for epoch in loop.epochs():
        for batch in loop.steps(range(3)):
            loop.log({"loss": batch})
print([name for name in ("torch", "numpy", "transformers", "accelerate", "jax") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == ["{'loss': '1', 'epoch': '1'}", "[]"]
    assert not list(Path(tmp_path).iterdir())
