"""What an interrupted training left behind in the process does not change the next one: weights equal a fresh process's."""

import os
import subprocess
import sys

import pytest

from paths import HELPERS

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")

from fanfold.callbacks import TrainerCallback  # noqa: E402
from fanfold.errors import RunError  # noqa: E402
from tiny_training import Data, trainer_in, weights  # noqa: E402

SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from tiny_training import Net, Data, trainer_in, weights
torch.set_num_threads(1)


def interrupt_accumulate():
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = accelerator.prepare(Net())
    try:
        with accelerator.accumulate(model):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert not accelerator.sync_gradients


def interrupt_transformers():
    import transformers

    class Stops(transformers.TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    arguments = transformers.TrainingArguments({out!r}, gradient_accumulation_steps=4, per_device_train_batch_size=2,
                                               use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = transformers.Trainer(Net(), arguments, train_dataset=Data(16), callbacks=[Stops()])
    try:
        trainer.train()
    except KeyboardInterrupt:
        assert not trainer.accelerator.sync_gradients


made_before = trainer_in({out!r}, train=Data(12), gradient_accumulation_steps=2)
if sys.argv[1] != "nothing":
    globals()["interrupt_" + sys.argv[1]]()
trainer = trainer_in({out!r}, train=Data(12), gradient_accumulation_steps=2)
for each in (trainer, made_before):
    each.train()
    print("weights", weights(each).numpy().tobytes().hex())
"""


def trained_after(what, folder):
    script = folder / f"after_{what}.py"
    script.write_text(SCRIPT.format(tests=str(HELPERS), out=str(folder)))
    done = subprocess.run([sys.executable, str(script), what], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "FANFOLD_SYSTEM": "0"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith("weights ")]


@pytest.mark.parametrize("what", ["accumulate", "transformers"])
def test_training_after_an_interrupted_one_ends_with_the_weights_of_a_fresh_process(what, tmp_path):
    fresh = trained_after("nothing", tmp_path)
    assert fresh[0] == fresh[1]
    assert trained_after(what, tmp_path) == fresh


class TrainsSomethingElse(TrainerCallback):
    """As a callback does that trains a probe on the side: its Accelerator shares the state of accumulation with ours."""

    def __init__(self, event):
        setattr(self, event, self.train)

    def train(self, args, state, control, **kwargs):
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
        model = torch.nn.Linear(1, 1)
        for _ in range(2):  # ends in the middle of its own step
            with accelerator.accumulate(model):
                pass
        assert not accelerator.sync_gradients


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("event", ["on_step_begin", "on_substep_end", "on_step_end", "on_log", "on_evaluate"])
def test_a_callback_that_accumulates_on_its_own_does_not_change_the_training(event, batches, tmp_path, capsys):
    options = {"eval_dataset": Data(4), "eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": batches}
    plain = trainer_in(tmp_path, **options)
    plain.train()
    beside = trainer_in(tmp_path, **options, callbacks=[TrainsSomethingElse(event)])
    beside.train()
    assert torch.equal(weights(plain), weights(beside))


def test_an_update_that_never_reaches_the_optimizer_stops_training(tmp_path, capsys):
    def loss(outputs, labels):
        accelerate.state.GradientState().sync_gradients = False
        return (outputs["guess"] - labels).square().mean()

    trainer = trainer_in(tmp_path, compute_loss_func=loss)
    before = weights(trainer).clone()
    with pytest.raises(RunError, match="without updating the weights"):
        trainer.train()
    assert torch.equal(before, weights(trainer))
    assert trainer.state.global_step == 0


def test_the_check_of_the_first_update_leaves_no_hook_behind(tmp_path, capsys):
    trainer = trainer_in(tmp_path, train=Data(4))
    trainer.train()
    inner = trainer.optimizer.optimizer
    assert not inner._optimizer_step_post_hooks
    assert not trainer._first_step.pending
