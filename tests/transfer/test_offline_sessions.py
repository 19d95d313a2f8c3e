"""Offline data of Comet, ClearML and DVCLive becomes runs: written by their own calls, and sent there by us and brought back."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import fanfold
from fanfold.cli import main
from fanfold.transfer.reading import Archive
from transfer_tools import imported, numbers, random_run, survives_damage

COMET = """
import comet_ml, numpy as np, sys
config = comet_ml.ExperimentConfig(offline_directory=sys.argv[1], auto_log_co2=False, log_env_details=False, log_code=False)
experiment = comet_ml.start(online=False, project_name="proj", experiment_config=config)
experiment.set_name("my name")
experiment.add_tags(["one", "two"])
experiment.log_parameters({"lr": 0.1, "deep": {"a": 1}, "flag": True})
for step in range(5):
    experiment.log_metric("loss", 1 / (step + 1), step=step, epoch=step // 2)
experiment.log_metric("odd", float("nan"), step=1)
experiment.log_metric("odd", float("inf"), step=2)
experiment.log_metric("word", "text", step=2)
experiment.log_text("some text", step=3)
experiment.log_image(np.arange(48, dtype=np.float32).reshape(4, 4, 3) / 48, name="img", step=3)
experiment.log_asset_data("content", name="x.txt", step=2)
experiment.log_histogram_3d([1, 2, 2, 3], name="hist", step=1)
experiment.log_other("best", 0.2)
experiment.set_model_graph("a graph")
print("printed")
experiment.end()
"""

CLEARML = """
from clearml import Task
import numpy as np, sys
task = Task.init(project_name="proj", task_name="my task", tags=["a"], auto_resource_monitoring=False, auto_connect_frameworks=False)
task.connect({"lr": 0.1, "deep": {"a": 1}})
task.connect({"x": 1}, name="Other")
task.set_comment("a comment")
logger = task.get_logger()
for step in range(5):
    logger.report_scalar("loss", "train", 1 / (step + 1), step)
logger.report_single_value("best", 0.25)
logger.report_table("table", "s", 1, table_plot=[["a", "b"], [1, 2], [3, 4]])
logger.report_image("img", "s", 1, image=np.zeros((4, 4, 3), np.uint8))
logger.report_scatter2d("scatter", "s", [[1, 2], [3, 4]], 1)
print("printed line")
task.upload_artifact("art", artifact_object={"a": 1})
task.close()
"""

DVCLIVE = """
import sys, numpy as np
from dvclive import Live
seed = int(sys.argv[1])
with Live(save_dvc_exp=False, dvcyaml=None, report=None) as live:
    live.log_params({"lr": 0.1 * seed, "model": {"dim": 3}})
    for step in range(3):
        live.log_metric("loss", 1 / (step + seed))
        live.log_metric("val/acc", 0.5, timestamp=True)
        live.log_image(f"samples/{step}.png", np.zeros((4, 4, 3), np.uint8))
        live.next_step()
    live.log_sklearn_plot("roc", [0, 1, 1], [0.1, 0.8, 0.4])
    live.summary["extra"] = {"best": 1.5}
"""


def run_script(code: str, *arguments: str, cwd: Path, env: dict[str, str]) -> None:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=240, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict[str, Path]:
    """Return where each product wrote its own data."""
    import os

    root = tmp_path_factory.mktemp("products")
    env = {
        **os.environ,
        "COMET_DISABLE_AUTO_LOGGING": "1",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_CACHE_DIR": str(root / "clearml"),
    }
    run_script(COMET, str(root / "comet"), cwd=root, env=env)
    run_script(CLEARML, cwd=root, env=env)
    (comet,) = (root / "comet").glob("*.zip")
    (clearml,) = (root / "clearml" / "offline").glob("*.zip")
    repository = root / "repository"
    repository.mkdir()
    git = ["git", "-c", "user.email=a@b", "-c", "user.name=n"]
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "begin"], cwd=repository, check=True)
    for seed in (1, 2, 3):
        run_script(DVCLIVE, str(seed), cwd=repository, env=env)
        subprocess.run([*git, "add", "dvclive"], cwd=repository, check=True)
        subprocess.run([*git, "commit", "-qm", f"experiment {seed}"], cwd=repository, check=True)
    subprocess.run(["git", "update-ref", "refs/exps/ab/cdef/lush-myna", "HEAD~1"], cwd=repository, check=True)
    return {"comet_ml": comet, "clearml": clearml, "dvclive": repository / "dvclive"}


def test_a_comet_archive_becomes_a_run(written, tmp_path):
    (run,), (account,) = imported(written["comet_ml"], into=tmp_path)
    assert (run.project, run.name, set(run.tags), run.status) == ("proj", "my name", {"one", "two"}, "finished")
    assert account.name == "my name"
    assert run.config == {"lr": 0.1, "deep": {"a": 1}, "flag": True}
    found = numbers(run)
    assert found["loss"] == [(step, 1 / (step + 1)) for step in range(5)]
    assert found["odd"] == [(1, "nan"), (2, float("inf"))]
    assert found["epoch"] == [(0, 0), (2, 1), (4, 2)]
    assert [(point.step, point.text) for point in (*run.texts("word"), *run.texts("text"))] == [(2, "text"), (3, "some text")]
    (image,), (histogram,) = run.media("img"), run.media("hist")
    assert (image.step, image.load().pil().size) == (3, (4, 4))
    assert histogram.load().counts.sum() == 4
    assert "x.txt" in [artifact["name"] for artifact in run.artifacts]
    assert run.summary["best"] == 0.2
    assert b"printed" in run.console()
    with zipfile.ZipFile(written["comet_ml"]) as archive:
        began = json.loads(archive.read("experiment.json"))["start_time"] / 1000
    assert run.started == pytest.approx(began, abs=0.001)
    assert [(left.what, left.count) for left in account.left] == [("message", 1)]
    assert "graph" in account.left[0].why


def test_a_clearml_session_becomes_a_run_zipped_or_not(written, tmp_path):
    zipped = tmp_path / written["clearml"].name
    shutil.copyfile(written["clearml"], zipped)
    for n, source in enumerate((zipped, written["clearml"].with_suffix(""))):
        (run,), (account,) = imported(source, into=tmp_path / str(n))
        assert (run.project, run.name, run.tags, run.notes, run.status) == ("proj", "my task", ["a"], "a comment", "finished")
        assert (run.config["lr"], run.config["deep"], run.config["Other"]) == (0.1, {"a": 1}, {"x": 1})
        assert numbers(run) == {"loss/train": [(step, 1 / (step + 1)) for step in range(5)]}
        assert run.summary["best"] == 0.25
        assert run.table("table/s").rows == [[1, 2], [3, 4]]
        assert {run.media(key)[0].kind for key in ("img/s", "scatter/s")} == {"image", "figure"}
        assert [artifact["name"] for artifact in run.artifacts] == ["art"]
        assert b"printed line" in run.console()
        assert account.left == []


def test_dvclive_and_its_git_revisions_become_runs(written, tmp_path):
    runs, accounts = imported(written["dvclive"], into=tmp_path)
    by_name = {run.name: run for run in runs}
    (other,) = set(by_name) - {"dvclive", "lush-myna"}
    assert other.endswith("experiment 1")
    for name, seed in (("dvclive", 3), ("lush-myna", 2), (other, 1)):
        run = by_name[name]
        assert (run.project, run.config) == ("repository", {"lr": pytest.approx(0.1 * seed), "model": {"dim": 3}})
        assert numbers(run)["loss"] == [(step, 1 / (step + seed)) for step in range(3)]
        assert numbers(run)["val/acc"] == [(0, 0.5), (1, 0.5), (2, 0.5)]
        assert [point.step for point in run.media("samples")] == [0, 1, 2]
        assert run.summary["extra/best"] == 1.5
        assert run.table("roc").columns == ["fpr", "tpr", "threshold"]
    assert [account.left for account in accounts] == [[], [], []]
    assert {account.outcome for account in imported(written["dvclive"], into=tmp_path)[1]} == {"unchanged"}


def test_a_foreign_repository_runs_nothing(written, tmp_path):
    shutil.copytree(written["dvclive"].parent, tmp_path / "repository")
    mark = tmp_path / "executed"
    config = tmp_path / "repository" / ".git" / "config"
    command = f"touch {mark}"
    config.write_text(
        f"{config.read_text()}\n[core]\n\tfsmonitor = {command}\n\tpager = {command}\n\tsshCommand = {command}\n"
        f'[diff "x"]\n\ttextconv = {command}\n\tcommand = {command}\n[filter "x"]\n\tsmudge = {command}\n\tclean = {command}\n'
    )
    (tmp_path / "repository" / ".gitattributes").write_text("* diff=x filter=x\n")
    runs, _ = imported(tmp_path / "repository" / "dvclive", into=tmp_path / "back")
    assert len(runs) == 3
    assert not mark.exists()


# Sent there by us, and back


def sent(root: Path, name: str, monkeypatch: Any) -> Path:
    monkeypatch.setenv("COMET_START_ONLINE", "0")
    monkeypatch.setenv("CLEARML_OFFLINE_MODE", "1")
    config = {"lr": 0.5, "model": {"dim": 8}}
    run = random_run(root, 7, id="mine", name="a name", config=config, tags=["x", "y"], notes="why", group="g")
    assert main(["sync", "mine", "--to", name, "--dir", str(root)]) == 0
    shutil.copytree(run.path / "trackers", root.parent / "elsewhere")
    return root.parent / "elsewhere"


@pytest.mark.parametrize("name", ["comet_ml", "clearml", "dvclive"])
def test_a_run_sent_there_comes_back_with_everything_that_fits(tmp_path, monkeypatch, name):
    place = sent(tmp_path / "runs", name, monkeypatch)
    original = fanfold.open("mine", dir=tmp_path / "runs")
    (run,), (account,) = imported(place, into=tmp_path / "back")
    assert (run.id, account.kind) == ("mine", name)
    assert numbers(run) == numbers(original)
    assert run.config == original.config
    assert [(point.step, point.text) for point in run.texts("note")] == [(3, original.texts("note")[0].text)]
    assert run.media("picture")[0].load().pil().tobytes() == original.media("picture")[0].load().pil().tobytes()
    assert account.left == []
    if name != "dvclive":  # it has no place for these, and no times
        assert (run.name, set(run.tags), run.notes, run.group) == ("a name", {"x", "y"}, "why", "g")
        assert run.status == "finished"


@pytest.mark.parametrize("name", ["comet_ml", "clearml", "dvclive"])
def test_a_run_sent_there_is_recognised_beside_the_original(tmp_path, monkeypatch, name):
    place = sent(tmp_path / "runs", name, monkeypatch)
    runs, (account,) = imported(place, into=tmp_path / "runs")
    assert [run.id for run in runs] == ["mine"]
    assert account.outcome == "known"


# Damage and malice


@pytest.mark.parametrize("name", ["comet_ml", "clearml", "dvclive"])
def test_damage_never_raises(written, tmp_path, name):
    source = written[name]
    if name == "dvclive":
        source = tmp_path / "dvclive"
        shutil.copytree(written[name], source)
    found, told = survives_damage(name, source, tmp_path / "damaged")
    assert found > 0.8
    assert told > 0.1


def test_an_archive_unpacks_to_a_bounded_size(tmp_path):
    key = "a" * 32
    with zipfile.ZipFile(tmp_path / f"{key}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("experiment.json", json.dumps({"offline_id": key, "project_name": "p", "start_time": 1, "stop_time": 2}))
        archive.writestr("messages.json", b"\n" * (300 << 20))
    runs, (account,) = imported(tmp_path / f"{key}.zip", into=tmp_path / "back")
    assert "times the archive's size" in account.left[0].why
    assert all(not run.keys() for run in runs)
    with Archive(tmp_path / f"{key}.zip") as archive, pytest.raises(ValueError, match="times the archive's size"):
        archive.read("messages.json")


def test_names_in_an_archive_lead_nowhere(tmp_path):
    key, secret = "b" * 32, tmp_path / "secret"
    secret.write_text("secret")
    upload = {"upload_type": "asset", "additional_params": {"fileName": "../../../x", "step": 1}, "file_path": str(secret)}
    lines = [{"type": "file_upload", "payload": upload}, {"type": "file_upload", "payload": {**upload, "file_path": "../secret"}}]
    with zipfile.ZipFile(tmp_path / f"{key}.zip", "w") as archive:
        archive.writestr("experiment.json", json.dumps({"offline_id": key, "project_name": "../../p", "start_time": 1}))
        archive.writestr("messages.json", "".join(json.dumps(line) + "\n" for line in lines))
    session = tmp_path / "session"
    session.mkdir()
    task = {"id": "offline-1", "type": "training", "execution": {"artifacts": [{"key": "k", "uri": "/x/offline-1/../secret"}]}}
    (session / "task.json").write_text(json.dumps(task))
    (session / "link").symlink_to(secret)
    back = tmp_path / "back"
    runs, accounts = imported(tmp_path / f"{key}.zip", session, into=back)
    assert [sum(left.count for left in account.left) for account in accounts] == [2, 1]
    assert all(not run.artifacts for run in runs)
    assert all(path.resolve().is_relative_to(back) for path in back.rglob("*"))
