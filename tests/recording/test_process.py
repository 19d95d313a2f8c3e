"""Who a process is, by the environments that launchers really set, and the keys that ranks agree on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fanfold import process
from fanfold.errors import RunError
from fanfold.process import Meeting, ProcessIdentity, detect, digest, job_key, launch_key, node_key, shared_key
from fanfold.recording import join
from fanfold.recording.names import name_for

Environment = dict[str, str]

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
            "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_NPROCS": "8",
         "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_TASK_PID": "20529"}  # fmt: skip
SRUN = BATCH | {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_TASK_PID": "20548"}  # fmt: skip
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
           "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "1429733377", "PMIX_RANK": "1",
           "OMPI_MCA_orte_precondition_transports": "4f56034f952b6325-ada48ec9de586766"}  # fmt: skip
MVAPICH = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_LOCAL_RANK": "1",
           "MV2_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
RAY = {"RAY_JOB_ID": "01000000", "RAY_RAYLET_PID": "20717", "MASTER_ADDR": "192.0.2.2", "MASTER_PORT": "60395",
       "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_TORCH_DEVICE": "cpu"}  # fmt: skip
BY_HAND = {"RANK": "2", "WORLD_SIZE": "4"}
POD = BY_HAND | {"MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}

LAUNCHES = {
    "nothing": ({}, "python", 0, 1, 0, None),
    "torchrun": (TORCHRUN, "torchrun", 3, 8, 1, 4),
    "accelerate": (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, "accelerate", 3, 8, 1, 4),
    "torchrun in an srun step": (SRUN | TORCHRUN, "torchrun", 3, 8, 1, 4),
    "torchrun in a Ray worker": (RAY | TORCHRUN, "torchrun", 3, 8, 1, 4),
    "a batch script": (BATCH, "python", 0, 1, 0, None),
    "srun": (SRUN, "srun", 5, 8, 1, 4),
    "srun over uneven nodes": (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,5"}, "srun", 5, 8, 1, None),
    "srun, and RANK that repeats it": (SRUN | {"RANK": "5", "WORLD_SIZE": "8"}, "srun", 5, 8, 1, 4),
    "srun, and RANK that contradicts it": (SRUN | POD, "distributed", 2, 4, 0, None),
    "srun with a process manager": (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"}, "srun", 5, 8, 1, 4),
    "mpirun": (OPENMPI, "mpirun", 1, 2, 0, 1),
    "mpirun whose daemons srun started": (SRUN | OPENMPI, "mpirun", 1, 2, 0, 1),
    "mpirun of MVAPICH": (MVAPICH, "mpirun", 1, 4, 1, 2),
    "mpiexec of MPICH": (HYDRA, "mpirun", 2, 4, 0, 2),
    "mpiexec of MPICH whose daemons srun started": (SRUN | HYDRA, "mpirun", 2, 4, 0, 2),
    "a process manager alone": ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "mpirun", 1, 2, 1, None),
    "Ray": (RAY, "ray", 1, 2, 1, 2),
    "Ray in an srun step": (SRUN | RAY, "ray", 1, 2, 1, 2),
    "a Ray task in an srun step": (SRUN | {"RAY_JOB_ID": "ffffffff"}, "ray", 0, 1, 0, None),
    "by hand, on this node": (BY_HAND, "distributed", 2, 4, 2, None),
    "by hand, a pod each": (POD, "distributed", 2, 4, 0, None),
    "a rank without a world": ({"RANK": "2"}, "python", 0, 1, 0, None),
    "words that are no numbers": ({"RANK": "two", "WORLD_SIZE": "4"}, "python", 0, 1, 0, None),
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away what the tests themselves were started with."""
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI", "MV2_", "RAY_", "TORCHELASTIC_", "ACCELERATE_", "FANFOLD_", "MASTER_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("launch", LAUNCHES)
def test_each_launcher_is_known_by_what_it_sets(launch: str) -> None:
    env, launcher, rank, world, local_rank, local_world = LAUNCHES[launch]
    me = detect(env)
    assert (me.launcher, me.rank, me.world_size) == (launcher, rank, world)
    assert (me.local_rank, me.local_world_size) == (local_rank, local_world)
    assert me.pid == os.getpid()
    assert me.main == (rank == 0)


def test_settings_win_over_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_RANK", "0")
    monkeypatch.setenv("FANFOLD_WORLD_SIZE", "2")
    monkeypatch.setenv("FANFOLD_NODE", "trainer-a")
    me = detect(TORCHRUN)
    assert (me.rank, me.world_size, me.node) == (0, 2, "trainer-a")


def test_a_rank_beyond_the_world_makes_the_world_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FANFOLD_RANK", "7")
    assert detect({}).world_size == 8


def key_of(env: Environment) -> str | None:
    return job_key(detect(env), env)


def test_jobs_are_known_by_their_launchers_own_ids() -> None:
    assert key_of(SRUN) == "srun:2:0"
    assert key_of(TORCHRUN | {"TORCHELASTIC_RUN_ID": "night-17"}) == "torchrun:night-17"
    assert key_of(OPENMPI) == "mpirun:1429733377:4f56034f952b6325-ada48ec9de586766"


def test_each_step_of_a_slurm_job_is_a_job_and_a_requeue_is_not() -> None:
    again = SRUN | {"SLURM_RESTART_COUNT": "1"}
    assert key_of(SRUN | {"SLURM_STEP_ID": "1"}) != key_of(SRUN)
    assert key_of(again) == key_of(SRUN)
    assert launch_key(detect(again), again) != launch_key(detect(SRUN), SRUN)


@pytest.mark.parametrize("env", [{}, TORCHRUN, BATCH, MVAPICH, HYDRA, RAY, POD], ids=repr)
def test_what_names_no_job_is_not_taken_for_one(env: Environment) -> None:
    assert key_of(env) is None


def test_a_namespace_that_repeats_with_pids_is_no_job() -> None:
    """Open MPI 5 sets no random word beside it."""
    assert key_of({name: value for name, value in OPENMPI.items() if "transports" not in name}) is None


def test_a_single_task_is_its_step_and_a_program_it_starts_is_not() -> None:
    single = SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
    assert key_of(single | {"SLURM_TASK_PID": str(os.getpid())}) == "srun:2:0"
    assert key_of(single) is None


def test_on_one_node_the_launcher_process_is_the_key() -> None:
    one = TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}
    me = detect(one)
    parent = os.getppid()
    assert node_key(me, one) == f"{me.node}:{me.boot}:{parent}:{process.started_at(parent)}"
    assert launch_key(me, one) != launch_key(me, one | {"TORCHELASTIC_RESTART_COUNT": "1"})


def test_a_process_alone_is_its_own_key() -> None:
    me = detect({})
    assert shared_key(me, 0, _never) == f"{me.node}:{me.boot}:{os.getpid()}:{process.started_at(os.getpid())}"


def test_restart_counts_of_several_nodes_are_not_trusted() -> None:
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert launch_key(detect(again), again) == launch_key(detect(TORCHRUN), TORCHRUN)


def test_ranks_that_nothing_names_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in BY_HAND.items():
        monkeypatch.setenv(name, value)
    assert shared_key(detect(), 0, lambda: "met") == "met"


def _never() -> str:
    raise AssertionError("asked the directory")


def test_a_digest_is_short_and_stands_for_its_words() -> None:
    assert digest("a", "b") == digest("a", "b")
    assert len({digest("a", "b"), digest("ab"), digest("a", "b", ""), digest("b", "a")}) == 4
    assert len(digest("x")) == 12
    assert digest("x").isalnum()
    assert digest("\udcff")  # a file name that is no UTF-8


def test_ids_seldom_share_a_name() -> None:
    names = {name_for(digest(str(number))) for number in range(1000)}
    assert name_for("abc") == name_for("abc")
    assert len(names) > 990
    assert all(len(name.split("-")) == 3 for name in names)


def test_a_start_time_tells_a_reused_pid_apart() -> None:
    first = process.started_at(os.getpid())
    assert first == process.started_at(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert int(process.started_at(child.pid)) >= int(first)
        child.communicate(timeout=20)
    assert process.started_at(child.pid) == "0"


def test_functions_for_the_main_process_do_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    @process.on_main_process
    def double(number: int) -> int:
        return 2 * number

    assert double(2) == 4
    monkeypatch.setenv("FANFOLD_RANK", "1")
    assert double(2) is None
    assert not process.is_main_process()


# Meeting in a directory


def rank(number: int, world: int = 3) -> ProcessIdentity:
    return ProcessIdentity(number, world, number, None, "distributed", "node", "boot", os.getpid())


ADDRESS = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def in_thread(function: Callable[[], str]) -> tuple[threading.Thread, list[str]]:
    results: list[str] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    return thread, results


def test_every_rank_gets_the_word_of_rank_0_and_nothing_stays_behind(tmp_path: Path) -> None:
    askers = [in_thread(Meeting(tmp_path, rank(number), 0, ADDRESS).ask) for number in (1, 2)]
    join._answer(Meeting(tmp_path, rank(0), 0, ADDRESS), "the key")
    for thread, results in askers:
        thread.join(20)
        assert results == ["the key"]
    assert list((tmp_path / ".join").iterdir()) == []


def test_ranks_that_come_late_and_from_other_processes_get_their_answer(tmp_path: Path) -> None:
    answerer, _ = in_thread(lambda: str(join._answer(Meeting(tmp_path, rank(0), 0, ADDRESS), "the key")))
    program = (
        "import sys; from pathlib import Path; from fanfold.process import *; "
        "me = ProcessIdentity(int(sys.argv[2]), 3, 0, None, 'distributed', 'elsewhere', 'other boot', 1); "
        f"print(Meeting(Path(sys.argv[1]), me, 0, {ADDRESS!r}).ask())"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[1])}
    for number in ("1", "2"):
        command = [sys.executable, "-c", program, str(tmp_path), number]
        assert subprocess.run(command, env=env, capture_output=True, text=True, timeout=40, check=True).stdout == "the key\n"
    answerer.join(20)
    assert not answerer.is_alive()


def test_what_an_earlier_job_left_is_neither_taken_nor_counted(tmp_path: Path) -> None:
    """Ranks of an earlier job died while they waited, and one answer was never fetched."""
    meeting = Meeting(tmp_path, rank(0), 0, ADDRESS)
    (folder,) = meeting.directories
    folder.mkdir(parents=True)
    for name in ("1-aaaa.ask", "2-bbbb.ask"):
        (folder / name).touch()
    (folder / "1-aaaa.answer").write_text("the old key")
    assert meeting.answer("the new key") == 0
    asker, results = in_thread(Meeting(tmp_path, rank(1), 0, ADDRESS).ask)
    while asker.is_alive():
        meeting.answer("the new key")
    assert results == ["the new key"]
    assert meeting.answer("the new key") == 1  # of the two ranks that rank 0 waits for, one has come
    meeting.leave()
    assert not folder.exists()


def test_the_answer_that_rank_0_left_is_for_processes_that_were_started_before(tmp_path: Path) -> None:
    here = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    Meeting(tmp_path, rank(0), 0, here).stand("the key")
    assert Meeting(tmp_path, rank(1), 0, here).ask() == "the key"
    program = (
        "import os, sys; from pathlib import Path; from fanfold.process import *; "
        "me = ProcessIdentity(2, 3, 2, None, 'distributed', 'node', 'boot', os.getpid()); "
        f"print(Meeting(Path(sys.argv[1]), me, 0, {here!r}).ask(timeout=4))"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[1])}
    later = subprocess.run(  # a process of the next job
        [sys.executable, "-c", program, str(tmp_path)], env=env, capture_output=True, text=True, timeout=40, check=False
    )
    assert "found no run to join" in later.stderr
    process.sweep(tmp_path, 3600)
    assert list((tmp_path / ".join").iterdir())
    process.sweep(tmp_path, -1)
    assert list((tmp_path / ".join").iterdir()) == []


def test_jobs_and_inits_that_are_not_the_same_do_not_meet(tmp_path: Path) -> None:
    def place(me: ProcessIdentity, count: int, **more: str) -> Path:
        return Meeting(tmp_path, me, count, ADDRESS | more).directories[0]

    here = place(rank(1), 0)
    assert here == place(rank(0), 0)
    others = [place(rank(1), 1), place(rank(1, 4), 0), place(rank(1), 0, MASTER_PORT="29501"), place(rank(1), 0, MASTER_ADDR="b")]
    assert len({here, *others}) == 5


def test_a_rank_that_nobody_answers_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"rank 1 of 3 found no run.*not started.*FANFOLD_RUN_ID") as caught:
        Meeting(tmp_path, rank(1), 0, ADDRESS).ask(timeout=0.1)
    assert str(tmp_path) in str(caught.value)
    assert list((tmp_path / ".join").iterdir()) == []
