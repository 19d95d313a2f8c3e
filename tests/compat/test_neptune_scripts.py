"""Scripts written for Neptune run on fanfold: series, namespaces, tags, files, and the logger in Lightning's Trainer."""

from __future__ import annotations

import datetime as dt
import subprocess
import sys

import numpy as np
import pytest

import fanfold
import fanfold.compat.neptune as neptune


@pytest.fixture
def run(runs_dir):
    with neptune.init_run(project="workspace/my-project", name="a name", tags=["one"], description="why") as run:
        yield run


def stored(run) -> fanfold.StoredRun:
    run.stop()
    return fanfold.open(run["sys/id"].fetch())


def test_a_typical_script(run):
    run["parameters"] = {"lr": 0.1, "optimizer": {"name": "adam"}}
    run["parameters/batch"] = 32
    for epoch in range(5):
        run["train/loss"].append(1 / (epoch + 1))
        run["train/acc"].append(epoch / 5)
    run["train"].append({"f1": 0.5, "recall": 0.25})
    run["eval/best"] = 0.9
    run["sys/tags"].add(["two", "one"])
    found = stored(run)
    assert (found.project, found.name, found.notes, found.tags) == ("my-project", "a name", "why", ["one", "two"])
    assert found.config == {"parameters": {"lr": 0.1, "optimizer": {"name": "adam"}, "batch": 32}}
    assert found.series("train/loss").steps.tolist() == found.series("train/acc").steps.tolist() == [0, 1, 2, 3, 4]
    assert found.series("train/loss").values.tolist() == [1 / (epoch + 1) for epoch in range(5)]
    assert (found.summary["train/f1"], found.summary["eval/best"], found.status) == (0.5, 0.9, "finished")


def test_steps_timestamps_and_lists(run):
    moment = dt.datetime(2024, 1, 1, tzinfo=dt.timezone.utc)
    run["loss"].append(1.0, step=10, timestamp=moment)
    run["loss"].extend([0.5, 0.25], steps=[20, 30], timestamps=[1704067201, 1704067202.5])
    run["old"].log(3)
    run["old"].log([4, 5])
    run["fraction"].append(1, step=0.5)
    found = stored(run)
    assert found.series("loss").steps.tolist() == [10, 20, 30]
    assert found.series("loss").times.tolist() == [1704067200.0, 1704067201.0, 1704067202.5]
    assert found.series("old").values.tolist() == [3, 4, 5]
    assert (found.series("fraction").steps.tolist(), found.series("fraction/step").values.tolist()) == ([0], [0.5])


def test_files_images_and_figures(run, tmp_path):
    (tmp_path / "model.bin").write_text("weights")
    run["model"].upload(str(tmp_path / "model.bin"))
    run["all"].upload_files(str(tmp_path / "*.bin"))
    run["image"].upload(neptune.File.as_image(np.zeros((4, 4, 3), np.uint8)))
    run["images"].append(neptune.File.as_image(np.zeros((4, 4, 3), np.uint8)), name="caption", step=2)
    run["page"].upload(neptune.File.as_html("<b>x</b>"))
    run["text"].upload(neptune.File.from_content("some text"))
    found = stored(run)
    assert [artifact["name"] for artifact in found.artifacts] == ["model", "all/model.bin"]
    assert {key: found.media(key)[0].kind for key in found.keys("media")} == {
        "image": "image", "images": "image", "page": "html", "text": "text",
    }  # fmt: skip
    assert found.media("images")[0].load().caption == "caption"


def test_reading_back_what_was_assigned(run):
    run["a/b"] = 1
    run["a/c"] = {"d": "x"}
    run["loss"].append(2.0)
    assert (run["a/b"].fetch(), run["a"].fetch(), run["loss"].fetch_last()) == (1, {"b": 1, "c": {"d": "x"}}, 2.0)
    assert (run.exists("a/c/d"), run.exists("nothing"), run["sys/tags"].fetch()) == (True, False, {"one"})
    assert run["loss"].fetch_values()["value"].tolist() == [2.0]
    with pytest.raises(KeyError, match="not set by this process"):
        run["nothing"].fetch()


def test_what_has_no_counterpart_warns_once_and_goes_on(run, caplog):
    for _ in range(2):
        run["a"].pop()
        run["sys/owner"] = "me"
    run["ok"].append(1)
    assert len(caplog.messages) == 2
    assert all("has no counterpart" in message for message in caplog.messages)
    with pytest.raises(AttributeError, match="init_run"):
        neptune.init_project  # noqa: B018 - looking it up raises
    with pytest.raises(TypeError, match="pickle"):
        neptune.File.as_pickle({})
    assert stored(run).series("ok").values.tolist() == [1]


def test_a_run_is_continued_by_its_id_and_debug_writes_nothing(runs_dir):
    with neptune.init_run(project="p", custom_run_id="mine") as first:
        first["loss"].append(1.0)
    with neptune.init_run(project="p", with_id="mine") as second:
        second["loss"].append(2.0, step=5)
    assert fanfold.open("mine").series("loss").values.tolist() == [1.0, 2.0]
    with neptune.init_run(project="p", mode="debug") as third:
        third["loss"].append(1.0)
    assert len(fanfold.runs()) == 1
    with pytest.raises(fanfold.RunError, match=r"fanfold\.open"):
        neptune.init_run(mode="read-only")


def test_nothing_raises_into_training(run):
    class Evil:
        def __str__(self) -> str:
            raise RuntimeError("evil")

    run["a"].append(Evil())
    run["b"].extend([1, 2], steps=[1])
    run["c"] = Evil()
    run["d"].upload("/nonexistent/file")
    run["ok"].append(1)
    assert stored(run).series("ok").values.tolist() == [1]


LIGHTNING = """
import torch, lightning as L
from fanfold.compat.neptune import NeptuneLogger
class Model(L.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, index):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        self.logger.experiment["own/value"].append(float(index))
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 2)), batch_size=2)
logger = NeptuneLogger(api_key="secret", project="workspace/vision", name="a name", tags=["t"], log_model_checkpoints=False)
trainer = L.Trainer(max_epochs=2, logger=logger, log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False,
                    enable_checkpointing=False, accelerator="cpu")
trainer.fit(Model(), data)
logger.experiment["test/score"] = 0.5
logger.experiment.stop()
"""


def test_neptune_logger_in_lightnings_own_trainer(runs_dir, tmp_path):
    done = subprocess.run([sys.executable, "-c", LIGHTNING], capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "secret" not in done.stderr + done.stdout
    (found,) = fanfold.runs()
    assert (found.project, found.name, found.tags, found.status) == ("vision", "a name", ["t"], "finished")
    assert len(found.series("training/loss")) == 8
    assert found.series("own/value").values.tolist() == [0.0, 1.0, 2.0, 3.0] * 2
    assert found.config["training"] == {"hyperparams": {"lr": 0.1}}
    assert found.summary["test/score"] == 0.5


SCRIPT = """
import fanfold.compat.neptune as neptune
from fanfold.compat.neptune.types import File
from fanfold.compat.neptune.utils import stringify_unsupported
run = neptune.init_run(project="team/digits", capture_hardware_metrics=False)
run["parameters"] = stringify_unsupported({"lr": 0.1, "layers": (1, 2)})
run["note"].upload(File.from_content("hello"))
run["train/loss"].append(0.5)
run.stop()
"""


def test_the_imports_of_a_typical_script_work(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (run,) = fanfold.runs(dir=tmp_path / ".fanfold")
    assert (run.project, run.series("train/loss").values.tolist()) == ("digits", [0.5])
