"""What Lightning's CSVLogger and Transformers' Trainer leave behind becomes runs: written by the libraries themselves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transfer_tools import imported, numbers, survives_damage

LIGHTNING = """
import sys, torch, lightning as L, warnings
from lightning.pytorch.loggers import CSVLogger
class Model(L.LightningModule):
    def __init__(self, lr=0.1, layers=(1, 2)):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("train/loss", loss)
        return loss
    def validation_step(self, batch, index):
        self.log("val/loss", self.layer(batch[0]).pow(2).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=2)
logger = CSVLogger(sys.argv[1], name="exp")
L.Trainer(max_epochs=2, logger=logger, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
          enable_checkpointing=False, accelerator="cpu").fit(Model(), data, data)
"""

TRANSFORMERS = """
import sys, torch
from transformers import Trainer, TrainingArguments, BertConfig, BertForSequenceClassification
config = BertConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
data = [{"input_ids": torch.tensor([1, 2]), "labels": torch.tensor(i % 2)} for i in range(16)]
for steps in (4, 6):  # the second training continues the first
    arguments = TrainingArguments(sys.argv[1], max_steps=steps, save_steps=2, eval_steps=2, eval_strategy="steps", logging_steps=1,
        per_device_train_batch_size=2, report_to="none", metric_for_best_model="loss", disable_tqdm=True, use_cpu=True)
    trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=steps == 6)
"""


def run_script(code: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def lightning_logs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lightning")
    run_script(LIGHTNING, str(folder))
    return folder


@pytest.fixture(scope="module")
def trainer_output(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trainer") / "out"
    run_script(TRANSFORMERS, str(folder))
    return folder


def test_a_csv_logger_folder_becomes_a_run_with_its_sparse_rows(lightning_logs, tmp_path):
    import csv

    with (lightning_logs / "exp" / "version_0" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    (run,), (account,) = imported(lightning_logs, into=tmp_path)
    assert (run.project, run.name, account.kind, account.left) == ("exp", "exp/version_0", "csv_logger", [])
    assert run.config == {"lr": 0.1, "layers": [1, 2]}
    for key in ("train/loss", "val/loss"):
        assert numbers(run)[key] == [(int(row["step"]), float(row[key])) for row in rows if row[key]]
    assert len(numbers(run)["train/loss"]) == 8
    assert len(numbers(run)["val/loss"]) == 2
    assert [account.outcome for account in imported(lightning_logs, into=tmp_path)[1]] == ["unchanged"]


def test_a_growing_csv_logger_adds_only_what_is_new(lightning_logs, tmp_path):
    folder = tmp_path / "exp" / "version_0"
    shutil.copytree(lightning_logs / "exp" / "version_0", folder)
    whole = (folder / "metrics.csv").read_text().splitlines(keepends=True)
    (folder / "metrics.csv").write_text("".join(whole[:4]))
    imported(folder, into=tmp_path / "back")
    (folder / "metrics.csv").write_text("".join(whole))
    (run,), _ = imported(folder, into=tmp_path / "back")
    (at_once,), _ = imported(folder, into=tmp_path / "at once")
    assert numbers(run) == numbers(at_once)


def test_objects_in_hparams_are_never_created(tmp_path):
    folder = tmp_path / "exp" / "version_3"
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text("step,loss\n0,1.0\n")
    mark = tmp_path / "executed"
    (folder / "hparams.yaml").write_text(f"lr: 0.1\nbad: !!python/object/apply:os.system ['touch {mark}']\n")
    (run,), _ = imported(folder, into=tmp_path / "back")
    assert run.config["lr"] == 0.1
    assert not mark.exists()


def test_a_trainer_folder_is_one_run_without_repetitions(trainer_output, tmp_path):
    (run,), (account,) = imported(trainer_output, into=tmp_path)
    states = [json.loads(path.read_text()) for path in trainer_output.rglob("trainer_state.json")]
    assert len(states) >= 3
    whole = max(states, key=lambda state: state["global_step"])
    losses = [(entry["step"], entry["loss"]) for entry in whole["log_history"] if "loss" in entry]
    assert numbers(run)["train/loss"] == losses
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    assert numbers(run)["eval/loss"] == [(e["step"], e["eval_loss"]) for e in whole["log_history"] if "eval_loss" in e]
    assert [step for step, _ in numbers(run)["train/epoch"]] == [1, 2, 3, 4, 5, 6]
    assert run.summary["best_metric"] == whole["best_metric"]
    assert (run.config["max_steps"], run.config["model"]["hidden_size"]) == (6, 8)
    assert (run.name, run.status, account.kind) == ("out", "finished", "hf_trainer")
    assert {left.what for left in account.left} == {"training_args.bin", "checkpoint file"}


def test_one_checkpoint_names_the_same_run(trainer_output, tmp_path):
    imported(trainer_output, into=tmp_path)
    _, (account,) = imported(trainer_output / "checkpoint-4", into=tmp_path)
    assert account.outcome == "unchanged"


def test_a_run_that_our_callback_recorded_is_recognised(trainer_output, tmp_path):
    shutil.copytree(trainer_output, tmp_path / "out")
    for path in (tmp_path / "out").rglob("trainer_state.json"):
        state = json.loads(path.read_text())
        state["stateful_callbacks"]["fanfold"] = {"run": "our-run", "project": "p"}
        path.write_text(json.dumps(state))
    (run,), _ = imported(tmp_path / "out", into=tmp_path / "back")
    assert run.id == "our-run"


def test_where_checkpoints_differ_the_newest_counts_and_it_is_said(trainer_output, tmp_path):
    shutil.copytree(trainer_output, tmp_path / "out")
    path = tmp_path / "out" / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    before = next(entry for entry in state["log_history"] if "loss" in entry)
    before["loss"] = 99.0
    path.write_text(json.dumps(state))
    (run,), (account,) = imported(tmp_path / "out", into=tmp_path / "back")
    assert numbers(run)["train/loss"][0] == (1, 99.0)
    differ = [left for left in account.left if "other values" in left.why]
    assert [left.count for left in differ] == [len(list(trainer_output.rglob("trainer_state.json"))) - 1]


@pytest.mark.parametrize("kind", ["csv_logger", "hf_trainer"])
def test_damage_never_raises(lightning_logs, trainer_output, tmp_path, kind):
    source = lightning_logs / "exp" / "version_0"
    if kind == "hf_trainer":
        source = tmp_path / "out"
        for path in trainer_output.rglob("trainer_state.json"):
            target = source / path.relative_to(trainer_output)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    found, told = survives_damage(kind, source, tmp_path / "damaged")
    assert found > 0.8
    assert told > 0.1
