"""The identity of this process: rank, world, node, launcher, and a key that all ranks of a job agree on.

Everything is read from the environment and the operating system. No collective is ever called, and torch is queried only
if the user has already imported it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

from .atomic import replace_text
from .errors import RunError
from .settings import resolve

try:
    from _blake2 import blake2b  # hashlib's own, without OpenSSL, which takes longer to load than the rest of the first init()
except ImportError:
    from hashlib import blake2b

P = ParamSpec("P")
R = TypeVar("R")
JOIN_SECONDS = 30.0
LIVE_SECONDS = 2.0  # a live rank 0 answers within this time


class Launcher(NamedTuple):
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
        """Return rank and world size according to this launcher."""
        return _number(env, self.rank), _number(env, self.world)

    def marks(self, env: Mapping[str, str]) -> dict[str, str | None]:
        """Return the variables that identify a rank and any process that wraps it."""
        return {name: env.get(name) for name in (self.rank, self.world, self.local_rank, self.local_world)}


# In order of precedence. MPI's own launchers come before srun, which starts their daemons and leaves its variables behind.
# RANK and WORLD_SIZE alone may come from anywhere: see _launcher.
LAUNCHERS = (
    Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",),
             "TORCHELASTIC_RESTART_COUNT", needs="TORCHELASTIC_RUN_ID"),
    # The namespace repeats when pids do, in a container every time; the second variable is random for every mpirun.
    Launcher("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
             "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports")),
    Launcher("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
             "MV2_COMM_WORLD_LOCAL_SIZE"),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", needs="MPI_LOCALRANKID"),
    # A batch script also has a rank and a number of tasks, but no step: it is one process.
    Launcher("srun", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE",
             ("SLURM_JOB_ID", "SLURM_STEP_ID"), "SLURM_RESTART_COUNT", needs="SLURM_STEP_ID"),
    Launcher("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    Launcher("distributed", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    Launcher("fanfold", "FANFOLD_RANK", "FANFOLD_WORLD_SIZE", "FANFOLD_LOCAL_RANK", "FANFOLD_LOCAL_WORLD_SIZE"),
)  # fmt: skip
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class ProcessIdentity(NamedTuple):
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
    """Return the launcher that determines rank and world size, or None."""
    rows = [row for row in LAUNCHERS if None not in row.place(env) and (not row.needs or row.needs in env)]
    if "RAY_JOB_ID" in env:  # a Ray worker inherits the environment of `ray start`: srun's variables do not describe it
        rows = [row for row in rows if row.name in ("torchrun", "distributed", "fanfold")]
    by_hand = next((row for row in rows if row.name == "distributed"), None)
    if by_hand is None or rows[0].name == "torchrun":
        return rows[0] if rows else None
    # RANK set by hand takes precedence, unless it only repeats srun or mpirun, which also know their job.
    return next(row for row in rows if row.place(env) == by_hand.place(env))


def _group() -> Any:
    """Return torch.distributed if the user has opened a process group, else None."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def detect(env: Mapping[str, str] | None = None) -> ProcessIdentity:
    """Return the identity of this process. Settings take precedence, then an open process group, then the launcher."""
    env = os.environ if env is None else env
    row, group = _launcher(env), _group()
    rank, world = row.place(env) if row else (None, None)
    if group is not None:
        rank, world = group.get_rank(), group.get_world_size()
    rank, world = _first(resolve("rank"), rank, 0), _first(resolve("world_size"), world, 1)
    local = _number(env, row.local_rank) if row else None
    return ProcessIdentity(
        rank=rank,
        world_size=max(world, rank + 1),
        local_rank=_first(local, rank if _loopback(env) else 0),
        local_world_size=_number(env, row.local_world) if row else None,
        launcher=_launcher_name(row, env),
        node=resolve("node") or platform.node(),
        boot=boot_id(),
        pid=os.getpid(),
    )


def _first(*numbers: int | None) -> int:
    return next(number for number in numbers if number is not None)


def _loopback(env: Mapping[str, str]) -> bool:
    """Return whether the ranks meet at an address that only this node can reach, which is the default."""
    return env.get("MASTER_ADDR", "localhost") in LOOPBACK


def _launcher_name(row: Launcher | None, env: Mapping[str, str]) -> str:
    name = row.name if row else "python"
    if name == "torchrun":
        return "accelerate" if "ACCELERATE_MIXED_PRECISION" in env else name
    return "ray" if "RAY_JOB_ID" in env else name


@functools.lru_cache(maxsize=1)
def boot_id() -> str:
    """Return an id of this boot of this kernel: locks are only meaningful to readers that share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return f"{platform.node()}-{platform.machine()}"


def stat_of(pid: int) -> list[str]:
    """Return the fields of a process after its name: state, parent, …; see proc(5). Empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def started_at(pid: int) -> str:
    """Return when a process started, in kernel ticks, to tell it from a later process with the same pid."""
    with contextlib.suppress(IndexError):
        return stat_of(pid)[19]
    import psutil

    try:
        return str(psutil.Process(pid).create_time())
    except psutil.Error:
        return "0"


def job_key(me: ProcessIdentity, env: Mapping[str, str] | None = None) -> str | None:
    """Return the launcher's own id of this job: the same on every node, different for every job; None if it has none."""
    env = os.environ if env is None else env
    row = _launcher(env)
    if row is None or (row.name == "mpirun" and me.one_node):
        return None  # on one node, mpirun's own process is a better key
    if row.name == "srun" and me.world_size == 1 and env.get("SLURM_TASK_PID") != str(me.pid):
        return None  # one of several programs that a script runs in this step, each with its own run
    words = [env.get(name, "") for name in row.job]
    if not words or not all(words) or words == ["none"]:
        return None
    return ":".join((row.name, *words))


def launch_key(me: ProcessIdentity, env: Mapping[str, str] | None = None) -> str:
    """Return a key shared by all processes of one launch, but not by a restart, which continues the same run."""
    env = os.environ if env is None else env
    row, key = _launcher(env), job_key(me, env)
    restart = env.get(row.restart, "0") if row else "0"
    if key and row and row.name != "torchrun":
        return f"{key}:{restart}"
    if _has_launcher(me, row):
        return f"{node_key(me, env)}:{restart}"
    # With several nodes a restart cannot be detected: each agent counts only its own failures, and the port stays the same.
    # Attempts are then distinguished by the starts of rank 0.
    return f"{env.get('MASTER_ADDR')}:{env.get('MASTER_PORT')}"


def _has_launcher(me: ProcessIdentity, row: Launcher | None) -> bool:
    """Return whether one process on this node is known to have started all ranks, or there is only one rank."""
    return me.world_size == 1 or (me.one_node and row is not None and row.name in ("torchrun", "mpirun"))


def node_key(me: ProcessIdentity, env: Mapping[str, str] | None = None) -> str:
    """Return a key for all processes one launcher started on this node: node, boot, and the launcher's pid and start time."""
    env = os.environ if env is None else env
    row = _launcher(env)
    pid = me.pid
    if row is not None and (me.world_size > 1 or row.name == "torchrun"):
        pid = _launcher_pid(row.marks(env))
    return f"{me.node}:{me.boot}:{pid}:{started_at(pid)}"


def _launcher_pid(marks: Mapping[str, str | None]) -> int:
    """Return the process that started the ranks: our parent, or the one above the shell script that wraps each rank."""
    pid = os.getppid()
    with contextlib.suppress(OSError, IndexError, ValueError):
        while _wraps(Path(f"/proc/{pid}"), marks):
            pid = int(stat_of(pid)[1])
    return pid


def _wraps(proc: Path, marks: Mapping[str, str | None]) -> bool:
    """Return whether a process wraps a rank: it has the same rank variables, and is not Python, which is the rank itself."""
    words = (proc / "environ").read_bytes().decode("utf-8", "replace").split("\0")
    env = {name: value for name, _, value in (word.partition("=") for word in words)}
    same = all(env.get(name) == value for name, value in marks.items())
    return same and not (proc / "exe").readlink().name.startswith(("python", "pypy"))


def shared_key(me: ProcessIdentity, count: int, join: Callable[[], str]) -> str:
    """Return the key every process of this job agrees on, without a collective.

    In this order: the launcher's own id; on one node the launcher process itself; the process group's key-value store; a
    meeting in the runs' directory (`join`).
    """
    key = job_key(me)
    if key:
        return key
    if _has_launcher(me, _launcher(os.environ)):
        return node_key(me)
    group = _group()
    if group is None:
        return join()
    store = group.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public accessor
    return _ask_store(store, f"fanfold/run/{count}", me)


def _ask_store(store: Any, name: str, me: ProcessIdentity) -> str:
    """Agree through the process group's store: the first rank decides, or rank 0 if a restart must find the same run."""
    if not _restarts(os.environ):
        return bytes(store.compare_set(name, "", first_word(me))).decode()
    if me.main:
        store.set(name, first_word(me))
    deadline = time.monotonic() + JOIN_SECONDS
    while not store.check([name]):  # not store.wait(), which would block other threads from the store
        if time.monotonic() > deadline:
            raise _nobody_answered(me, "the process group's store", JOIN_SECONDS)
        time.sleep(0.02)
    return bytes(store.get(name)).decode()


def _restarts(env: Mapping[str, str]) -> bool:
    return "TORCHELASTIC_RUN_ID" in env and bool(_number(env, "TORCHELASTIC_MAX_RESTARTS"))


def first_word(me: ProcessIdentity) -> str:
    """Return a new key, or a stable one if an agent restarts its ranks, because a restart continues the same run."""
    return node_key(me) if _restarts(os.environ) else os.urandom(8).hex()


def _nobody_answered(me: ProcessIdentity, where: str, seconds: float) -> RunError:
    return RunError(
        f"rank {me.rank} of {me.world_size} found no run to join: rank 0 did not answer in {where} within "
        f"{seconds:g} s. The run was not started here. Call fanfold.init() on rank 0 too, and at about the same time, or "
        "give every process the same FANFOLD_RUN_ID (any unique word), for example FANFOLD_RUN_ID=$SLURM_JOB_ID."
    )


class Meeting:
    """A rendezvous in a directory, where ranks agree on a key: each rank asks with a random word, and rank 0 answers.

    The word is new for every process, so an answer left behind by an earlier job is never used.
    """

    def __init__(self, directory: Path, me: ProcessIdentity, count: int, env: Mapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        # Concurrent jobs differ in the address where their ranks meet. A loopback address is not unique without the node, and
        # no address at all is not unique without the parent. A parent may be rank 0 itself.
        here = f"{platform.node()}:{me.boot}" if _loopback(env) else ""
        families = [""] if env.get("MASTER_PORT") else [str(_parent())] + ([str(me.pid)] if me.main else [])
        address = (env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", ""), here, str(me.world_size), str(count))
        self.directories = [directory / ".join" / digest(*address, family) for family in families]
        self.me = me
        self._answered: set[Path] = set()
        self._standing = [folder / f"{digest(me.boot)}.standing" for folder in self.directories] if here else []

    def ask(self, timeout: float = JOIN_SECONDS) -> str:
        """Write a question and wait for rank 0's answer."""
        question = self.directories[0] / f"{self.me.rank}-{os.urandom(8).hex()}.ask"
        answer = question.with_suffix(".answer")
        begun = time.monotonic()
        deadline = begun + timeout
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(FileNotFoundError):  # not answered yet, or another rank just removed the directory
                    if not question.exists():
                        self._make(question.parent)
                        question.touch()
                    if answer in answer.parent.iterdir():  # a listing is up to date where a look-up may be cached (NFS)
                        return _read(answer)
                    if time.monotonic() - begun > LIVE_SECONDS and (key := self._left_behind()):
                        return key
                time.sleep(0.02)
        finally:
            question.unlink(missing_ok=True)
            answer.unlink(missing_ok=True)
            _remove_if_empty(answer.parent)
        raise _nobody_answered(self.me, str(answer.parent), timeout)

    @staticmethod
    def _make(place: Path) -> None:
        """Create a meeting's folder. The one around it is as open as the runs' directory, where other users may meet, too."""
        home = place.parent
        with contextlib.suppress(FileExistsError):
            home.mkdir(mode=0o700)
            home.chmod(home.parent.stat().st_mode & 0o1777)
        place.mkdir(exist_ok=True, mode=0o700)

    def stand(self, key: str) -> None:
        """Leave an answer for ranks on this node that ask after this process has ended."""
        for place in self._standing:
            self._make(place.parent)
            replace_text(place, f"{_now()} {key}")

    def _left_behind(self) -> str | None:
        """Return the answer rank 0 left, if it is newer than this process; an older one belongs to another job."""
        if not self._standing:
            return None
        try:
            when, _, key = _read(self._standing[0]).partition(" ")
        except FileNotFoundError:
            return None
        return key if float(when) >= _born(self.me.pid) else None

    def answer(self, key: str) -> int:
        """Answer all current questions; return how many answers were read so far. Meant to be called repeatedly."""
        for question in [path for directory in self.directories for path in directory.glob("*.ask")]:
            answer = question.with_suffix(".answer")
            if answer not in self._answered:
                replace_text(answer, key)  # the asking rank may be reading
                self._answered.add(answer)
        return sum(not answer.exists() for answer in self._answered)

    def leave(self) -> None:
        """Remove what nobody read: questions of processes that died while waiting."""
        for answer in self._answered:
            answer.unlink(missing_ok=True)
            answer.with_suffix(".ask").unlink(missing_ok=True)
        for place in self._standing:
            place.unlink(missing_ok=True)
        for directory in self.directories:
            _remove_if_empty(directory)


def sweep(root: Path, seconds: float) -> None:
    """Remove answers of jobs whose rank 0 ended long ago before all ranks had asked."""
    for place in (root / ".join").glob("*/*.standing"):
        with contextlib.suppress(OSError):  # another process may be doing the same
            if time.time() - place.stat().st_mtime > seconds:
                place.unlink()
                _remove_if_empty(place.parent)


def _now() -> float:
    """Return the time on the clock that `_born` uses."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.time()


def _born(pid: int) -> float:
    """Return when a process started: on Linux in seconds since boot, because psutil rounds to whole seconds there."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        with contextlib.suppress(IndexError):
            return int(stat_of(pid)[19]) / os.sysconf("SC_CLK_TCK")
    import psutil

    return float(psutil.Process(pid).create_time())


def age() -> float:
    """Return how many seconds ago this process began."""
    now = _now()
    return max(0.0, now - _born(os.getpid()))


def _read(path: Path) -> str:
    """Read an answer; in a directory that several users share, one of them may have put a link or a pipe in its place."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), encoding="utf-8") as file:
        return file.read(1 << 12)


def _remove_if_empty(directory: Path) -> None:
    with contextlib.suppress(OSError):  # another rank is asking, or has removed it
        directory.rmdir()


def _parent() -> int:
    """Return the process that created this one; for a fork server, the process it acted for."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing else None
    return parent.pid if parent is not None and parent.pid is not None else os.getppid()


def digest(*words: str) -> str:
    """Return a digest of these words, twelve letters and digits long."""
    raw = blake2b("\x00".join(words).encode("utf-8", "surrogatepass"), digest_size=8).digest()
    number, text = int.from_bytes(raw, "big"), ""
    for _ in range(12):
        number, rest = divmod(number, 32)
        text += "abcdefghijkmnpqrstuvwxyz23456789"[rest]
    return text


_RUN_MODULE = "import sys; sys.path.remove(''); import runpy; runpy.run_module(sys.argv.pop(1), None, '__main__', True)"


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module in a new Python, which imports nothing from the working directory.

    `python -m` alone looks there first, and in a folder like /tmp anybody can leave a file with the name of a module.
    """
    if sys.version_info >= (3, 11):
        return [sys.executable, "-P", "-m", module, *arguments]
    return [sys.executable, "-c", _RUN_MODULE, module, *arguments]


def same_modules() -> dict[str, str]:
    """Return the variables with which a new Python finds the modules this one finds."""
    try:
        here = os.getcwd()  # noqa: PTH109 - a str is needed
    except FileNotFoundError:  # deleted: nothing can be imported from it
        here = ""
    paths = dict.fromkeys(path or here for path in sys.path)
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}


def is_main_process() -> bool:
    """Return whether this is rank 0 of its job.

    Returns:
        True on rank 0, and in a program that is not distributed.

    Example:
        ```python
        import fanfold

        if fanfold.is_main_process():
            print("only once")
        ```
    """
    return detect().main


def on_main_process(function: Callable[P, R]) -> Callable[P, R | None]:
    """Run the decorated function on rank 0 only; other ranks get None. The rank is checked on each call.

    Args:
        function: The function to decorate.

    Returns:
        A function with the same arguments.

    Example:
        ```python
        import fanfold


        @fanfold.on_main_process
        def save():
            print("saved once")


        save()
        ```
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return function(*args, **kwargs) if is_main_process() else None

    return call
