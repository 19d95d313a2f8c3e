"""A job of four ranks goes wrong: the black box names the rank and its line. Training that is merely slow is never called a hang."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import warm_python
from clickhouse_tools import Fleet
from fanfold.cli import main
from fanfold.store import open_run
from fanfold.store.blackbox import ends, hangs
from paths import HELPERS

TRAIN = HELPERS / "blackbox_train.py"
LONGEST = 240.0


def line_of(mark):
    """Return the line of the training script that carries a mark."""
    return next(n for n, line in enumerate(TRAIN.read_text().splitlines(), 1) if f"# MARK {mark}" in line)


@contextlib.contextmanager
def job(folder, fault, rank, *, ranks=4, hang="4", **more):
    """Run the training under torchrun; end it, and everything it started, at the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(TRAIN)]
    env = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "FANFOLD_DIR": str(folder),
        **({"HANG_SECONDS": hang} if hang else {}),
        **more,
    }
    with (folder / "log").open("wb") as log:
        process = warm_python.Popen(
            [*command, fault, str(rank)], libraries="torch", env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        _kill_ranks(folder)


def _kill_ranks(folder):
    """torchrun starts each rank in a session of its own, and all of them are in the job's folder."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cwd").resolve() == folder.resolve():
                os.kill(int(pid), signal.SIGKILL)


def awaited(folder, process, found):
    """Wait for what the black box should find."""
    path, deadline = folder / "box" / "boxed", time.monotonic() + LONGEST
    while time.monotonic() < deadline:
        if (path / "journal").is_dir():
            seen = found(open_run(path))
            if seen:
                return open_run(path), seen
        time.sleep(0.5)
    raise AssertionError(f"nothing was found; {(folder / 'log').read_text()[-3000:]}")


@pytest.mark.parametrize(
    ("fault", "rank", "mark", "state"),
    [
        ("sleep", 2, "sleep", "still"),
        ("lock", 1, "lock", "still"),
        ("diverge", 3, "diverge", "waiting"),
        ("gil", 1, "gil", "frozen"),
    ],
)
def test_a_hang_names_the_rank_and_its_line(fault, rank, mark, state, tmp_path):
    def answered(run):
        return [hang for hang in hangs(run) if sum(bool(one.threads) for one in hang.ranks) == 4]

    with job(tmp_path, fault, rank) as process:
        run, (hang, *more) = awaited(tmp_path, process, answered)
        assert process.poll() is None, "the job was stopped"
    assert (hang.culprits, more) == ([rank], [])
    stands = {one.rank: one for one in hang.ranks}
    assert (stands[rank].line.file, stands[rank].line.line, stands[rank].state) == (str(TRAIN), line_of(mark), state)
    others = [one for number, one in stands.items() if number != rank]
    assert {(one.line.line, one.state) for one in others} == {(line_of("reduce"), "waiting")}
    assert {one.waiting[0].name for one in others} == {"gloo:all_reduce"}
    assert len({one.waiting[0].seq for one in others}) == 1
    assert hang.collective.sizes == [[4, 4]]
    assert hang.missing == [rank]
    alert = next(alert for alert in run.alerts if alert["title"] == "Training hangs")
    assert f"rank {rank} has not arrived" in alert["text"]
    assert f"blackbox_train.py:{line_of(mark)}" in alert["text"]


def test_a_rank_that_waits_in_a_smaller_group_is_not_to_blame(tmp_path):
    """Rank 3 sleeps, rank 2 waits for it in their group, and ranks 0 and 1 for both. Each rank numbers the groups it is in for itself."""

    def answered(run):
        return [hang for hang in hangs(run) if sum(bool(one.threads) for one in hang.ranks) == 4]

    with job(tmp_path, "pair", 3) as process:
        _, (hang, *_) = awaited(tmp_path, process, answered)
    stands = {one.rank: one for one in hang.ranks}
    assert (hang.culprits, hang.missing, hang.collective.group) == ([3], [2, 3], "gloo/0")
    assert [stands[rank].line.line for rank in range(4)] == [line_of("reduce")] * 2 + [line_of("pair"), line_of("other")]
    (waits,) = stands[2].waiting
    assert (waits.group, waits.members, waits.seq) == ("gloo/2", [2, 3], 1)


def test_a_data_loader_that_hangs_is_named_by_its_rank(tmp_path):
    with job(tmp_path, "loader", 0) as process:
        _, (hang, *_) = awaited(tmp_path, process, hangs)
    stand = next(one for one in hang.ranks if one.rank == 0)
    assert hang.culprits == [0]
    assert (stand.line.file, stand.line.line) == (str(TRAIN), line_of("loader"))  # not the wrapper that times data loaders


def test_a_killed_rank_is_told_from_those_that_followed_without_an_option(tmp_path, clickhouse, capsys):
    """The black box is on under torchrun. A database answers as the run's directory does."""
    with job(tmp_path, "kill", 2, hang=None) as process:
        process.wait(LONGEST)
        run, over = awaited(tmp_path, process, lambda run: [one for one in ends(run) if one.first and one.signal == "SIGKILL"])
    assert [(one.rank, one.cause) for one in over] == [(2, "killed from outside (SIGKILL), it left no trace")]
    assert over[0].line.file == str(TRAIN)
    assert ends(run)[0].rank == 2
    assert {one.line.file for one in ends(run)} == {str(TRAIN)}  # where the others were when it died
    assert any(alert["title"] == "Rank 2 was killed" for alert in run.alerts)
    fleet = Fleet(clickhouse)
    try:
        fleet.ship(tmp_path)
        assert ends(fleet.store().run("box", "boxed")) == ends(open_run(run.path))
        assert main(["hang", "boxed", "--dir", fleet.url]) == 3
        assert main(["memory", "boxed", "--dir", fleet.url]) == 0
    finally:
        fleet.close()
    assert "Rank 2 ended first" in capsys.readouterr().out


def test_a_crash_in_native_code_leaves_its_stack(tmp_path):
    with job(tmp_path, "segv", 1) as process:
        process.wait(LONGEST)
        run, over = awaited(tmp_path, process, lambda run: [one for one in ends(run) if one.first and one.stack])
    (first,) = over
    assert (first.rank, first.signal, first.line.line) == (1, "SIGSEGV", line_of("segv"))
    assert f'File "{TRAIN}", line {line_of("segv")} in crashes' in first.stack
    assert any(alert["title"] == "Rank 1 crashed with SIGSEGV" for alert in run.alerts)


@pytest.mark.parametrize("slow", ["checkpoint", "compute", "compile"])
def test_slow_training_is_never_called_a_hang(slow, tmp_path):
    with job(tmp_path, slow, 0, ranks=2, SLOW_SECONDS="12") as process:
        assert process.wait(LONGEST) == 0, (tmp_path / "log").read_text()[-3000:]
    run = open_run(tmp_path / "box" / "boxed")
    assert (run.status, run.alerts, run.evidence) == ("finished", [], [])
