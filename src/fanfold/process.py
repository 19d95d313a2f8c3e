"""Which process am I, and which run do I belong to: rank, world, node, launcher, and a key all ranks agree on.

Everything is read from the environment and the operating system; no collective is ever called, and torch is asked only
when the user has imported it already.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from .errors import RunError
from .settings import resolve

P = ParamSpec("P")
R = TypeVar("R")
JOIN_SECONDS = 30.0
LIVE_SECONDS = 2.0  # within which a rank 0 that is alive has answered


@dataclass(frozen=True)
class Launcher:
    """How one launcher names rank, world size and local rank, and which variables identify its job and its restarts."""

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str
    job: tuple[str, ...] = ()
    restart: str = ""
    needs: str = ""

    def place(self, env: Mapping[str, str]) -> tuple[int | None, int | None]:
        """Return rank and world size as this launcher tells them."""
        return _number(env, self.rank), _number(env, self.world)

    def marks(self, env: Mapping[str, str]) -> dict[str, str | None]:
        """Return the variables by which a rank and whatever wraps it can be known."""
        return {name: env.get(name) for name in (self.rank, self.world, self.local_rank, self.local_world)}


# In this order. MPI's own launchers stand before srun, which starts their daemons and leaves its variables behind.
# RANK and WORLD_SIZE alone may come from anybody: see _launcher.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",),
             "TORCHELASTIC_RESTART_COUNT", needs="TORCHELASTIC_RUN_ID"),
    # The namespace repeats once pids do, in a container every time; the second word is random for every mpirun.
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports")),
    Launcher("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
             "MV2_COMM_WORLD_LOCAL_SIZE"),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", needs="MPI_LOCALRANKID"),
    # A batch script has a rank and a number of tasks too, but no step: it is one process.
    Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
             ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_RESTART_COUNT", needs="SLURM_STEP_ID"),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("distributed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("fanfold", "FANFOLD_RANK", "FANFOLD_WORLD_SIZE", "FANFOLD_LOCAL_RANK", "FANFOLD_LOCAL_WORLD_SIZE"),
)  # fmt: skip
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True)
class Identity:
    """This process among the processes of its job."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    launcher: str
    node: str
    boot: str
    pid: int

    @property
    def main(self) -> bool:
        return self.rank == 0

    @property
    def local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def one_node(self) -> bool:
        return self.world_size == 1 or self.local_world_size == self.world_size


def _number(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "").partition("(")[0]  # Slurm writes 4(x2) for four tasks on each of two nodes
    return int(text) if text.isdecimal() else None


def _launcher(env: Mapping[str, str]) -> Launcher | None:
    """Return the launcher whose word holds, or None."""
    rows = [row for row in LAUNCHERS if None not in row.place(env) and (not row.needs or row.needs in env)]
    if "RAY_JOB_ID" in env:  # a Ray worker has what `ray start` was given: srun's variables say nothing of it
        rows = [row for row in rows if row.name in ("torchrun", "distributed", "fanfold")]
    by_hand = next((row for row in rows if row.name == "distributed"), None)
    if by_hand is None or rows[0].name == "torchrun":
        return rows[0] if rows else None
    # RANK set by hand holds, unless it only repeats what srun or mpirun says: they also know their job.
    return next(row for row in rows if row.place(env) == by_hand.place(env))


def _group() -> Any:
    """Return torch.distributed if the user has a process group open, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def detect(env: Mapping[str, str] | None = None) -> Identity:
    """Find out who this process is. Settings win, then an open process group, then what the launcher says."""
    env = os.environ if env is None else env
    row, group = _launcher(env), _group()
    rank, world = row.place(env) if row else (None, None)
    if group is not None:
        rank, world = group.get_rank(), group.get_world_size()
    rank, world = _first(resolve("rank"), rank, 0), _first(resolve("world_size"), world, 1)
    local = _number(env, row.local_rank) if row else None
    return Identity(
        rank=rank,
        world_size=max(world, rank + 1),
        local_rank=_first(local, rank if _loopback(env) else 0),
        local_world_size=_number(env, row.local_world) if row else None,
        launcher=_launcher_name(row, env),
        node=resolve("node") or socket.gethostname(),
        boot=boot_id(),
        pid=os.getpid(),
    )


def _first(*numbers: int | None) -> int:
    return next(number for number in numbers if number is not None)


def _loopback(env: Mapping[str, str]) -> bool:
    """Tell whether the ranks meet at an address that only this node can reach; so it is where none is given."""
    return env.get("MASTER_ADDR", "localhost") in LOOPBACK


def _launcher_name(row: Launcher | None, env: Mapping[str, str]) -> str:
    name = row.name if row else "python"
    if name == "torchrun":
        return "accelerate" if "ACCELERATE_MIXED_PRECISION" in env else name
    return "ray" if "RAY_JOB_ID" in env else name


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """Return a name for this boot of this kernel: locks mean something only to readers that share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}-{platform.machine()}"


def _stat(pid: int) -> list[str]:
    """Return what the kernel says of a process after its name: state, parent, …; see proc(5)."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def started_at(pid: int) -> str:
    """Return when a process started, in the kernel's ticks, so that a reused pid is another process."""
    try:
        return _stat(pid)[19]
    except (OSError, IndexError):
        pass
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return "0"


def job_key(me: Identity, env: Mapping[str, str] | None = None) -> str | None:
    """Return the launcher's own id of this job: the same on every node, other for every job; None if it has none."""
    env = os.environ if env is None else env
    row = _launcher(env)
    if row is None or (row.name == "mpirun" and me.one_node):
        return None  # on one node, mpirun's own process is the better key
    if row.name == "srun" and me.world_size == 1 and env.get("SLURM_TASK_PID") != str(me.pid):
        return None  # one of several programs that a script runs in this step, each with a run of its own
    words = [env.get(name, "") for name in row.job]
    if not words or not all(words) or words == ["none"]:
        return None
    return ":".join((row.name, *words))


def launch_key(me: Identity, env: Mapping[str, str] | None = None) -> str:
    """Return what all processes of one launch share, and a restart, which continues the same run, does not."""
    env = os.environ if env is None else env
    row, key = _launcher(env), job_key(me, env)
    restart = env.get(row.restart, "0") if row else "0"
    if key and row and row.name != "torchrun":
        return f"{key}:{restart}"
    if _has_launcher(me, row):
        return f"{node_key(me, env)}:{restart}"
    # Over several nodes a restart shows nowhere: each agent counts its own failures only, and the port stays. There,
    # attempts are told apart by the starts of rank 0.
    return f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"


def _has_launcher(me: Identity, row: Launcher | None) -> bool:
    """Tell whether one process on this node is known to have started all ranks, or there is just one."""
    return me.world_size == 1 or (me.one_node and row is not None and row.name in ("torchrun", "mpirun"))


def node_key(me: Identity, env: Mapping[str, str] | None = None) -> str:
    """Return a key for all processes one launcher started on this node: node, boot, and that launcher's pid and start."""
    env = os.environ if env is None else env
    row = _launcher(env)
    pid = me.pid
    if row is not None and (me.world_size > 1 or row.name == "torchrun"):
        pid = _launcher_pid(row.marks(env))
    return f"{me.node}:{me.boot}:{pid}:{started_at(pid)}"


def _launcher_pid(marks: Mapping[str, str | None]) -> int:
    """Return the process that started the ranks: our parent, or the one behind the shell script that wraps each rank."""
    pid = os.getppid()
    with contextlib.suppress(OSError, IndexError, ValueError):
        while _wraps(Path(f"/proc/{pid}"), marks):
            pid = int(_stat(pid)[1])
    return pid


def _wraps(proc: Path, marks: Mapping[str, str | None]) -> bool:
    """Tell whether a process is a rank's wrapper: it has the same place. A Python program is not: it is the rank itself."""
    words = (proc / "environ").read_bytes().decode("utf-8", "replace").split("\0")
    env = {name: value for name, _, value in (word.partition("=") for word in words)}
    same = all(env.get(name) == value for name, value in marks.items())
    return same and not (proc / "exe").readlink().name.startswith(("python", "pypy"))


def shared_key(me: Identity, count: int, join: Callable[[], str]) -> str:
    """Return the key every process of this job agrees on, without a collective.

    In this order: the launcher's own id; on one node the launcher process itself; the process group's key-value
    store; a meeting in the runs' directory (`join`).
    """
    key = job_key(me)
    if key:
        return key
    if _has_launcher(me, _launcher(os.environ)):
        return node_key(me)
    group = _group()
    if group is None:
        return join()
    store = group.distributed_c10d._get_default_store()  # noqa: SLF001 - torch gives no public way to it
    return _ask_store(store, f"fanfold/run/{count}", me)


def _ask_store(store: Any, name: str, me: Identity) -> str:
    """Agree through the process group's store: the first to come decides, or rank 0 where a restart must find the same run."""
    if not _restarts(os.environ):
        return bytes(store.compare_set(name, "", first_word(me))).decode()
    if me.main:
        store.set(name, first_word(me))
    deadline = time.monotonic() + JOIN_SECONDS
    while not store.check([name]):  # not store.wait(): that would keep other threads from the store
        if time.monotonic() > deadline:
            raise _nobody_answered(me, "the process group's store", JOIN_SECONDS)
        time.sleep(0.02)
    return bytes(store.get(name)).decode()


def _restarts(env: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in env and bool(_number(env, "TORCHELASTIC_MAX_RESTARTS"))


def first_word(me: Identity) -> str:
    """Return a new key; where an agent restarts its ranks, one that it keeps, because the restart is the same run."""
    return node_key(me) if _restarts(os.environ) else secrets.token_hex(8)


def _nobody_answered(me: Identity, where: str, seconds: float) -> RunError:
    return RunError(
        f"rank {me.rank} of {me.world_size} found no run to join: rank 0 did not answer in {where} within "
        f"{seconds:g} s. The run was not started here. Call fanfold.init() on rank 0 too, and at about the same time, or "
        "give every process the same FANFOLD_RUN_ID (any unique word), for example FANFOLD_RUN_ID=$SLURM_JOB_ID."
    )


class Meeting:
    """Agree on a key through a directory: each rank asks with a fresh word, rank 0 answers it.

    The word is new for every process, so an answer left behind by an earlier job is never taken for ours.
    """

    def __init__(self, directory: Path, me: Identity, count: int, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        # Jobs at one time differ in the address where their ranks meet; one that only this node can reach says too
        # little without the node, and none at all too little without the parent. A parent may be rank 0 itself.
        here = f"{socket.gethostname()}:{me.boot}" if _loopback(env) else ""
        families = [""] if env.get("MASTER_PORT") else [str(_parent())] + ([str(me.pid)] if me.main else [])
        address = (env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""), here, str(me.world_size), str(count))
        self.directories = [directory / ".join" / digest(*address, family) for family in families]
        self.me = me
        self._answered: set[Path] = set()
        self._standing = [folder / f"{digest(me.boot)}.standing" for folder in self.directories] if here else []

    def ask(self, timeout: float = JOIN_SECONDS) -> str:
        """Leave a question and wait for rank 0's answer."""
        question = self.directories[0] / f"{self.me.rank}-{secrets.token_hex(8)}.ask"
        answer = question.with_suffix(".answer")
        begun = time.monotonic()
        deadline = begun + timeout
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(FileNotFoundError):  # not answered, or somebody just left with the directory
                    if not question.exists():
                        question.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                        question.touch()
                    if answer in answer.parent.iterdir():  # a listing is fresh where a look-up may be cached (NFS)
                        return answer.read_text(encoding="utf-8")
                    if time.monotonic() - begun > LIVE_SECONDS and (key := self._left_behind()):
                        return key
                time.sleep(0.02)
        finally:
            question.unlink(missing_ok=True)
            answer.unlink(missing_ok=True)
            _remove_if_empty(answer.parent)
        raise _nobody_answered(self.me, str(answer.parent), timeout)

    def stand(self, key: str) -> None:
        """Leave an answer for ranks of this node that ask when this process has ended already."""
        for place in self._standing:
            place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            aside = place.with_suffix(f".{self.me.pid}")
            aside.write_text(f"{_now()} {key}", encoding="utf-8")
            aside.replace(place)

    def _left_behind(self) -> str | None:
        """Return the answer that rank 0 left, if it was left since this process started: an older one is another job's."""
        if not self._standing:
            return None
        try:
            when, _, key = self._standing[0].read_text(encoding="utf-8").partition(" ")
        except FileNotFoundError:
            return None
        return key if float(when) >= _born(self.me.pid) else None

    def answer(self, key: str) -> int:
        """Answer the questions that are there; return how many answers were taken so far. Called again and again."""
        for question in [path for directory in self.directories for path in directory.glob("*.ask")]:
            answer = question.with_suffix(".answer")
            if answer not in self._answered:
                aside = question.with_suffix(".tmp")
                aside.write_text(key, encoding="utf-8")
                aside.replace(answer)  # whole or not at all: the asker may be reading
                self._answered.add(answer)
        return sum(not answer.exists() for answer in self._answered)

    def leave(self) -> None:
        """Clear away what nobody took: questions of processes that died while they waited."""
        for answer in self._answered:
            answer.unlink(missing_ok=True)
            answer.with_suffix(".ask").unlink(missing_ok=True)
        for place in self._standing:
            place.unlink(missing_ok=True)
        for directory in self.directories:
            _remove_if_empty(directory)


def sweep(root: Path, seconds: float) -> None:
    """Remove the answers of jobs whose rank 0 ended long ago without having been asked by all."""
    for place in (root / ".join").glob("*/*.standing"):
        with contextlib.suppress(OSError):  # another process is sweeping, too
            if time.time() - place.stat().st_mtime > seconds:
                place.unlink()
                _remove_if_empty(place.parent)


def _now() -> float:
    """Return the time on the clock that `_born` uses."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


def _born(pid: int) -> float:
    """Return when a process started: on Linux in seconds since the kernel's start, since psutil rounds to whole ones there."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        with contextlib.suppress(OSError, IndexError):
            return int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    import psutil

    return float(psutil.Process(pid).create_time())


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # somebody is asking, or has removed it
        directory.rmdir()


def _parent() -> int:
    """Return the process that made this one; a fork server made it on behalf of another."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing else None
    return parent.pid if parent is not None and parent.pid is not None else os.getppid()


def digest(*words: str) -> str:
    """Return twelve letters and digits that stand for these words."""
    raw = hashlib.blake2b("\x00".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    number, text = int.from_bytes(raw, "big"), ""
    for _ in range(12):
        number, rest = divmod(number, 32)
        text += "abcdefghijkmnpqrstuvwxyz23456789"[rest]
    return text


def is_main_process() -> bool:
    """Tell whether this is rank 0 of its job."""
    return detect().main


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Run the decorated function on rank 0 only; elsewhere it returns None. Decided at each call."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if is_main_process() else None

    return call
