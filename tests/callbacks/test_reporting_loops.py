"""Reporting callbacks in fanfold's own Trainer and Loop, in a search, on two ranks, in a Flyte task; and what they upload."""

from __future__ import annotations

import csv
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import reporting_cases as cases
import reporting_readers as readers
from reporting_readers import check

KEEPING = [
    "tensorboard",
    "wandb",
    "mlflow",
    "comet_ml",
    "clearml",
    "trackio",
    "dvclive",
    "azure_ml",
    "swanlab",
    "neptune",
    "flyte",
    "aim",
]
ALL = " ".join([*KEEPING, "codecarbon"])
LONG = {"max_steps": 100, "logging_steps": 50, "eval_steps": 50, "save_steps": 50, "load_best_model_at_end": True}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::sqlalchemy.exc.SADeprecationWarning"),
    pytest.mark.timeout(900),  # the first test waits for all programs, which take minutes with every tracker
]


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> Path:
    """Run all cases; return the folder that has a folder of each."""
    home = tmp_path_factory.mktemp("loops")
    options = {"neptune": {"log_checkpoints": "best"}, "dvclive": {"log_model": "all", "save_dvc_exp": False}}
    uploads = {"WANDB_LOG_MODEL": "end", "WANDB_WATCH": "all", "COMET_LOG_ASSETS": "1"}
    dead = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    planned = [
        cases.case(home / "trainer", "trainer", ALL),
        cases.case(home / "loop", "loop", ALL),
        cases.case(home / "trainer-boom", "trainer", ALL, action="boom"),
        cases.case(home / "loop-boom", "loop", ALL.replace("codecarbon", ""), action="boom"),
        cases.case(home / "search", "transformers", ALL.replace("azure_ml ", ""), action="search",
                   env={"WANDB_LOG_MODEL": "checkpoint"}),
        cases.case(home / "ranks", "trainer", "tensorboard wandb mlflow trackio", ranks=2, env={"MASTER_PORT": cases.free_port()}),
        cases.case(home / "flyte", "flyte", "flyte"),
        cases.case(home / "uploads", "transformers", "wandb comet_ml dvclive neptune", options=options, env=uploads, arguments=LONG),
        cases.case(home / "crash", "transformers", "mlflow wandb", env=dead, fails_at=4),
    ]  # fmt: skip
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (
        [*git, "init", "-q"],
        [*git, "commit", "-qm", "first", "--allow-empty"],
        [sys.executable, "-m", "dvc", "init", "-q"],
    ):
        subprocess.run(command, cwd=home / "uploads", check=True)
    cases.run_all(home, planned)
    return home


@pytest.mark.parametrize("name", KEEPING)
def test_everything_told_in_our_trainer_and_loop_is_there(ran, name):
    for way in ("trainer", "loop"):
        assert cases.codes(ran / way) == [0], cases.output(ran / way)[-3000:]
        check(name, ran / way)


def test_our_trainer_and_loop_end_without_a_word_about_trouble(ran):
    for way in ("trainer", "loop"):
        output = cases.output(ran / way)
        assert not [word for word in ("could not", "not delivered", "Traceback") if word in output], output
        assert output.rstrip().endswith("the very end")
        assert len((ran / way / "out" / "emissions.csv").read_text().splitlines()) == 2
        assert set(readers.statuses(ran / way).values()) == {"[0]", "FINISHED", "finished", "False", "1"}


@pytest.mark.parametrize("way", ["trainer-boom", "loop-boom"])
def test_a_callback_that_raises_fails_every_run_and_loses_nothing(ran, way):
    folder = ran / way
    assert cases.codes(folder) == [1]
    assert "callback Boom raised in on_step_begin, at step 3: RuntimeError: a bad callback" in cases.output(folder)
    for name in KEEPING:
        check(name, folder)
    assert readers.statuses(folder) == {
        "wandb": "[1]", "mlflow": "FAILED", "clearml": "failed", "comet_ml": "failed", "neptune": "True", "trackio": "failed",
        "swanlab": "2", "aim": "failed", "flyte": "failed",
    }  # fmt: skip


def test_a_search_has_one_run_for_each_trial(ran):
    from mlflow import MlflowClient

    folder = ran / "search"
    assert cases.codes(folder) == [0], cases.output(folder)[-3000:]
    client = MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("exp").experiment_id])
    with sqlite3.connect(next((folder / "trackio").glob("*.db"))) as database:
        rows = database.execute("SELECT run_name, count(*) FROM metrics GROUP BY run_name").fetchall()
    counts = {
        "tensorboard": len({path.parent for path in folder.rglob("events.out.tfevents.*")}),
        "mlflow": len(runs),
        "comet_ml": len(list((folder / "comet").glob("*.zip"))),
        "clearml": len(list((folder / "clearml" / "offline").glob("*.zip"))),
        "swanlab": len(list((folder / "swanlog").rglob("run-*.swanlab"))),
        "neptune": len(list(folder.glob("runs/*/*/reports/*/*/trackers/neptune/offline/*"))),
        "aim": len(list(readers.aim_runs(folder))),
        "codecarbon": len({row["run_id"] for row in csv.DictReader((folder / "out" / "emissions.csv").open())}),
        "trackio": len(rows),
    }
    assert counts == dict.fromkeys(counts, 2)
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert [count for _, count in rows] == [5, 5]
    for records in readers.wandb_logs(folder):
        found = readers.wandb_rows(records)
        assert [step for step, _ in found["train/loss"]] == [2, 4]
        saved = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
        assert len(saved) == 4  # architecture, two checkpoints from the trial's own folder, final model


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_of_two_ranks_only_the_first_opens_a_run(ran, name):
    assert cases.codes(ran / "ranks") == [0, 0], cases.output(ran / "ranks")[-3000:]
    check(name, ran / "ranks")  # its readers take exactly one run
    assert "Trackio" not in (ran / "ranks" / "output-1").read_text()


def test_inside_a_flyte_task_the_history_is_a_deck(ran):
    folder = ran / "flyte"
    assert cases.codes(folder) == [0], cases.output(folder)[-3000:]
    pages = [path.read_text() for path in (folder / "tmp").rglob("deck.html")]
    assert any("Log History" in page for page in pages)
    assert not (folder / "out" / "deck.html").exists()
    assert "shows no Decks" not in cases.output(folder)


def test_wandb_watches_and_keeps_the_final_model(ran):
    folder = ran / "uploads"
    assert cases.codes(folder) == [0], cases.output(folder)[-3000:]
    (records,) = readers.wandb_logs(folder)
    keys = set(readers.wandb_rows(records))
    assert any(key.startswith("gradients/") for key in keys) and any(key.startswith("parameters/") for key in keys)
    artifacts = [record.artifact for record in records if record.WhichOneof("record_type") == "artifact"]
    assert [sorted(artifact.aliases) for artifact in artifacts] == [["base_model", "latest"], ["final_model", "latest"]]
    assert "eval/loss" in str(artifacts[-1].metadata)


def test_comet_uploads_the_output_folder(ran):
    names = {
        (message.get("additional_params") or {}).get("fileName") or "" for message in readers.comet_messages(ran / "uploads")
    }
    assert {name for name in names if name.endswith("model.safetensors")} == {"out/checkpoint-100/model.safetensors"}


def test_dvclive_keeps_the_whole_output_folder(ran):
    assert "path: out" in (ran / "uploads" / "out.dvc").read_text()


def test_neptune_keeps_the_best_checkpoint(ran):
    found = [operation for operation in readers.neptune_operations(ran / "uploads") if "checkpoints" in operation["path"]]
    assert {"/".join(operation["path"]) for operation in found} == {"finetuning/checkpoints/best"}
    assert "UploadFileSet" in {operation["type"] for operation in found}


def test_a_crash_and_a_dead_tracker(ran):
    """MLflow's server is not there and training continues; then it crashes: wandb has all, and ended as failed."""
    folder = ran / "crash"
    output = cases.output(folder)
    assert cases.codes(folder) == [1] and "RuntimeError: a bad batch" in output, output
    assert output.count("the tracker mlflow failed") == 1
    assert "mlflow: 9 values are not delivered yet" in output
    (records,) = readers.wandb_logs(folder)
    assert {key: [step for step, _ in found] for key, found in readers.wandb_rows(records).items() if key.endswith("loss")} == {
        "train/loss": [2], "eval/loss": [2],
    }  # fmt: skip
    assert [record.exit.exit_code for record in records if record.WhichOneof("record_type") == "exit"] == [1]
