"""Growing sources are followed live: by `fanfold import --follow`, and by `fanfold ui` on folders of other tools."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from test_mlflow import write_run

import fanfold
from fanfold.cli import main
from fanfold.settings import cache_directory
from fanfold.transfer.follower import own_runs
from fanfold.transfer.importing import Import
from paths import DATA, HELPERS


def until(true, seconds=60.0):
    """Wait until something is true; return its value."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


def loss_of(root):
    """Return the values so far. A run may be listed before its first points, or be deleted while it is read."""
    try:
        return fanfold.runs(dir=root)[0].series("loss").values.tolist()
    except (IndexError, OSError, fanfold.FanfoldError):
        return []


@contextlib.contextmanager
def following(source, root):
    stop, accounts = threading.Event(), []
    work = Import([source], dir=root)
    thread = threading.Thread(target=work.follow, args=[stop, accounts.append])
    thread.start()
    try:
        yield accounts
    finally:
        stop.set()
        thread.join()  # what it does after the test would fail elsewhere


WRITER = """
import sys, time
from torch.utils.tensorboard import SummaryWriter
log = SummaryWriter(sys.argv[1])
for line in sys.stdin:
    for word in line.split():
        log.add_scalar("loss", float(word), int(word))
    log.flush()
    print("written", flush=True)
"""


@contextlib.contextmanager
def writer(folder):
    """Start a process that writes event files as it is told."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )

    def write(*numbers):
        child.stdin.write(" ".join(map(str, numbers)) + "\n")
        assert child.stdout.readline() == "written\n"

    try:
        yield write
    finally:
        child.stdin.close()
        child.wait(60)


def test_a_growing_event_file_is_followed_and_a_restart_too(tmp_path):
    root = tmp_path / "store"
    (tmp_path / "runs").mkdir()
    with following(tmp_path / "runs", root) as accounts:
        with writer(tmp_path / "runs" / "exp") as write:
            write(0, 1, 2)
            until(lambda: loss_of(root) == [0.0, 1.0, 2.0])
            assert fanfold.runs(dir=root)[0].status == "running"
            write(*range(3, 50))
            until(lambda: len(loss_of(root)) == 50)
        with writer(tmp_path / "runs" / "exp") as write:  # started again, from step 40
            write(*range(40, 60))
            until(lambda: len(loss_of(root)) == 60)
        run = fanfold.runs(dir=root)[0]
        assert len(run.attempts) == 2 and len(run.series("loss", raw=True)) == 70
        assert len(list((run.path / "journal").glob("*.ffj"))) == 2  # one for each attempt, however often it was looked at
    assert sum(one.points for one in accounts) == 70


def test_a_run_deleted_here_is_imported_again(tmp_path):
    root = tmp_path / "store"
    (tmp_path / "runs").mkdir()
    with writer(tmp_path / "runs" / "exp") as write, following(tmp_path / "runs", root):
        write(0, 1)
        until(lambda: loss_of(root) == [0.0, 1.0])
        shutil.rmtree(fanfold.runs(dir=root)[0].path)
        write(2)
        until(lambda: loss_of(root) == [0.0, 1.0, 2.0])


def test_a_running_wandb_run_is_followed_to_its_end(tmp_path):
    env = {**os.environ, "WANDB_SILENT": "true", "HOME": str(tmp_path), "WANDB_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, str(HELPERS / "wandb_writer.py"), str(tmp_path / "w"), "40", "live1234", "0.1"]
    (tmp_path / "w").mkdir()
    child = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with following(tmp_path / "w", tmp_path / "store"):
        partly = until(lambda: len(loss_of(tmp_path / "store")))
        assert child.wait(120) == 0
        until(lambda: fanfold.runs(dir=tmp_path / "store")[0].status == "finished")
    assert 0 < partly <= 40
    assert loss_of(tmp_path / "store") == [1 / (i + 1) for i in range(40)]


def test_the_command_follows_until_it_is_stopped(tmp_path):
    with writer(tmp_path / "runs" / "exp") as write:
        write(0)
        words = ["import", str(tmp_path / "runs"), "--follow", "--json", "--dir", str(tmp_path / "store"), "-q"]
        child = subprocess.Popen([sys.executable, "-m", "fanfold", *words], stdout=subprocess.PIPE, text=True)
        assert json.loads(child.stdout.readline())["outcome"] == "imported"
        write(1, 2)
        assert json.loads(child.stdout.readline())["points"] == 2
        child.terminate()
        assert child.wait(30) == 0


@contextlib.contextmanager
def dashboard(*words):
    command = [sys.executable, "-m", "fanfold", "ui", *map(str, words), "--port", "0", "--json", "--no-token"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield json.loads(child.stdout.readline())["address"]
    finally:
        child.terminate()
        child.wait(30)


def asked(address, path):
    with urllib.request.urlopen(f"{address}{path}", timeout=30) as answer:
        return json.load(answer)


def test_the_dashboard_shows_foreign_folders_live_beside_our_runs(tmp_path):
    run = fanfold.init("mine", dir=tmp_path / "own", quiet=True, system=False)
    run.log({"loss": 1.0})
    run.finish()
    source = tmp_path / "runs"
    with writer(source / "exp") as write:
        write(0, 1, 2)
        before = {path: path.stat().st_mtime_ns for path in source.rglob("*")}
        with dashboard(source, tmp_path / "own") as address:
            until(lambda: {one["name"] for one in asked(address, "api/projects")["projects"]} == {"mine", "runs"})
            named = lambda: [one for one in asked(address, "api/runs?project=runs")["runs"] if one["name"] == "exp"]  # noqa: E731
            (found,) = until(named)
            write(7)
            last = lambda: asked(address, f"api/run?project=runs&id={found['id']}")["values"]["loss"]  # noqa: E731
            until(lambda: json.dumps(last()).count("7"))
            (mine,) = asked(address, "api/runs?project=mine")["runs"]
            assert mine["id"] == run.id
        assert set(source.rglob("*")) == set(before)  # nothing is written beside them
    assert list((cache_directory() / "imports").iterdir())


def test_the_dashboard_shows_a_mixture_that_several_processes_import(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    for number in range(24):
        with SummaryWriter(tmp_path / "runs" / f"exp{number:02}") as log:
            for step in range(50):
                log.add_scalar("loss", number + step / 64, step)
    shutil.copytree(DATA / "wandb-0.22", tmp_path / "wandb", symlinks=True)
    (write_run(tmp_path) / "metrics" / "loss").write_text("1700000000001 0.5 0\n")
    sources = [tmp_path / name for name in ("runs", "wandb", "mlruns")]
    before = {path: path.lstat().st_mtime_ns for source in sources for path in source.rglob("*")}
    with dashboard(*sources) as address:
        runs = lambda: sum(one["runs"] for one in asked(address, "api/projects")["projects"])  # noqa: E731
        until(lambda: runs() == 26)
    assert {path: path.lstat().st_mtime_ns for source in sources for path in source.rglob("*")} == before
    imports = list((cache_directory() / "imports").iterdir())
    found = {run.name: run for folder in imports for run in fanfold.runs(dir=folder)}
    for number in range(24):
        assert found[f"exp{number:02}"].series("loss", raw=True).values.tolist() == [number + step / 64 for step in range(50)]
    pids = {journal.header.pid for run in found.values() for attempt in run.attempts for journal in attempt.journals}
    assert len(pids) == min(len(os.sched_getaffinity(0)), 3), pids


def test_the_dashboard_names_a_path_that_does_not_exist(tmp_path, capsys):
    assert main(["ui", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_own_runs_are_told_from_other_folders(tmp_path):
    fanfold.init("p", dir=tmp_path / "home" / ".fanfold", quiet=True, system=False).finish()
    (tmp_path / "runs").mkdir()
    assert own_runs(tmp_path / "home") == own_runs(tmp_path / "home" / ".fanfold") == tmp_path / "home" / ".fanfold"
    assert own_runs(tmp_path / "runs") is None


# Cost


def bytes_read(work):
    """Let an import look once; return how many bytes this process read meanwhile, and the accounts."""
    accounts = []
    before = int(Path("/proc/self/io").read_text().split()[1])
    work.round(threading.Event(), accounts.append)
    return int(Path("/proc/self/io").read_text().split()[1]) - before, accounts


def tensorboard_source(folder):
    from torch.utils.tensorboard import SummaryWriter

    log = SummaryWriter(folder / "exp", max_queue=100_000)
    for step in range(10_000):
        log.add_scalar("loss", step, step)
    log.flush()
    yield next(folder.rglob("*tfevents*"))
    log.add_scalar("loss", 1.0, 10_000)
    log.flush()
    yield None
    log.close()


def wandb_source(folder):
    env = {**os.environ, "WANDB_SILENT": "true", "HOME": str(folder.parent), "WANDB_DATA_DIR": str(folder.parent / "data")}
    subprocess.run(
        [sys.executable, str(HELPERS / "wandb_writer.py"), str(folder), "1500"], env=env, check=True, capture_output=True
    )
    log = next(folder.rglob("*.wandb"))
    data = log.read_bytes()
    log.write_bytes(data[:-2000])
    yield log
    log.write_bytes(data)
    yield None


def mlflow_source(folder):
    run = write_run(folder)
    metric = run / "metrics" / "loss"
    metric.write_text("".join(f"{1_700_000_000_000 + i} {i / 7} {i}\n" for i in range(20_000)))
    yield metric
    with metric.open("a") as file:
        file.write("1700000100000 0.5 20000\n")
    yield None


@pytest.mark.parametrize("write", [tensorboard_source, wandb_source, mlflow_source])
def test_following_reads_only_what_is_new(tmp_path, write):
    source = tmp_path / "source"
    source.mkdir()
    writing = write(source)
    size = next(writing).stat().st_size
    work = Import([source], dir=tmp_path / "store")
    whole, (account,) = bytes_read(work)
    assert whole >= size > 300_000
    idle, accounts = bytes_read(work)
    assert accounts == []
    next(writing)
    added, (account,) = bytes_read(work)
    assert account.outcome == "updated"
    assert idle < 10_000
    assert added < 100_000 < size  # a bounded look at the start of a log, and what is new
    work.close()
