"""Every launcher for real: its ranks meet in one run, and no two jobs ever do.

Each test writes a small program, starts it the way a user would, and reads the runs it left behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fanfold

SOURCE = Path(fanfold.__file__).parents[1]
TIMEOUT = 60
STEPS = 3
# Variables of a launcher that the tests themselves may run under.
FOREIGN = ("SLURM_", "OMPI_", "PMI", "MV2_", "RAY_", "TORCHELASTIC_", "ACCELERATE_", "FANFOLD_", "MASTER_")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")

# What every rank does: log values that say which rank and which job they come from.
WORK = f"""
import os, sys, time
import fanfold

def work(together=False, **options):
    run = fanfold.init("p", quiet=True, system=False, **options)
    while together and len(list(run.path.glob("journal/*.ffj"))) < run.world_size:
        time.sleep(0.02)  # as a training job does: no rank goes on without the others
    for step in range({STEPS}):
        run.log({{"value": 100 * run.rank + step, "job": int(os.environ.get("JOB", "0"))}}, step)
    run.finish()
    return run
"""
PLAIN = "from work import *\nwork()\n"
TOGETHER = "from work import *\nwork(together=True)\n"
GROUP = """
import torch.distributed as dist
from work import *
dist.init_process_group("gloo")
work()
dist.destroy_process_group()
"""


class Desk:
    """A folder with programs, and the runs they leave."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs_dir = folder / "runs"
        self.started: list[subprocess.Popen[str]] = []
        self.write("work.py", WORK)

    def write(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text, encoding="utf-8")
        return str(self.folder / name)

    def environment(self, **more: object) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in RANKS}
        env |= {"FANFOLD_DIR": str(self.runs_dir), "FANFOLD_CACHE_DIR": str(self.folder / "cache")}
        env |= {"PYTHONPATH": f"{SOURCE}{os.pathsep}{self.folder}", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        return env | {name: str(value) for name, value in more.items()}

    def start(self, *command: object, **more: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [str(word) for word in command], env=self.environment(**more), cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *command: object, **more: object) -> str:
        return self.wait(self.start(*command, **more))

    def wait(self, process: subprocess.Popen[str], code: int = 0) -> str:
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate(timeout=TIMEOUT)
        assert process.returncode == code, output
        return output

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=TIMEOUT)

    def runs(self, folder: Path | None = None) -> list[fanfold.StoredRun]:
        """Return the runs, oldest first."""
        return [fanfold.open(run.path) for run in reversed(fanfold.runs(dir=folder or self.runs_dir))]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FANFOLD_DIR", raising=False)
    desk = Desk(tmp_path)
    yield desk
    desk.close()


def check_whole(run: fanfold.StoredRun, world: int, *, job: int = 0, launcher: str | None = None) -> None:
    """Check that a run holds exactly its ranks, each with its own values, all of one job and one finished attempt."""
    headers = [journal.header for journal in run.journals]
    assert sorted(header["rank"] for header in headers) == list(range(world))
    assert {header["world"] for header in headers} == {world}
    assert run.ranks == list(range(world))
    assert len(run.attempts) == 1
    assert run.status == "finished"
    if launcher:
        assert {header["launcher"] for header in headers} == {launcher}
    for rank in range(world):
        assert run.series("value", rank=rank).values.tolist() == [100 * rank + step for step in range(STEPS)]
        assert run.series("job", rank=rank).values.tolist() == [job] * STEPS
    assert run.series("value", fold="mean").count.tolist() == [world] * STEPS


def need(program: str, package: str) -> str:
    """Return where a launcher is; without it the tests cannot say anything, so they fail."""
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin:/sbin")
    if found is None:
        pytest.fail(f"{program} is not installed, so this launcher was not tested. Run: apt-get install -y {package}")
    return found


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def await_true(condition: Callable[[], object], what: str, seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.05)


# torchrun


def torchrun(*options: str) -> list[str]:
    static = any(option.startswith(("--rdzv", "--standalone", "--nnodes")) for option in options)
    port = [] if static else [f"--master-port={free_port()}"]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", *port, *options]


TWO = "--nproc-per-node=2"


def test_torchrun_ranks_share_a_run_before_and_after_the_process_group(desk: Desk) -> None:
    """Each job is a run of its own, though all that torchrun names them by is `none`."""
    desk.run(*torchrun(TWO), desk.write("plain.py", PLAIN), JOB=1)
    desk.run(*torchrun(TWO), desk.write("group.py", GROUP), JOB=2)
    first, second = desk.runs()
    check_whole(first, 2, job=1, launcher="torchrun")
    check_whole(second, 2, job=2, launcher="torchrun")


def test_torchrun_jobs_started_together_never_mix(desk: Desk) -> None:
    script = desk.write("plain.py", PLAIN)
    jobs = [desk.start(*torchrun(TWO), script, JOB=job) for job in (1, 2)]
    for job in jobs:
        desk.wait(job)
    runs = desk.runs()
    assert len(runs) == 2
    for run in runs:
        check_whole(run, 2, job=int(run.series("job").values[0]))
    assert {int(run.series("job").values[0]) for run in runs} == {1, 2}


def test_torchrun_with_a_rendezvous_id_shares_a_run(desk: Desk) -> None:
    options = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=night-17", "--nnodes=1")
    desk.run(*torchrun(TWO, *options), desk.write("plain.py", PLAIN))
    (run,) = desk.runs()
    check_whole(run, 2, launcher="torchrun")


def test_each_init_of_a_job_is_a_run_that_all_ranks_share(desk: Desk) -> None:
    desk.run(*torchrun(TWO), desk.write("twice.py", "from work import *\nwork(); work()\n"))
    runs = desk.runs()
    assert len(runs) == 2
    for run in runs:
        check_whole(run, 2)


FAILS_ONCE = """
import os, sys, time
from pathlib import Path
import fanfold
{before}
run = fanfold.init("p", quiet=True, system=False)
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not Path("again").exists()
for step in range(4) if first else range(2, 6):
    run.log({{"value": step + (0 if first else 1000)}}, step)
if first:
    Path(f"ready{{run.rank}}").touch()
    while not Path("ready0").exists() or not Path("ready1").exists():
        time.sleep(0.02)
    if run.rank == {failing}:
        Path("again").touch()
        sys.exit(3)
    time.sleep(60)  # until the agent stops us
run.finish()
{after}
"""


def check_restarted(run: fanfold.StoredRun) -> None:
    assert len(run.attempts) == 2
    assert run.status == "finished"
    assert run.ranks == [0, 1]
    for attempt in run.attempts:
        assert sorted(journal.header["rank"] for journal in attempt.mains) == [0, 1]
    for rank in (0, 1):
        series = run.series("value", rank=rank)
        assert series.steps.tolist() == [0, 1, 2, 3, 4, 5]
        assert series.values.tolist() == [0, 1, 1002, 1003, 1004, 1005]
        assert len(run.series("value", rank=rank, raw=True)) == 8


def test_a_restart_by_torchrun_is_the_next_attempt_of_the_same_run(desk: Desk) -> None:
    script = desk.write("fails.py", FAILS_ONCE.format(before="", after="", failing=1))
    desk.run(*torchrun(TWO, "--max-restarts=1", "--monitor-interval=0.1"), script)
    (run,) = desk.runs()
    check_restarted(run)
    first, second = run.attempts
    assert first.verdict()["status"] == "failed"
    assert first.verdict()["rank"] == 1
    assert second.verdict()["status"] == "finished"


def test_a_restart_of_a_single_rank_is_the_next_attempt_too(desk: Desk) -> None:
    script = desk.write(
        "once.py",
        "from work import *\nrun = fanfold.init('p', quiet=True, system=False)\nrun.log({'a': 1})\n"
        "sys.exit(0 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' else 5)\n",
    )
    desk.run(*torchrun("--max-restarts=1", "--monitor-interval=0.1"), script)
    (run,) = desk.runs()
    assert [attempt.verdict()["status"] for attempt in run.attempts] == ["failed", "finished"]
    assert run.series("a").steps.tolist() == [0, 1]


# Two nodes: two agents on this machine, each told that it is another node


def two_nodes(desk: Desk, script: str, *options: str, folders: bool = False, **more: object) -> None:
    port = free_port()
    agents = []
    for node in (0, 1):
        place = {"FANFOLD_NODE": f"node{node}"}
        if folders:
            place["FANFOLD_DIR"] = str(desk.folder / f"runs{node}")
        meeting = options or (f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
        agents.append(desk.start(*torchrun("--nnodes=2", *meeting), script, **place, **more))
    for agent in agents:
        desk.wait(agent)


@pytest.mark.parametrize("program", [TOGETHER, GROUP], ids=["before-the-group", "after-the-group"])
def test_two_nodes_with_a_shared_folder_share_a_run(desk: Desk, program: str) -> None:
    two_nodes(desk, desk.write("program.py", program))
    (run,) = desk.runs()
    check_whole(run, 2, launcher="torchrun")
    assert {journal.header["node"] for journal in run.journals} == {"node0", "node1"}
    assert not list(desk.runs_dir.glob(".join/*"))
    assert (desk.runs_dir / ".gitignore").read_text() == "*\n"


@pytest.mark.parametrize("way", ["store", "FANFOLD_RUN_ID"])
def test_two_nodes_without_a_shared_folder_hold_parts_of_one_run(desk: Desk, way: str) -> None:
    """Copied together, the parts are the whole run."""
    known = {} if way == "store" else {"FANFOLD_RUN_ID": "night-17"}
    two_nodes(desk, desk.write("program.py", GROUP if way == "store" else PLAIN), folders=True, **known)
    parts = [desk.folder / "runs0", desk.folder / "runs1"]
    (first,), (second,) = (desk.runs(part) for part in parts)
    assert first.id == second.id
    assert (first.ranks, second.ranks) == ([0], [1])
    for part in parts:
        shutil.copytree(part, desk.folder / "together", dirs_exist_ok=True)
    (run,) = desk.runs(desk.folder / "together")
    check_whole(run, 2)


GROUP_LINES = ("import torch.distributed as dist\ndist.init_process_group('gloo')", "dist.destroy_process_group()")


@pytest.mark.parametrize("lines", [("", ""), GROUP_LINES], ids=["before-the-group", "after-the-group"])
def test_a_restart_over_two_nodes_is_the_next_attempt_of_the_same_run(desk: Desk, lines: tuple[str, str]) -> None:
    """The agents meet anew for a restart, and each counts its own failures only."""
    script = desk.write("fails.py", FAILS_ONCE.format(before=lines[0], after=lines[1], failing=1))
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_port()}"
    options = ("--rdzv-backend=c10d", endpoint, "--rdzv-id=night-17", "--max-restarts=2", "--monitor-interval=0.1")
    two_nodes(desk, script, *options)
    (run,) = desk.runs()
    check_restarted(run)
