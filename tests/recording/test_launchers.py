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
import warm_python

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

    def start(self, *command: object, libraries: str | None = None, **more: object) -> subprocess.Popen[str]:
        """Start a program; with libraries, it and the ranks that torchrun starts for it are forks that have them imported."""
        words = [str(word) for word in command]
        how = {"env": self.environment(**more), "cwd": self.folder, "text": True, "start_new_session": True}
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = warm_python.Popen(words, libraries=libraries, **how) if libraries else subprocess.Popen(words, **how)
        self.started.append(process)
        return process

    def run(self, *command: object, **more: object) -> str:
        return self.wait(self.start(*command, **more))

    def wait(self, process: subprocess.Popen[str], code: int = 0, seconds: float = TIMEOUT) -> str:
        try:
            output, _ = process.communicate(timeout=seconds)
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
    assert sorted(header.rank for header in headers) == list(range(world))
    assert {header.world for header in headers} == {world}
    assert run.ranks == list(range(world))
    assert len(run.attempts) == 1
    assert run.status == "finished"
    if launcher:
        assert {header.launcher for header in headers} == {launcher}
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
    jobs = [desk.start(*torchrun(TWO), script, libraries="torch", JOB=job) for job in (1, 2)]
    for job in jobs:
        desk.wait(job)
    runs = desk.runs()
    assert len(runs) == 2
    for run in runs:
        check_whole(run, 2, job=int(run.series("job").values[0]))
    assert {int(run.series("job").values[0]) for run in runs} == {1, 2}


def test_torchrun_with_a_rendezvous_id_shares_a_run(desk: Desk) -> None:
    options = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--rdzv-id=night-17", "--nnodes=1")
    desk.run(*torchrun(TWO, *options), desk.write("plain.py", PLAIN), libraries="torch")
    (run,) = desk.runs()
    check_whole(run, 2, launcher="torchrun")


def test_each_init_of_a_job_is_a_run_that_all_ranks_share(desk: Desk) -> None:
    desk.run(*torchrun(TWO), desk.write("twice.py", "from work import *\nwork(); work()\n"), libraries="torch")
    runs = desk.runs()
    assert len(runs) == 2
    for run in runs:
        check_whole(run, 2)


FAILS_ONCE = """
import sys, time
from pathlib import Path
import fanfold
first = not Path("failed").exists()
run = fanfold.init("p", quiet=True, system=False)
for step in range(4) if first else range(2, 6):
    run.log({"value": step + (0 if first else 1000)}, step)
if first:
    Path(f"ready{run.rank}").touch()
    while not Path("ready0").exists() or not Path("ready1").exists():
        time.sleep(0.02)
    if run.rank == 1:
        Path("failed").touch()
        sys.exit(3)
    time.sleep(60)  # until the agent stops us
run.finish()
"""


def check_restarted(run: fanfold.StoredRun) -> None:
    assert len(run.attempts) == 2
    assert run.status == "finished"
    assert run.ranks == [0, 1]
    for attempt in run.attempts:
        assert sorted(journal.header.rank for journal in attempt.mains) == [0, 1]
    for rank in (0, 1):
        series = run.series("value", rank=rank)
        assert series.steps.tolist() == [0, 1, 2, 3, 4, 5]
        assert series.values.tolist() == [0, 1, 1002, 1003, 1004, 1005]
        assert len(run.series("value", rank=rank, raw=True)) == 8


def test_a_restart_by_torchrun_is_the_next_attempt_of_the_same_run(desk: Desk) -> None:
    desk.run(*torchrun(TWO, "--max-restarts=1", "--monitor-interval=0.1"), desk.write("fails.py", FAILS_ONCE), libraries="torch")
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
    desk.run(*torchrun("--max-restarts=1", "--monitor-interval=0.1"), script, libraries="torch")
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
        static = (f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}")
        meeting = () if "--rdzv-backend=c10d" in options else static
        agents.append(desk.start(*torchrun("--nnodes=2", *meeting, *options), script, libraries="torch", **place, **more))
    for agent in agents:
        desk.wait(agent)


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("program", [TOGETHER, GROUP], ids=["before-the-group", "after-the-group"])
def test_two_nodes_with_a_shared_folder_share_a_run(desk: Desk, program: str, restarts: int) -> None:
    two_nodes(desk, desk.write("program.py", program), f"--max-restarts={restarts}")
    (run,) = desk.runs()
    check_whole(run, 2, launcher="torchrun")
    assert {journal.header.node for journal in run.journals} == {"node0", "node1"}
    # No question is left; an answer may stand for ten minutes, for ranks that ask when rank 0 has ended.
    assert {path.suffix for path in desk.runs_dir.glob(".join/*/*")} <= {".standing"}
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


def test_a_restart_over_two_nodes_is_the_next_attempt_of_the_same_run(desk: Desk) -> None:
    """Each agent counts its own failures only, so the ranks have different restart counts."""
    options = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=night-17")
    two_nodes(desk, desk.write("fails.py", FAILS_ONCE), *options, "--max-restarts=1", "--monitor-interval=0.1")
    (run,) = desk.runs()
    check_restarted(run)


# Accelerate


def accelerate(*options: str) -> list[str]:
    launch = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--num_processes=2", "--num_machines=1"]
    return [*launch, "--mixed_precision=no", "--dynamo_backend=no", *options]


def test_accelerate_jobs_started_together_never_mix(desk: Desk) -> None:
    """`--multi_gpu` starts the ranks through torchrun; the program uses no GPU."""
    script = desk.write("plain.py", PLAIN)
    jobs = [desk.start(*accelerate("--multi_gpu", f"--main_process_port={free_port()}"), script, JOB=job) for job in (1, 2)]
    for job in jobs:
        desk.wait(job)
    runs = desk.runs()
    assert len(runs) == 2
    for run in runs:
        check_whole(run, 2, job=int(run.series("job").values[0]), launcher="accelerate")
    assert {int(run.series("job").values[0]) for run in runs} == {1, 2}


def test_accelerate_on_cpus_shares_a_run(desk: Desk) -> None:
    """For several processes on CPUs, accelerate asks mpirun."""
    need("mpirun", "openmpi-bin")
    hosts = f"--mpirun_hostfile={desk.write('hosts', 'localhost slots=2')}"
    root = {"OMPI_ALLOW_RUN_AS_ROOT": 1, "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": 1, "OMPI_MCA_rmaps_base_oversubscribe": 1}
    desk.run(*accelerate("--cpu", hosts), desk.write("plain.py", PLAIN), **root)
    (run,) = desk.runs()
    check_whole(run, 2)


# Plain Python, multiprocessing, fork


def test_each_start_of_plain_python_is_a_run_of_its_own(desk: Desk) -> None:
    script = desk.write("plain.py", PLAIN)
    for job in (1, 2):
        desk.run(sys.executable, script, JOB=job)
    first, second = desk.runs()
    check_whole(first, 1, job=1, launcher="python")
    check_whole(second, 1, job=2, launcher="python")


CHILDREN = """
import multiprocessing, os, sys
from work import work

def rank(number, job):
    os.environ.update(RANK=str(number), WORLD_SIZE="2", JOB=job)
    work(together=True)

def world(method, job):
    context = multiprocessing.get_context(method)
    children = [context.Process(target=rank, args=(number, job)) for number in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(50)
    assert [child.exitcode for child in children] == [0, 0]

if __name__ == "__main__":
    for job in sys.argv[2:]:
        world(sys.argv[1], job)
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_children_with_a_rank_share_a_run_and_later_children_have_another(desk: Desk, method: str) -> None:
    """Two programs do so at the same time, each twice: four runs, none mixed."""
    script = desk.write("children.py", CHILDREN)
    programs = [desk.start(sys.executable, script, method, *jobs) for jobs in (("1", "2"), ("3", "4"))]
    for program in programs:
        desk.wait(program)
    runs = desk.runs()
    assert sorted(int(run.series("job").values[0]) for run in runs) == [1, 2, 3, 4]
    for run in runs:
        check_whole(run, 2, job=int(run.series("job").values[0]), launcher="distributed")


SHORT = """
import multiprocessing, os, sys
import fanfold

def rank(number, job, go):
    os.environ.update(RANK=str(number), WORLD_SIZE="2")
    go.wait(60)
    with fanfold.init("p", quiet=True, system=False) as run:
        run.log({"job": job, "rank": number}, 0)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for job in (1, 2):
        events = [context.Event(), context.Event()]
        ranks = [context.Process(target=rank, args=(number, job, events[number])) for number in (0, 1)]
        for process in ranks:
            process.start()
        for process, event in zip(ranks, events):  # rank 0 is over before rank 1 begins
            event.set()
            process.join(100)
            if process.exitcode:
                sys.exit(process.exitcode)
"""


def test_children_share_a_run_also_when_rank_0_ends_before_the_others_begin(desk: Desk) -> None:
    desk.run(sys.executable, desk.write("short.py", SHORT))
    runs = desk.runs()
    assert sorted(run.series("job").values[0] for run in runs) == [1, 2]
    for run in runs:
        assert [run.series("rank", rank=number).values[0] for number in (0, 1)] == [0, 1]


def test_a_parent_that_is_rank_0_shares_its_run_with_its_children(desk: Desk) -> None:
    program = CHILDREN.partition("def world")[0] + (
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=rank, args=(1, '7'))\n"
        "    child.start(); rank(0, '7'); child.join(50); sys.exit(child.exitcode)\n"
    )
    desk.run(sys.executable, desk.write("parent.py", program))
    (run,) = desk.runs()
    check_whole(run, 2, job=7)


def test_ranks_started_by_hand_meet_where_their_process_group_will(desk: Desk) -> None:
    """From different parents, with nothing in common but address, port and number of ranks."""
    script, port = desk.write("together.py", TOGETHER), free_port()
    ranks = []
    for rank in (1, 0):
        place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
        ranks.append(desk.start("sh", "-c", f"{sys.executable} {script}; exit $?", **place))
    for process in ranks:
        desk.wait(process)
    (run,) = desk.runs()
    check_whole(run, 2, launcher="distributed")


TORCH_CHILDREN = """
import sys
import torch.distributed as dist
import torch.multiprocessing
from work import work

def rank(number, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=2)
    work()
    dist.destroy_process_group()

if __name__ == "__main__":
    for number in ("one", "two"):
        torch.multiprocessing.spawn(rank, args=(f"{sys.argv[1]}/{number}",), nprocs=2)
"""


def test_children_that_only_a_process_group_ranks_share_a_run(desk: Desk) -> None:
    desk.run(sys.executable, desk.write("children.py", TORCH_CHILDREN), desk.folder, libraries="torch")
    runs = desk.runs()
    assert len(runs) == 2
    for run in runs:
        check_whole(run, 2)


def test_children_forked_after_init_write_to_the_run_as_workers(desk: Desk) -> None:
    program = (
        "import multiprocessing, os\nfrom work import *\n"
        "run = fanfold.init('p', quiet=True, system=False)\nrun.log({'main': 0}, 0)\n"
        "def child(number):\n    run.log({f'child{number}': number}, number)\n"
        "children = [multiprocessing.get_context('fork').Process(target=child, args=(n,)) for n in (1, 2)]\n"
        "[c.start() for c in children]; [c.join(50) for c in children]\nrun.log({'main': 1}, 1); run.finish()\n"
    )
    desk.run(sys.executable, desk.write("forks.py", program))
    (run,) = desk.runs()
    assert sorted((j.header.role, j.header.rank) for j in run.journals) == [("main", 0), ("worker", 0), ("worker", 0)]
    assert run.series("main").values.tolist() == [0, 1]
    assert [run.series(f"child{n}").values.tolist() for n in (1, 2)] == [[1], [2]]
    assert run.status == "finished"


def test_ranks_meet_without_torch_installed(desk: Desk) -> None:
    program = "import sys\nsys.modules['torch'] = sys.modules['torch.distributed'] = None\n" + PLAIN
    desk.run(*torchrun(TWO), desk.write("without.py", program))
    (run,) = desk.runs()
    check_whole(run, 2)


# MPI


def test_mpirun_ranks_share_a_run_also_behind_a_shell_script(desk: Desk) -> None:
    mpirun = [need("mpirun", "openmpi-bin"), "--allow-run-as-root", "--oversubscribe", "-n", "2"]
    script = desk.write("plain.py", PLAIN)
    desk.run(*mpirun, sys.executable, script, JOB=1)
    desk.run(*mpirun, "sh", "-c", f"{sys.executable} {script}; exit $?", JOB=2)
    first, second = desk.runs()
    check_whole(first, 2, job=1, launcher="mpirun")
    check_whole(second, 2, job=2, launcher="mpirun")


# Slurm


class Slurm:
    """A cluster of one node, of our own: controller, node daemon and key service in a folder, as ordinary processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        node = socket.gethostname()
        folder.chmod(0o711)
        (folder / "key").write_bytes(os.urandom(128))
        (folder / "key").chmod(0o600)
        user = "root" if os.getuid() == 0 else str(os.getuid())
        settings = {
            "ClusterName": "test", "SlurmctldHost": f"{node}(127.0.0.1)", "SlurmctldPort": free_port(),
            "SlurmdPort": free_port(), "SlurmUser": user, "SlurmdUser": user, "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder}/munge.sock,cred_expire=5", "CredType": "cred/munge",
            "StateSaveLocation": folder / "state", "SlurmdSpoolDir": folder / "spool",
            "SlurmctldPidFile": folder / "controller.pid", "SlurmdPidFile": folder / "node.pid",
            "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "JobAcctGatherType": "jobacct_gather/none",
            "SwitchType": "switch/none", "MpiDefault": "none", "ReturnToService": 2, "KillWait": 5,
        }  # fmt: skip
        lines = [f"{name}={value}" for name, value in settings.items()]
        lines += [f"NodeName={node} NodeAddr=127.0.0.1 CPUs={os.cpu_count()}", "PartitionName=all Nodes=ALL Default=YES State=UP"]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name in ("state", "spool"):
            (folder / name).mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        munged, controller, daemon = (need(name, "slurm-wlm munge") for name in ("munged", "slurmctld", "slurmd"))
        files = [f"--{kind}={self.folder}/{name}" for kind, name in
                 (("key-file", "key"), ("socket", "munge.sock"), ("pid-file", "munge.pid"), ("seed-file", "seed"))]  # fmt: skip
        self._daemon("munge", munged, "--foreground", "--force", *files, f"--log-file={self.folder}/munge.log")
        await_true((self.folder / "munge.sock").exists, "munged", 20)
        self._daemon("controller", controller, "-D", "-i", "-c")
        self._daemon("node", daemon, "-D", "-c", "-N", socket.gethostname())
        await_true(lambda: "idle" in self.ask("sinfo", "-h", "-o", "%t"), "an idle Slurm node", 30)

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as log:
            env = {**os.environ, "SLURM_CONF": self.conf}
            self.processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    @property
    def conf(self) -> str:
        return str(self.folder / "slurm.conf")

    def ask(self, *command: str) -> str:
        env = {**os.environ, "SLURM_CONF": self.conf}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=20, check=False).stdout

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def srun(slurm: Slurm, tasks: int) -> list[str]:
    return [need("srun", "slurm-wlm munge"), "--overcommit", f"--ntasks={tasks}"]


def test_srun_tasks_share_a_run_also_when_they_set_rank_themselves(desk: Desk, slurm: Slurm) -> None:
    script = desk.write("plain.py", PLAIN)
    by_hand = f"RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS {sys.executable} {script}; exit $?"
    desk.run(*srun(slurm, 2), sys.executable, script, SLURM_CONF=slurm.conf, JOB=1)
    desk.run(*srun(slurm, 2), "sh", "-c", by_hand, SLURM_CONF=slurm.conf, JOB=2)
    first, second = desk.runs()
    check_whole(first, 2, job=1, launcher="srun")
    check_whole(second, 2, job=2, launcher="srun")


def test_programs_in_one_slurm_step_or_batch_script_are_runs_of_their_own(desk: Desk, slurm: Slurm) -> None:
    script = desk.write("plain.py", PLAIN)
    loop = f"for JOB in 1 2; do export JOB; {sys.executable} {script} || exit 1; done"
    desk.run(*srun(slurm, 1), "sh", "-c", loop, SLURM_CONF=slurm.conf)
    batch = desk.write("batch.sh", f"#!/bin/sh\n{loop}\n")
    sbatch = need("sbatch", "slurm-wlm munge")
    desk.run(sbatch, "--wait", "--overcommit", "--ntasks=2", "--output=batch.out", batch, SLURM_CONF=slurm.conf)
    runs = desk.runs()
    assert [int(run.series("job").values[0]) for run in runs] == [1, 2, 1, 2]
    for run in runs:
        check_whole(run, 1, job=int(run.series("job").values[0]))


def test_a_job_that_slurm_requeues_is_the_next_attempt_of_the_same_run(desk: Desk, slurm: Slurm) -> None:
    program = (
        "import os, time\nimport fanfold\nrun = fanfold.init('p', quiet=True, system=False)\n"
        "for _ in range(3):\n    run.log({'value': run.attempt})\n"
        "if 'SLURM_RESTART_COUNT' not in os.environ:\n"
        "    open(f'ready{run.rank}', 'w').close(); time.sleep(60)\nrun.finish()\n"
    )
    script = desk.write("requeued.py", program)
    batch = desk.write("batch.sh", f"#!/bin/sh\nsrun --overcommit --ntasks=2 {sys.executable} {script}\n")
    options = ["--parsable", "--requeue", "--overcommit", "--ntasks=2", "--output=batch.out"]
    job = desk.run(need("sbatch", "slurm-wlm munge"), *options, batch, SLURM_CONF=slurm.conf).strip()
    await_true(lambda: all((desk.folder / f"ready{rank}").exists() for rank in (0, 1)), "the first life", 30)
    slurm.ask("scontrol", "requeue", job)

    def over() -> bool:
        slurm.ask("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets a requeued job wait two minutes
        return slurm.ask("squeue", "-h", "-j", job, "-o", "%T").strip() in ("", "COMPLETED")

    await_true(over, "the second life", 50)
    (run,) = desk.runs()
    assert [attempt.verdict()["status"] for attempt in run.attempts] == ["preempted", "finished"]
    assert run.status == "finished"
    for rank in (0, 1):
        assert run.series("value", rank=rank).steps.tolist() == [0, 1, 2, 3, 4, 5]
        assert run.series("value", rank=rank).values.tolist() == [1, 1, 1, 2, 2, 2]


# Ray


RAY = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import ray, ray.train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

def loop(config):
    os.environ["JOB"] = config["job"]
    from work import work
    work()

def fit(job, storage):
    scaling, settings = ScalingConfig(num_workers=2), RunConfig(storage_path=storage)
    TorchTrainer(loop, train_loop_config={"job": job}, scaling_config=scaling, run_config=settings).fit()

@ray.remote(num_cpus=0)
class Worker:
    def rank(self, number, job, port):
        os.environ.update(JOB=job, RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        from work import work
        work(together=True)

if __name__ == "__main__":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    with ThreadPoolExecutor() as pool:
        list(pool.map(fit, "12", sys.argv[1:3]))
    ray.get([Worker.remote().rank.remote(rank, job, port)
             for job, port in zip("34", sys.argv[3:]) for rank in (0, 1)])
"""


@pytest.mark.faults
def test_trainers_and_actors_in_one_ray_job_never_mix(desk: Desk) -> None:
    """All workers on a node are children of one raylet, and what RAY_JOB_ID says depends on when a worker was started."""
    script = desk.write("trainers.py", RAY)
    quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": 0, "RAY_TRAIN_V2_ENABLED": 1}
    storage = [desk.folder / f"results{job}" for job in (1, 2)]
    driver = desk.start(sys.executable, script, *storage, free_port(), free_port(), **quiet)
    desk.wait(driver, seconds=240)  # four workers import torch at once
    runs = desk.runs()
    assert sorted(int(run.series("job").values[0]) for run in runs) == [1, 2, 3, 4]
    for run in runs:
        check_whole(run, 2, job=int(run.series("job").values[0]), launcher="ray")


# Resuming


TRAINS = """
import os, sys, time
import fanfold
run = fanfold.init("p", quiet=True, system=False)
for _ in range(3):
    run.log({"value": run.attempt})
if sys.argv[1] == "wait":
    with open(f"writing{run.rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"writing{run.rank}", f"ready{run.rank}")
    time.sleep(60)
run.finish()
"""


def interrupt(desk: Desk, how: signal.Signals, **more: object) -> None:
    """Start a training of two ranks and end it from outside after three steps, as a scheduler does."""
    job = desk.start(*torchrun(TWO), desk.write("trains.py", TRAINS), "wait", libraries="torch", **more)
    ready = [desk.folder / f"ready{rank}" for rank in (0, 1)]
    await_true(lambda: all(file.exists() for file in ready), "the first steps")
    for file in ready:
        os.kill(int(file.read_text()), how)
        file.unlink()
    desk.wait(job, 1)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, "preempted"), (signal.SIGKILL, "killed")])
def test_auto_continues_what_was_interrupted_and_then_starts_anew(desk: Desk, how: signal.Signals, status: str) -> None:
    interrupt(desk, how, FANFOLD_RESUME="auto")
    (broken,) = desk.runs()
    assert broken.status == status
    desk.run(sys.executable, desk.folder / "trains.py", "go")  # who does not ask for it continues nothing
    for _ in range(2):
        desk.run(*torchrun(TWO), desk.write("trains.py", TRAINS), "go", libraries="torch", FANFOLD_RESUME="auto")
    resumed, unasked, new = desk.runs()
    assert resumed.id == broken.id
    assert len(unasked.attempts) == 1
    assert [attempt.verdict()["status"] for attempt in resumed.attempts] == [status, "finished"]
    assert (resumed.status, new.status) == ("finished", "finished")
    for rank in (0, 1):
        assert resumed.series("value", rank=rank).steps.tolist() == [0, 1, 2, 3, 4, 5]
        assert resumed.series("value", rank=rank).values.tolist() == [1, 1, 1, 2, 2, 2]
        assert new.series("value", rank=rank).steps.tolist() == [0, 1, 2]


def test_auto_continues_ranks_started_by_hand_at_the_same_address(desk: Desk) -> None:
    """Nothing in their environment tells the second start from the first."""
    script, port = desk.write("together.py", TRAINS), free_port()

    def ranks(word: str) -> list[subprocess.Popen[str]]:
        place = {"WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "FANFOLD_RESUME": "auto"}
        return [desk.start(sys.executable, script, word, RANK=rank, **place) for rank in (0, 1)]

    first = ranks("wait")
    await_true(lambda: all((desk.folder / f"ready{rank}").exists() for rank in (0, 1)), "the first steps")
    for process in first:
        process.terminate()
    for process in first:
        desk.wait(process, -signal.SIGTERM)
    for process in ranks("wait"):
        await_true(lambda: len(list(desk.runs_dir.glob("p/*/journal/*.ffj"))) == 4, "the second start")
        process.kill()
        desk.wait(process, -signal.SIGKILL)
    (run,) = desk.runs()
    assert [attempt.verdict()["status"] for attempt in run.attempts] == ["preempted", "killed"]
    assert [len(attempt.mains) for attempt in run.attempts] == [2, 2]


def test_auto_leaves_other_names_and_other_projects_alone(desk: Desk) -> None:
    interrupt(desk, signal.SIGTERM, FANFOLD_NAME="one")
    script = desk.write("trains.py", TRAINS)
    desk.run(sys.executable, script, "go", FANFOLD_RESUME="auto", FANFOLD_NAME="two")
    desk.run(sys.executable, "-c", "import fanfold; fanfold.init('q', resume='auto', quiet=True, system=False).finish()")
    assert [(run.name, run.project, run.status) for run in desk.runs()][:2] == [
        ("one", "p", "preempted"),
        ("two", "p", "finished"),
    ]
    assert len(desk.runs()) == 3


def test_never_must_and_allow_do_as_they_say(desk: Desk) -> None:
    script = desk.write("trains.py", TRAINS)

    def start(resume: str, code: int) -> str:
        command = (sys.executable, script, "go")
        return desk.wait(desk.start(*command, FANFOLD_RUN_ID="night-17", FANFOLD_RESUME=resume), code)

    assert "resume='must'" in start("must", 1)
    assert desk.runs() == []
    start("never", 0)
    assert "resume='never'" in start("never", 1)
    start("allow", 0)
    start("must", 0)
    (run,) = desk.runs()
    assert run.id == "night-17"
    assert len(run.attempts) == 3
    assert run.series("value").values.tolist() == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert run.series("value").steps.tolist() == list(range(9))
