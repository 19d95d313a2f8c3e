"""The Trainer: it learns, resumes to the same weights, agrees over ranks, keeps the best, and refuses what it cannot do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paths import HELPERS, ROOT

pytest.importorskip("accelerate")

import fanfold
import warm_python
from fanfold.callbacks import EarlyStoppingCallback, PrinterCallback, TrainerCallback
from fanfold.errors import SettingError
from tiny_training import Data, Net, arguments, trainer_in, weights


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_it_learns_and_the_run_has_every_step(runs_dir, tmp_path, capsys):
    trainer = trainer_in(tmp_path, run=None, num_train_epochs=6, logging_steps=11, eval_strategy="epoch", eval_dataset=Data(9),
                         compute_metrics=lambda found: {"mae": abs(found.predictions - found.label_ids).mean()})  # fmt: skip
    output = trainer.train()
    after = trainer.evaluate(metric_key_prefix="test")
    trainer.run.finish()
    run = fanfold.open(trainer.run.path)
    assert output.global_step == 66
    assert losses(trainer)[-1] < losses(trainer)[0] / 2
    loss = run.series("train/loss")
    assert list(loss.steps) == list(range(1, 67))  # each step, though callbacks hear of each eleventh
    assert losses(trainer)[0] == pytest.approx(loss.values[:11].mean())
    assert output.training_loss == pytest.approx(loss.values.mean())
    assert len(run.series("eval/mae").values) == 6
    assert run.series("test/loss").values[-1] == pytest.approx(after["test_loss"])  # evaluated after training, in the same run
    assert run.config["learning_rate"] == 0.05
    assert run.config["parameters"] == sum(parameter.numel() for parameter in trainer.model.parameters())


@pytest.mark.parametrize("step", [4, 6, 9], ids=["mid-epoch", "end of an epoch", "second epoch"])
def test_a_resumed_training_ends_with_the_same_weights_to_the_bit(step, runs_dir, tmp_path, capsys):
    def make(**more):
        return trainer_in(tmp_path, model=Net(dropout=0.3), train=Data(jitter=0.1), gradient_accumulation_steps=2, save_strategy="steps",
                          save_steps=1, lr_scheduler_type="cosine", weight_decay=0.1, run=None, **more)  # fmt: skip

    whole = make()
    whole.train()
    torch.randn(7)  # other random numbers than those of the first training
    again = make()
    again.train(resume_from_checkpoint=tmp_path / f"checkpoint-{step}")
    assert torch.equal(weights(whole), weights(again))
    assert not torch.equal(weights(whole), weights(trainer_in(tmp_path, model=Net(dropout=0.3))))
    assert again.state.global_step == 12
    assert losses(again)[-1] == losses(whole)[-1]
    assert again.run.id == whole.run.id  # the checkpoint knows its run, and training continues in it
    again.run.finish()
    assert list(fanfold.open(again.run.path).series("train/loss").steps) == list(range(1, 13))


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own(tmp_path, capsys):
    class Noted(Data):
        seen: list = []  # noqa: RUF012

        def __getitem__(self, index):
            self.seen.append(index)
            return super().__getitem__(index)

    trainer_in(tmp_path, train=Noted(9)).train()
    first, second = Noted.seen[:9], Noted.seen[9:]
    assert sorted(first) == sorted(second) == list(range(9))
    assert first != second
    Noted.seen = []
    trainer_in(tmp_path, train=Noted(9), train_sampling_strategy="sequential", num_train_epochs=1).train()
    assert Noted.seen == list(range(9))


def test_accumulated_batches_learn_as_one_big_batch_also_the_last_of_an_epoch(tmp_path, capsys):
    options = {"train": Data(10), "optim": "sgd", "max_grad_norm": 0, "lr_scheduler_type": "constant"}
    big = trainer_in(tmp_path, per_device_train_batch_size=4, **options)
    small = trainer_in(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, **options)
    for trainer in (big, small):
        assert trainer.train().global_step == 6  # of 4, 4 and 2 samples, twice
    assert torch.allclose(weights(big), weights(small), atol=1e-6)


def test_the_latest_whole_checkpoint_is_found_and_a_broken_one_is_not(tmp_path, capsys):
    first = trainer_in(tmp_path, save_strategy="steps", save_steps=5)
    first.train()
    (tmp_path / "checkpoint-22" / "trainer_state.json").unlink()  # as a kill while saving leaves it
    again = trainer_in(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert torch.equal(weights(first), weights(again))
    with pytest.raises(SettingError, match="no whole checkpoint"):
        again.train(resume_from_checkpoint=tmp_path / "checkpoint-22")
    with pytest.raises(SettingError, match="no whole checkpoint in"):
        trainer_in(tmp_path / "elsewhere").train(resume_from_checkpoint=True)


SCRIPT = """
import json, sys, torch
sys.path.insert(0, {tests!r})
import fanfold
from tiny_training import Data, Net, arguments, weights
torch.set_num_threads(1)
out, size, accumulate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def make(run, **more):
    more = {{"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulate, "save_steps": 3, "save_strategy": "steps",
             "logging_steps": 2, "num_train_epochs": 3, "eval_strategy": "epoch", "use_cpu": False, **more}}
    return fanfold.Trainer(Net(), arguments(out, **more), train_dataset=Data(23), eval_dataset=Data(7), run=run,
                           compute_metrics=lambda found: {{"first": found.label_ids[0], "count": len(found.predictions)}})
trainer = make(None, project="p")
output = trainer.train()
again = make(False)
again.train(resume_from_checkpoint=out + "/checkpoint-3")
if trainer.is_world_process_zero():
    kept = {{"weights": weights(trainer).tolist(), "again": weights(again).tolist(), "history": trainer.state.log_history,
             "run": str(trainer.run.path), "loss": output.training_loss}}
    open(out + "/result.json", "w").write(json.dumps(kept))
trainer.run.finish()
"""


def launch(folder, processes, size, accumulate):
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT.format(tests=str(HELPERS)))
    command = [sys.executable, str(script)]
    if processes > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", str(script)]
    done = warm_python.run([*command, str(folder), str(size), str(accumulate)], capture_output=True, text=True, timeout=240, libraries="torch",
                           env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "FANFOLD_SYSTEM": "0"})  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result.json").read_text())


def test_two_processes_train_as_one_with_the_doubled_batch(runs_dir, tmp_path):
    one = launch(tmp_path / "one", 1, 4, 2)
    two = launch(tmp_path / "two", 2, 2, 2)  # of 23 samples, the last 3 are shared unevenly
    assert torch.allclose(torch.tensor(one["weights"]), torch.tensor(two["weights"]), atol=1e-6)
    assert two["weights"] == two["again"]  # a resume, under two processes, to the bit
    alone, both = ([entry for entry in found["history"] if "eval_loss" in entry] for found in (one, two))
    assert [entry["eval_count"] for entry in both] == [7, 7, 7]
    for before, after in zip(alone, both, strict=True):
        assert before["eval_loss"] == pytest.approx(after["eval_loss"], rel=1e-4)
        assert before["eval_first"] == pytest.approx(after["eval_first"])  # in the order of the dataset
    run = fanfold.open(two["run"])
    fold = run.series("train/loss", fold="mean")
    assert set(fold.count) == {2}
    assert list(fold.min) != list(fold.max)  # each rank's own loss is there
    told = [entry["loss"] for entry in two["history"] if "loss" in entry]
    assert told[0] == pytest.approx(fold.values[:2].mean(), rel=1e-5)  # and callbacks heard of the mean over ranks
    assert len(list((tmp_path / "two" / "checkpoint-3").glob("rng_state_*.pth"))) == 2


def test_ranks_that_would_train_apart_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("FANFOLD_WORLD_SIZE", "2")
    with pytest.raises(SettingError, match=r"rank 0 of 2 .* a group of 1: the ranks would train apart"):
        trainer_in(tmp_path)


def test_the_best_model_comes_back_and_its_checkpoint_is_kept(tmp_path, capsys):
    scores = iter([3.0, 1.0, 2.0, 5.0, 4.0])
    trainer = trainer_in(tmp_path, num_train_epochs=5, eval_strategy="epoch", save_strategy="epoch", save_total_limit=2,
                         load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=False,
                         compute_metrics=lambda _: {"score": next(scores)}, eval_dataset=Data(4))  # fmt: skip
    trainer.train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-22", "checkpoint-55"]  # the best, and the latest
    assert trainer.state.best_metric == 1.0
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-22"
    from safetensors.torch import load_file

    best = load_file(tmp_path / "checkpoint-22" / "model.safetensors")
    assert all(torch.equal(best[name], value) for name, value in trainer.model.state_dict().items())


def test_early_stopping_goes_on_counting_after_a_resume(tmp_path, capsys):
    def make(scores):
        return trainer_in(tmp_path, num_train_epochs=9, eval_strategy="epoch", save_strategy="epoch", metric_for_best_model="score",
                          load_best_model_at_end=True, callbacks=[EarlyStoppingCallback(3)], eval_dataset=Data(4),
                          greater_is_better=True, compute_metrics=lambda _: {"score": next(scores)})  # fmt: skip

    whole = make(iter([5, 4, 3, 2]))
    whole.train()
    assert whole.state.global_step == 4 * 11
    again = make(iter([2, 9]))
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-33")
    assert again.state.global_step == 4 * 11


def test_callbacks_of_transformers_work_here(runs_dir, tmp_path, capsys):
    from transformers import trainer_callback as theirs

    trainer = trainer_in(tmp_path, callbacks=[theirs.EarlyStoppingCallback(1), theirs.PrinterCallback, theirs.ProgressCallback()],
                         eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3, load_best_model_at_end=True,
                         metric_for_best_model="score", greater_is_better=True, compute_metrics=lambda _: {"score": 1.0},
                         eval_dataset=Data(4))  # fmt: skip
    assert trainer.pop_callback(PrinterCallback) is not None
    trainer.train()
    assert trainer.state.global_step == 6  # not better the second time
    assert "'loss': '" in capsys.readouterr().out
    assert (
        "EarlyStoppingCallback"
        in json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["stateful_callbacks"]
    )


class Counts(TrainerCallback):
    def __init__(self):
        self.steps = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.steps += 1


def test_a_callbacks_own_log_does_not_take_the_place_of_the_one_that_is_due(runs_dir, tmp_path, capsys):
    """Ranks reduce the loss for that one: a rank that left it out would break the others' collectives."""

    class LogsSometimes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:  # as one rank of many
                trainer.log({"mine": 1.5})

    trainer = trainer_in(tmp_path, callbacks=[LogsSometimes()], logging_steps=1, max_steps=5)
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [1, 2, 3, 4, 5]
    assert [(entry["step"], entry["mine"]) for entry in trainer.state.log_history if "mine" in entry] == [(3, 1.5)]


def test_callbacks_come_as_class_or_instance_and_go_again(tmp_path, capsys):
    mine = Counts()
    trainer = trainer_in(tmp_path, callbacks=[mine], max_steps=3)
    trainer.train()
    assert mine.steps == 3
    assert trainer.pop_callback(Counts) is mine
    assert trainer.pop_callback(Counts) is None
    trainer.add_callback(Counts)
    trainer.remove_callback(Counts)
    assert not any(isinstance(callback, Counts) for callback in trainer.callback_handler.callbacks)
    with pytest.raises(TypeError, match="'not a callback' of type str"):
        trainer.add_callback("not a callback")


def test_a_callback_that_raises_fails_the_run_or_is_left_out(runs_dir, tmp_path, capsys, caplog):
    class Breaks(TrainerCallback):
        def on_log(self, args, state, control, **kwargs):
            raise RuntimeError("full")

    trainer = trainer_in(tmp_path, callbacks=[Breaks], run=None)
    with pytest.raises(RuntimeError, match="callback Breaks raised in on_log"):
        trainer.train()
    assert trainer.loop._reporter.session.run.status == "failed"
    going = trainer_in(tmp_path, callbacks=[Breaks], on_error="disable", run=None)
    assert going.train().global_step == 22
    going.run.finish()
    assert fanfold.open(going.run.path).status == "finished"


class Plain(torch.nn.Module):
    """A model that takes and gives what it is told to."""

    def __init__(self, give):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
        self.give = give

    def forward(self, x, target=None):
        guess = self.line(x).squeeze(-1)
        return self.give(guess, None if target is None else (guess - target).square().mean())


TUPLES = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.arange(8.0))


@pytest.mark.parametrize(
    "give",
    [
        lambda guess, loss: loss,
        lambda guess, loss: (loss, guess),
        lambda guess, loss: type("Out", (), {"loss": loss, "guess": guess})(),
    ],
    ids=["the loss alone", "a tuple", "an object"],
)
def test_a_loss_is_found_wherever_the_model_puts_it(give, tmp_path, capsys):
    trainer = trainer_in(tmp_path, model=Plain(give), train=TUPLES, num_train_epochs=8)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


def test_a_loss_can_be_computed_apart_from_the_model(tmp_path, capsys):
    trainer = trainer_in(tmp_path, model=Plain(lambda guess, loss: guess), train=TUPLES, eval_dataset=TUPLES, max_steps=4,
                         compute_loss_func=lambda outputs, labels: (outputs - labels).abs().mean(),
                         compute_metrics=lambda found: {"shape": found.predictions.shape[0]})  # fmt: skip
    trainer.train()
    assert trainer.evaluate()["eval_shape"] == 8
    found = trainer.predict(TUPLES)
    assert found.metrics["test_loss"] == pytest.approx(abs(found.predictions - found.label_ids).mean(), rel=1e-5)


def test_a_subclass_computes_its_loss_and_logs_what_it_likes(runs_dir, tmp_path, capsys):
    class Mine(fanfold.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
            self.log({"double": 2 * loss.detach()})
            return (loss, outputs) if return_outputs else loss

    trainer = Mine(Net(), arguments(tmp_path, gradient_accumulation_steps=2), train_dataset=Data(), run=False)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["double"] for entry in entries] == pytest.approx([2 * entry["loss"] for entry in entries])


def test_a_model_of_transformers_trains_and_comes_back(tmp_path, capsys):
    from transformers import BertConfig, BertForMaskedLM

    def make():
        torch.manual_seed(0)
        return BertForMaskedLM(BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                                          max_position_embeddings=8))  # fmt: skip

    tokens = [{"input_ids": [1, 2, 3, index], "labels": [1, 2, 3, index], "name": "x"} for index in range(8)]
    options = {"train": tokens, "save_strategy": "steps", "save_steps": 4, "bf16": True, "max_steps": 8}
    whole = trainer_in(tmp_path, model=make(), **options)  # tied weights, dropout, lists of numbers, autocast
    whole.train()
    again = trainer_in(tmp_path, model=make(), **options)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-4")
    assert torch.equal(weights(whole), weights(again))
    assert (tmp_path / "checkpoint-8" / "config.json").is_file()
    assert whole.predict(tokens[:3]).predictions.shape == (3, 4, 20)


def test_a_stream_without_length_needs_max_steps_and_resumes(tmp_path, capsys):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([Data(22)[index] for index in range(22)])

    def make(**more):
        return trainer_in(tmp_path, train=Stream(), save_strategy="steps", save_steps=3, **more)

    with pytest.raises(SettingError, match="Set max_steps"):
        make().train()
    whole = make(max_steps=13, gradient_accumulation_steps=2)
    whole.train()
    again = make(max_steps=13, gradient_accumulation_steps=2)
    again.train(resume_from_checkpoint=tmp_path / "checkpoint-9")
    assert whole.state.global_step == 13
    assert torch.equal(weights(whole), weights(again))


def test_a_second_training_starts_anew_with_model_init(runs_dir, tmp_path, capsys):
    trainer = trainer_in(tmp_path, model_init=lambda: Net(dropout=0.1), run=None, max_steps=4)
    trainer.train()
    first, run = weights(trainer), trainer.run
    trainer.train()
    assert torch.equal(first, weights(trainer))
    assert trainer.state.global_step == 4
    assert trainer.run.id != run.id
    assert run.status == "finished"
    trainer.run.finish()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lerning_rate": 1}, "does not know lerning_rate.*Did you mean learning_rate.*Known: adam_beta1"),
        ({"push_to_hub": True}, "push_to_hub=True is Transformers' and not done here.*Known: adam_beta1"),
        ({"optim": "adam_9bit"}, "optim='adam_9bit' is not known.*Known: adafactor, .*sgd"),
        ({"lr_scheduler_type": "wavy"}, "lr_scheduler_type='wavy'.*cosine"),
        ({"eval_strategy": "sometimes"}, "Known: no, steps, epoch"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "steps"}, "differ or are off"),
        (
            {"load_best_model_at_end": True, "eval_steps": 4, "save_steps": 6, "save_strategy": "steps"},
            "not a multiple of eval_steps=4",
        ),
        ({"logging_steps": 0}, "logging_steps=0 is not above 0"),
        ({"per_device_train_batch_size": 0}, "holds no sample"),
        ({"fp16": True, "bf16": True}, "exclude each other"),
    ],
)
def test_arguments_that_cannot_be_are_refused_by_name(given, said, tmp_path):
    with pytest.raises(SettingError, match=f"(?s){said}"):
        arguments(tmp_path, **given)


def test_defaults_of_transformers_are_taken_and_read(tmp_path, caplog):
    args = arguments(tmp_path, push_to_hub=False, fsdp=None, do_train=True)
    assert (args.push_to_hub, args.do_train, args.deepspeed) == (False, True, None)
    assert "do_train=True has no effect" in caplog.text
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = args.nonsense
    assert json.loads(args.to_json_string())["learning_rate"] == 0.05


def test_what_a_trainer_lacks_is_said(tmp_path, capsys):
    with pytest.raises(SettingError, match="needs an eval_dataset"):
        trainer_in(tmp_path, eval_strategy="epoch")
    with pytest.raises(SettingError, match="metric_for_best_model"):
        trainer_in(tmp_path, callbacks=[EarlyStoppingCallback]).train()
    with pytest.raises(SettingError, match=r"metric_for_best_model='f1' is not among.*eval_loss"):
        trainer_in(tmp_path, metric_for_best_model="f1", eval_strategy="epoch", eval_dataset=Data(4)).train()
    with pytest.raises(SettingError, match=r"no loss in it.*compute_loss"):
        trainer_in(tmp_path, model=Plain(lambda guess, loss: {"guess": guess}), train=TUPLES).train()
    with pytest.raises(ValueError, match=r"(?s)nowhere.*tensorboard.*wandb"):
        trainer_in(tmp_path, report_to="nowhere")
    with pytest.raises(TypeError, match="'early' of type str is not a callback"):
        trainer_in(tmp_path, callbacks=["early"])
    with pytest.raises(SettingError, match="none of the columns y"):
        trainer_in(tmp_path, train=[{"y": 1.0}] * 4).train()


def test_every_argument_is_documented():
    import dataclasses

    page = (ROOT / "docs" / "trainer.md").read_text()
    names = [field.name for field in dataclasses.fields(fanfold.TrainingArguments)]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize(("count", "size", "world"), [(23, 2, 3), (1, 2, 2), (12, 2, 2), (13, 4, 3)])
def test_ranks_share_each_global_batch_and_their_weights_make_its_mean(count, size, world):
    from fanfold.train.data import Batches

    parts = [Batches(count, size, rank=rank, world=world, seed=5) for rank in range(world)]
    whole = Batches(count, size * world, seed=5)
    for at, (together, *shares) in enumerate(zip(whole, *parts, strict=True)):
        joined = [index for share in shares for index in share]
        assert joined[: len(together)] == together
        assert len(joined) == max(len(together), world)  # filled up only where a rank would have none
        for part, share in zip(parts, shares, strict=True):
            assert part.weight(at) / world == pytest.approx(len(share) / len(joined))
    parts[0].epoch = 1
    assert list(parts[0]) != list(Batches(count, size, rank=0, world=world, seed=5)) or count == 1


def test_a_torch_free_python_reads_the_arguments(tmp_path):
    code = "import fanfold, sys; fanfold.TrainingArguments(output_dir='x'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
