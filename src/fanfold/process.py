"""Which process am I, and which run do I belong to: rank, world, node, launcher, and a key all ranks agree on.

Everything is read from the environment and the operating system; no collective is ever called, and torch is asked only
when the user has imported it already.
"""

from __future__ import annotations

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
    needs: tuple[str, ...] = ()


# In this order: torchrun's variables are also set inside Slurm and Ray jobs, and then they are the ones that hold.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",),
             "TORCHELASTIC_RESTART_COUNT"),
    Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE",
             ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_RESTART_COUNT", needs=("SLURM_STEP_ID",)),
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    Launcher("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
             "MV2_COMM_WORLD_LOCAL_SIZE"),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("fanfold", "FANFOLD_RANK", "FANFOLD_WORLD_SIZE", "FANFOLD_LOCAL_RANK", "FANFOLD_LOCAL_WORLD_SIZE"),
)  # fmt: skip


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
    for row in LAUNCHERS:
        known = _number(env, row.rank) is not None and _number(env, row.world) is not None
        if known and all(name in env for name in row.needs):
            return row
    return None


def _group() -> Any:
    """Return torch.distributed if the user has a process group open, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def detect(env: Mapping[str, str] | None = None) -> Identity:
    """Find out who this process is. Settings win, then an open process group, then what the launcher says."""
    env = os.environ if env is None else env
    row = _launcher(env)
    rank = _number(env, row.rank) if row else None
    world = _number(env, row.world) if row else None
    local = _number(env, row.local_rank) if row else None
    local_world = _number(env, row.local_world) if row else None
    group = _group()
    if group is not None:
        rank, world = group.get_rank(), group.get_world_size()
    rank = resolve("rank") if resolve("rank") is not None else rank
    world = resolve("world_size") if resolve("world_size") is not None else world
    rank, world = rank or 0, world or 1
    return Identity(
        rank=rank,
        world_size=max(world, rank + 1),
        local_rank=local if local is not None else (rank if row is None else 0),
        local_world_size=local_world,
        launcher=_launcher_name(row, env),
        node=resolve("node") or socket.gethostname(),
        boot=boot_id(),
        pid=os.getpid(),
    )


def _launcher_name(row: Launcher | None, env: Mapping[str, str]) -> str:
    if "RAY_JOB_ID" in env:
        return "ray"
    if row is not None and row.name == "torchrun":
        if any(name.startswith("ACCELERATE_") for name in env):
            return "accelerate"
        return "torchrun" if "TORCHELASTIC_RUN_ID" in env else "distributed"
    return row.name if row else "python"


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """Return a name for this boot of this kernel: locks mean something only to readers that share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()}-{platform.machine()}"


def started_at(pid: int) -> str:
    """Return when a process started, in the kernel's ticks, so that a reused pid is another process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rpartition(")")[2].split()[19]
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
    if "RAY_JOB_ID" in env and env.get("MASTER_PORT"):
        # Workers of every Ray job on a node have one parent, the raylet: only job and port tell the jobs apart.
        return f"ray:{env['RAY_JOB_ID']}:{env.get('MASTER_ADDR')}:{env['MASTER_PORT']}"
    row = _launcher(env)
    if row is None or (row.name == "mpirun" and me.one_node) or (me.world_size == 1 and row.name != "srun"):
        return None  # an MPI namespace repeats once pids do; on one node the launcher process itself is the better key
    words = [env.get(name, "") for name in row.job]
    if not words or not all(words) or words == ["none"]:
        return None
    return ":".join((row.name, *words))


def restart_key(env: Mapping[str, str] | None = None) -> str:
    """Return which restart of its job this process belongs to."""
    env = os.environ if env is None else env
    row = _launcher(env)
    return env.get(row.restart, "0") if row and row.restart else "0"


def node_key(me: Identity) -> str:
    """Return a key for all processes one launcher started on this node: node, boot, and that launcher's pid and start."""
    pid = os.getppid() if me.world_size > 1 else me.pid
    return f"{me.node}:{me.boot}:{pid}:{started_at(pid)}"


def shared_key(me: Identity, count: int, join: Callable[[], str]) -> str:
    """Return the key every process of this job agrees on, without a collective.

    In this order: the launcher's own id; on one node the launcher process itself; the process group's key-value
    store; a meeting in the runs' directory (`join`).
    """
    key = job_key(me)
    if key:
        return key
    if me.one_node:
        return node_key(me)
    group = _group()
    if group is not None:
        store = group.distributed_c10d._get_default_store()  # noqa: SLF001 - torch gives no public way to it
        mine = secrets.token_hex(8)
        return bytes(store.compare_set(f"fanfold/run/{count}", "", mine)).decode()
    return node_key(me) if _one_parent(me) else join()


def _one_parent(me: Identity) -> bool:
    """Tell whether the other ranks surely are siblings: spawned by multiprocessing, and meeting at a loopback address."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing else None
    loopback = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
    return me.local_world_size is None and parent is not None and parent.pid == os.getppid() and loopback


class Meeting:
    """Agree on a key through a directory: each rank asks with a fresh word, rank 0 answers it.

    The word is new for every process, so an answer left behind by an earlier job is never taken for ours.
    """

    def __init__(self, directory: Path, me: Identity, count: int, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        scope = ":".join((env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""), str(me.world_size), str(count)))
        self.directory = directory / ".join" / digest(scope)
        self.me = me

    def ask(self, timeout: float = JOIN_SECONDS) -> str:
        """Leave a question and wait for rank 0's answer."""
        word = f"{self.me.rank}-{secrets.token_hex(8)}"
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        question, answer = self.directory / f"{word}.ask", self.directory / f"{word}.answer"
        question.touch()
        deadline = time.monotonic() + timeout
        try:
            while time.monotonic() < deadline:
                try:
                    return answer.read_text(encoding="ascii")
                except FileNotFoundError:
                    time.sleep(0.02)
        finally:
            question.unlink(missing_ok=True)
            answer.unlink(missing_ok=True)
        raise RunError(
            f"rank {self.me.rank} of {self.me.world_size} found no run to join: rank 0 did not answer in {self.directory} within "
            f"{timeout:g} s. The run was not started here. Give every process the same FANFOLD_RUN_ID (any unique word), "
            "for example FANFOLD_RUN_ID=$SLURM_JOB_ID, or call fanfold.init() after the process group exists."
        )

    def answer(self, key: str) -> int:
        """Answer the questions that are there; return how many. Rank 0 calls it again and again."""
        count = 0
        if not self.directory.is_dir():
            return 0
        for question in self.directory.glob("*.ask"):
            answer = question.with_suffix(".answer")
            if not answer.exists():
                aside = question.with_suffix(".tmp")
                aside.write_text(key, encoding="ascii")
                aside.replace(answer)  # whole or not at all: the asker may be reading
                count += 1
        return count


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
