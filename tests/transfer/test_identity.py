"""An imported run is the same run every time, from wherever it comes, and its status is never a guess that grows stale."""

import os
import subprocess
import sys
import time

import pytest
from test_follow import following, until
from test_mlflow import write_run

import fanfold
from fanfold.cli import main
from fanfold.transfer import importing
from fanfold.transfer.importing import REST_SECONDS
from paths import DATA, HELPERS
from transfer_tools import imported, numbers

OLD = time.time() - 2 * REST_SECONDS


def events(folder, *steps):
    """Write an event file with torch's writer."""
    from torch.utils.tensorboard import SummaryWriter

    log = SummaryWriter(folder)
    for step in steps:
        log.add_scalar("loss", step / 7, step)
    log.close()


def age(folder, when=OLD):
    """Make a source as old as if nobody had written to it for a while."""
    for path in folder.rglob("*"):
        os.utime(path, (when, when))


@pytest.fixture(scope="module")
def wandb_log(tmp_path_factory):
    """A log that wandb wrote, with its exit."""
    folder = tmp_path_factory.mktemp("wandb")
    env = {**os.environ, "WANDB_SILENT": "true", "HOME": str(folder), "WANDB_DATA_DIR": str(folder / "data")}
    subprocess.run([sys.executable, str(HELPERS / "wandb_writer.py"), str(folder)], env=env, check=True, capture_output=True)
    (log,) = sorted(folder.rglob("*.wandb"))[:1]
    return log.read_bytes()


def put_log(folder, data):
    place = folder / "wandb" / "offline-run-20260101_000000-abc12345"
    place.mkdir(parents=True, exist_ok=True)
    (place / "run-abc12345.wandb").write_bytes(data)


# Status


def test_a_run_imported_while_it_grows_is_never_lost(tmp_path, capsys):
    events(tmp_path / "runs" / "a", 0, 1, 2)
    assert main(["import", str(tmp_path / "runs"), "--dir", str(tmp_path / "store")]) == 0
    assert "1 run was written to in the last minutes. Import again for what is added, or use --follow." in capsys.readouterr().err
    (run,) = fanfold.runs(dir=tmp_path / "store")
    (end,) = run.attempts[0].ends()
    assert (run.status, end["reason"]) == ("finished", "it may still have been growing when it was imported")
    events(tmp_path / "runs" / "a", 3)
    (run,), (account,) = imported(tmp_path / "runs", into=tmp_path / "store")
    assert (run.status, account.outcome, account.points, account.growing) == ("finished", "updated", 1, True)
    age(tmp_path / "runs")
    (run,), (account,) = imported(tmp_path / "runs", into=tmp_path / "store")
    assert (run.status, account.outcome, account.growing) == ("finished", "unchanged", False)
    assert run.attempts[-1].ends()[-1]["reason"] is None  # now it is known to be over


def test_a_followed_run_is_running_and_over_when_it_is_let_go(tmp_path):
    events(tmp_path / "runs" / "a", 0, 1, 2)
    status = lambda: [run.status for run in fanfold.runs(dir=tmp_path / "store")]  # noqa: E731
    for _ in range(2):  # the second time, nothing is new, and it may still be running
        with following(tmp_path / "runs", tmp_path / "store"):
            until(lambda: status() == ["running"])
        assert status() == ["finished"]
    age(tmp_path / "runs")
    with following(tmp_path / "runs", tmp_path / "store"):
        time.sleep(1.5)
        assert status() == ["finished"]


def test_a_table_without_times_may_still_grow(tmp_path):
    table = tmp_path / "t.csv"
    table.write_text("step,loss\n0,1\n1,2\n")
    (run,), (account,) = imported(table, into=tmp_path / "store")
    assert (run.status, account.growing) == ("finished", True)
    os.utime(table, (OLD, OLD))
    _, (account,) = imported(table, into=tmp_path / "store")
    assert account.growing is False


def test_an_old_run_in_a_new_copy_is_over(tmp_path, monkeypatch):
    log = next((DATA / "wandb-0.22").rglob("*.wandb")).read_bytes()
    put_log(tmp_path, log[:-60])  # without its exit
    monkeypatch.setattr(importing, "DEAD_SECONDS", 0.0)
    (run,), (account,) = imported(tmp_path / "wandb", into=tmp_path / "store")
    assert (run.status, account.growing) == ("killed", False)
    assert run.duration < 60


def test_a_product_that_records_ends_and_has_none_was_killed(tmp_path, wandb_log, monkeypatch):
    put_log(tmp_path, wandb_log[:-40])
    age(tmp_path)
    (run,), _ = imported(tmp_path / "wandb", into=tmp_path / "store")
    assert (run.status, run.attempts[-1].ends()[0]["reason"]) == ("finished", "Weights & Biases has no end of it")  # not sure yet
    monkeypatch.setattr(importing, "DEAD_SECONDS", 0.0)
    age(tmp_path, OLD - 1)
    (run,), (account,) = imported(tmp_path / "wandb", into=tmp_path / "store")
    assert (run.status, run.attempts[-1].ends()[0]["error"]) == ("killed", "Weights & Biases has no end of it")
    (cut,) = [left for left in account.left if left.what == "bytes"]
    assert cut.why == "the last record is incomplete: still being written, or cut off"
    assert 0 < cut.count < 40
    put_log(tmp_path, wandb_log)
    (run,), (account,) = imported(tmp_path / "wandb", into=tmp_path / "store")
    assert (run.status, account.left) == ("finished", [])


def test_a_run_that_goes_on_after_it_counted_as_killed_has_another_attempt(tmp_path, monkeypatch):
    run = write_run(tmp_path)
    (run / "metrics" / "loss").write_text("1700000000001 0.5 0\n")
    (found,), _ = imported(tmp_path / "mlruns", into=tmp_path / "store")
    assert found.status == "killed"
    now = int(time.time() * 1000)
    with (run / "metrics" / "loss").open("a") as file:
        file.write(f"{now} 0.25 1\n")
    (found,), _ = imported(tmp_path / "mlruns", into=tmp_path / "store")
    assert (found.status, len(found.attempts)) == ("finished", 2)
    write_run(tmp_path, status=4, end_time=now + 1000)
    (found,), _ = imported(tmp_path / "mlruns", into=tmp_path / "store")
    assert (found.status, len(found.attempts)) == ("failed", 2)
    assert found.series("loss").values.tolist() == [0.5, 0.25]


# What is cut off is in the account


def test_a_log_without_anything_whole_is_in_the_account(tmp_path, wandb_log):
    put_log(tmp_path, wandb_log[:60])
    age(tmp_path)
    runs, (account,) = imported(tmp_path / "wandb", into=tmp_path / "store")
    assert (runs, account.outcome, [left.what for left in account.left]) == ([], "skipped", ["bytes"])


def test_a_truncated_trainer_state_is_in_the_account(tmp_path):
    (tmp_path / "out" / "checkpoint-5").mkdir(parents=True)
    (tmp_path / "out" / "checkpoint-5" / "trainer_state.json").write_text('{"global_step": 5, "log_history": [{"loss": 1')
    runs, (account,) = imported(tmp_path / "out", into=tmp_path / "store")
    assert (runs, account.outcome) == ([], "skipped")
    assert [(left.what, left.why) for left in account.left] == [("checkpoint", "its trainer_state.json cannot be read")]


# Identity


def test_a_bundle_of_imported_runs_is_recognised_where_they_are(tmp_path):
    events(tmp_path / "runs" / "a", 0, 1, 2)
    (run,), _ = imported(tmp_path / "runs", into=tmp_path / "store")
    before = numbers(run)
    assert main(["export", "--project", "runs", "-o", str(tmp_path / "bundle"), "--dir", str(tmp_path / "store")]) == 0
    (run,), (account,) = imported(tmp_path / "bundle", into=tmp_path / "store")
    assert (account.outcome, account.why) == ("known", "this run is here already, imported from tensorboard")
    assert numbers(run) == before
    (copy,), (account,) = imported(tmp_path / "bundle", into=tmp_path / "other")
    assert (numbers(copy), account.outcome) == (before, "imported")
    (copy,), (account,) = imported(tmp_path / "runs", into=tmp_path / "other")  # and the other way round
    assert (numbers(copy), account.outcome, account.why) == (before, "known", "this run is here already, imported from fanfold")


def test_an_event_file_that_is_sorted_first_later_makes_no_second_run(tmp_path):
    events(tmp_path / "runs" / "a", 0, 1)
    (first,) = (tmp_path / "runs" / "a").iterdir()
    (run,), _ = imported(tmp_path / "runs", into=tmp_path / "store")
    earlier = first.name.replace(first.name.split(".")[3], "1500000000")
    events(tmp_path / "other", 5, 6)
    next((tmp_path / "other").iterdir()).rename(first.with_name(earlier))
    (again,), (account,) = imported(tmp_path / "runs", into=tmp_path / "store")
    assert (again.id, account.points) == (run.id, 2)
    first.unlink()  # nor does one that is deleted
    (again,), (account,) = imported(tmp_path / "runs", into=tmp_path / "third")
    (again,), (account,) = imported(tmp_path / "runs", into=tmp_path / "third")
    assert account.outcome == "unchanged"


def test_a_run_of_a_file_store_is_recognised_in_the_database_made_of_it(tmp_path):
    code = """
import sys, mlflow
client = mlflow.MlflowClient(sys.argv[1])
run = client.create_run(client.create_experiment("exp"), run_name="a")
for step in range(5):
    client.log_metric(run.info.run_id, "loss", step / 7, step=step)
client.set_terminated(run.info.run_id)
"""
    env = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"}
    files, database = tmp_path / "mlruns", tmp_path / "mlflow.db"
    subprocess.run([sys.executable, "-c", code, f"file:{files}"], env=env, check=True, capture_output=True, cwd=tmp_path)
    command = [sys.executable, "-m", "mlflow", "migrate-filestore", "--source", str(files), "--target", f"sqlite:///{database}"]
    subprocess.run(command, env=env, check=True, capture_output=True, cwd=tmp_path)
    (run,), (account,) = imported(files, into=tmp_path / "store")
    assert (account.points, run.status) == (5, "finished")
    (run,), (account,) = imported(database, into=tmp_path / "store")
    assert (account.outcome, account.why) == ("known", "this run is here already, imported from mlflow (file store)")
    assert len(run.series("loss", raw=True)) == 5
