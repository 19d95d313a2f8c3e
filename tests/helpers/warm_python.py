"""Python programs that find their slow libraries imported: `python -c "import torch …"` in 0.1 seconds of CPU instead of 1 to 4.

A server imports some libraries once for all test processes, and forks itself for each program. The program is a process like any
other (its own pid, streams, environment, folder, arguments, `__main__`, exit code and signals) and imports fanfold itself. What
differs: the libraries are in `sys.modules` before its first line, their threads (OpenMP) are limited to one, its parent is the
server, and /proc shows the server's command and environment. So whatever tests an import, the start of a process, or settings
that a library reads at import, starts a plain Python.

Under torchrun, the ranks are forked, too: by a server of their job, as their launcher identifies a job.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from typing import Any

LIBRARIES = {  # only what starts no thread when it is imported, which the server checks, and makes no folder (as wandb does)
    "torch": ["torch", "numpy", "torch.distributed.run"],
    "accelerate": ["torch", "torch.distributed.run", "accelerate", "accelerate.commands.accelerate_cli"],
    "transformers": ["torch", "torch.distributed.run", "transformers.trainer", "accelerate"],
    "lightning": ["torch", "torch.distributed.run", "lightning.pytorch"],
    "trackers": ["torch", "matplotlib.figure", "plotly.graph_objects", "sqlalchemy", "alembic", "aim", "azureml.core"],
}
# Without them numpy's and torch's libraries start threads. Transformers would import Comet, which none of the programs need.
SETTINGS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "COMET_MODE": "DISABLED", "CUDA_VISIBLE_DEVICES": ""}
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.accelerate_cli")
_servers: dict[str, socket.socket] = {}  # a connection that this process holds, so that the server stays
_places: dict[str, Path] = {}


class Popen(subprocess.Popen):
    """`subprocess.Popen` for `[sys.executable, …]`, as a fork of the server that has these libraries imported."""

    def __init__(self, args: Any, *, libraries: str, **options: Any) -> None:
        assert args[0] == sys.executable, args
        self._libraries = libraries
        super().__init__(args, **options)

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
                       startupinfo: Any, creationflags: Any, shell: Any, *pipes: Any) -> None:  # fmt: skip
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest = pipes
        assert not (executable or preexec_fn or pass_fds or shell), "not known here: start a plain Python"
        job = {
            "words": [os.fspath(word) for word in args[1:]],
            "cwd": os.fspath(cwd or Path.cwd()),
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in (os.environ if env is None else env).items()},
            "session": bool(rest[5]),
        }
        given = (p2cread, c2pwrite, errwrite)
        self._line = _connect(self._libraries)
        payload = json.dumps(job).encode()
        socket.send_fds(self._line, [struct.pack("=I", len(payload))], [n if fd == -1 else fd for n, fd in enumerate(given)])
        self._line.sendall(payload)
        (self.pid,) = struct.unpack("=i", self._line.recv(4, socket.MSG_WAITALL))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._line.setblocking(not wait_flags & os.WNOHANG)
        try:
            status = self._line.recv(4)
        except BlockingIOError:
            return 0, 0
        self._line.close()
        return self.pid, struct.unpack("=i", status)[0] if status else signal.SIGKILL  # the server is gone, and so is its child

    def _internal_poll(self, _deadstate: int | None = None, **_: Any) -> int | None:
        if self.returncode is None:
            if not self._waitpid_lock.acquire(False):
                return None
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(os.WNOHANG)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    command: list[Any], *, libraries: str | None, timeout: float | None = None, check: bool = False, capture_output: bool = False,
    input: Any = None, **options: Any,
) -> subprocess.CompletedProcess[Any]:  # fmt: skip
    """Do what `subprocess.run` does, with libraries imported; None starts a plain Python."""
    if libraries is None:
        return subprocess.run(command, timeout=timeout, check=check, capture_output=capture_output, input=input, **options)
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, libraries=libraries, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _connect(libraries: str) -> socket.socket:
    """Return a new connection to the server of these libraries, which the first test process that needs it starts."""
    if libraries not in _servers:
        folder = Path(tempfile.gettempdir(), f"fanfold-warm-{os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}")
        folder.mkdir(mode=0o700, exist_ok=True)
        place = _places[libraries] = folder / libraries
        with place.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                keep = _open(place)
            except OSError:
                keep = _start(place, libraries)
        socket.send_fds(keep, [struct.pack("=I", 0)], [0])
        _servers[libraries] = keep
        atexit.register(keep.close)
    return _open(_places[libraries])


def _open(path: Path) -> socket.socket:
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(str(path))
    except OSError:
        line.close()
        raise
    return line


def _start(place: Path, libraries: str) -> socket.socket:
    log = place.with_suffix(".log")
    env = {**{name: value for name, value in os.environ.items() if not name.startswith(("FANFOLD_", "PYTEST_"))}, **SETTINGS}
    with log.open("w") as out:
        command = [sys.executable, __file__, str(place), *LIBRARIES[libraries]]
        server = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, cwd=place.parent, start_new_session=True
        )
    while server.poll() is None:
        with contextlib.suppress(OSError):
            return _open(place)
        time.sleep(0.05)
    raise RuntimeError(f"the server of {libraries} ended: {log.read_text()[-3000:]}")


# The server


class Server:
    """Forks a process for each program until no test process is connected any more."""

    def __init__(self, listener: socket.socket, *keepers: socket.socket) -> None:
        self.listener = listener
        self.ended, self.wake = socket.socketpair()
        self.wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        self.waiting = selectors.DefaultSelector()
        self.keepers = set(keepers)
        self.programs: dict[int, socket.socket] = {}
        for one in (listener, self.ended, *keepers):
            self.waiting.register(one, selectors.EVENT_READ)

    def job(self) -> tuple[dict[str, Any], list[int]]:
        """Serve; return in each child, with its job."""
        while True:
            for key, _ in self.waiting.select():
                if key.fileobj is self.listener:
                    found = self.accept()
                    if found is not None:
                        return found
                elif key.fileobj is self.ended:
                    self.reap()
                else:
                    self.waiting.unregister(key.fileobj)
                    self.keepers.remove(key.fileobj)
                    if not self.keepers:
                        self.leave()

    def accept(self) -> tuple[dict[str, Any], list[int]] | None:
        line, _ = self.listener.accept()
        head, fds, _, _ = socket.recv_fds(line, 4, 3)
        size = struct.unpack("=I", head)[0] if head else 0
        if size:
            job = json.loads(line.recv(size, socket.MSG_WAITALL))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for one in (self.listener, self.ended, self.wake, self.waiting, line, *self.keepers, *self.programs.values()):
                    one.close()
                return job, fds
            line.sendall(struct.pack("=i", pid))
            self.programs[pid] = line
        elif head:  # a test process
            self.keepers.add(line)
            self.waiting.register(line, selectors.EVENT_READ)
        for fd in fds:
            os.close(fd)
        return None

    def leave(self) -> None:
        """Remove our files, and the folder if this was the last server."""
        path = Path(self.listener.getsockname())
        with contextlib.suppress(OSError):
            for one in (path, path.with_suffix(".log"), path.with_suffix(".lock")):
                one.unlink(missing_ok=True)
            path.parent.rmdir()
        os._exit(0)

    def reap(self) -> None:
        self.ended.recv(4096)
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                with self.programs.pop(found[0]) as line, contextlib.suppress(OSError):  # its test process may be gone
                    line.sendall(struct.pack("=i", found[1]))


def listening(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(100)
    return listener


def fork_ranks() -> tuple[dict[str, Any], list[int]] | None:
    """Make a launcher fork its ranks, by a server that lives as long as the launcher; return the job in each rank."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    place = Path(sys.argv[1]).with_name(f"ranks-{os.getpid()}")
    listener, (ours, theirs) = listening(place), socket.socketpair()
    if os.fork() == 0:
        ours.close()
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nothing, fd)
        os.close(nothing)
        return Server(listener, theirs).job()
    listener.close()
    theirs.close()
    _servers[place.name] = ours
    _places[place.name] = place
    subprocess_handler.Popen = functools.partial(Popen, libraries=place.name)
    return None


def become(job: dict[str, Any], fds: list[int], base: list[str], filters: int) -> Any:
    """Make this process what `python …` would be before its first line, and return what it then executes."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if job["session"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    _open_streams()
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.orig_argv[:] = [sys.executable, *job["words"]]
    words = _warn_as(list(job["words"]), filters)
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *base]
    sys.path_importer_cache.clear()
    with contextlib.suppress(ImportError):
        import sitecustomize  # noqa: F401 - as every Python does
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if words[0] == "-m":
        if words[1] in LAUNCHERS:
            rank = fork_ranks()
            if rank is not None:
                return become(*rank, base, filters)
        import runpy

        sys.modules.pop(words[1], None)
        sys.path.insert(0, job["cwd"])
        sys.argv[:] = ["-m", *words[2:]]
        return lambda: runpy._run_module_as_main(words[1])
    if words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv[:] = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
        sys.argv[:] = words
        main.__file__ = words[0]
        code = compile(Path(words[0]).read_bytes(), words[0], "exec")
    return lambda: exec(code, main.__dict__)


def _open_streams() -> None:
    """Open the three streams again: those we have know what the files of the server were."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
        if number:
            stream.reconfigure(line_buffering=stream.isatty() or number == 2, write_through="PYTHONUNBUFFERED" in os.environ)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stderr.reconfigure(errors="backslashreplace")


def _warn_as(words: list[str], filters: int) -> list[str]:
    """Set the filters of warnings that the options ask for, below those that imports have added; return the other words."""
    wishes = os.environ.get("PYTHONWARNINGS", "").split(",")
    while words[0] in ("-W", "-u"):
        if words.pop(0) == "-W":
            wishes.append(words.pop(0))
    sys.warnoptions[:] = filter(None, wishes)
    ours, theirs = warnings.filters[-filters:], warnings.filters[:-filters]
    warnings.filters[:] = ours
    warnings._processoptions(sys.warnoptions)
    warnings.filters[:0] = theirs
    return words


if __name__ == "__main__":
    import gc
    import importlib

    plain = len(warnings.filters)
    around = {str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    assert len(threads) == 1, f"an import has started threads, which would be missing in a fork: {threads}"
    gc.collect()
    gc.freeze()
    start = become(*Server(listening(Path(sys.argv[1]))).job(), [place for place in sys.path if place not in around], plain)
    start()
