"""The black box of one process of a run: its options, and what is started and stopped with the run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingError, guard
from ..journal.directory import check_folders
from ..journal.format import pack
from ..process import module_command, same_modules, started_at
from ..settings import options_of
from . import flight
from .memory import MemoryRecorder
from .pulse import FOLDER
from .stacks import StackFile
from .watch import Watch

Write = Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True)
class BlackBoxOptions:
    """The options of init(blackbox=…): seconds without a sign of life that count as a hang; how GPU memory is recorded."""

    hang: float = 60.0
    memory: bool | str = True


def check(given: Any) -> BlackBoxOptions | None:
    """Return the options of init(blackbox=…); None for no black box."""
    options = options_of(BlackBoxOptions, "blackbox", given)
    if options is None:
        return None
    if type(options.hang) not in (int, float) or not 1.0 <= options.hang <= 86_400.0:
        raise SettingError(
            f"init(blackbox={dict(given)!r}): hang must be a number of seconds from 1 to 86,400. The run was not started. "
            "See docs/blackbox.md."
        )
    if options.memory not in (True, False, "always"):
        raise SettingError(f"init(blackbox={dict(given)!r}): memory must be True, False or 'always'. The run was not started.")
    return options


class BlackBox:
    """The black box of this process. The first process of each node also starts the node's watcher, a process of its own.

    `processes`: how many the launcher started on this node; perhaps not all of them take part in the run.
    """

    def __init__(
        self,
        options: BlackBoxOptions,
        run: Path,
        header: Mapping[str, Any],
        step: Callable[[], int],
        write: Write,
        *,
        first: bool,
        processes: int = 1,
    ) -> None:
        check_folders(run)
        folder = run / FOLDER
        folder.mkdir(exist_ok=True, mode=0o700)
        flight.turn_on(folder)
        rank, process = int(header["rank"]), str(header["process"])
        self._stacks = StackFile(folder / f"stacks-{rank}-{process}.txt")
        facts = {name: header[name] for name in ("rank", "world", "node", "boot", "attempt", "pid", "process")}
        facts |= {"born": _born(), "signal": self._stacks.signal, "stacks": self._stacks.path.name}
        self._memory = MemoryRecorder(run, rank, write, always=options.memory == "always") if options.memory else None
        chores = [self._memory.look] if self._memory is not None else []
        self._watch = Watch(folder, facts, step, write, interval=min(1.0, options.hang / 4), chores=chores)
        self._options, self._run, self._header, self._first = options, run, dict(header), first
        self._processes = processes
        self._watcher: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._watch.start()
        if self._first and sys.platform.startswith("linux"):  # elsewhere it could not see what the processes do
            with guard("start the watcher of the black box"):
                self._start_watcher()

    def _start_watcher(self) -> None:
        setup = {"run": str(self._run), "header": self._header, "hang": self._options.hang, "processes": self._processes}
        self._watcher = subprocess.Popen(
            module_command("fanfold.blackbox.watcher"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the training process; the watcher ends after the last rank of the node
            env={**os.environ, **same_modules(), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        assert self._watcher.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._watcher.stdin.write(pack(setup))
            self._watcher.stdin.close()

    def stop(self, timeout: float) -> None:
        """Stop in this process; the watcher ends when every rank of the node has."""
        self._watch.stop(timeout)
        if self._memory is not None:
            self._memory.stop()
        with guard("close the stack file"):
            self._stacks.close()
        if self._watcher is not None and self._watcher.poll() is None:
            self._watcher.returncode = 0  # it is not ours to wait for


def _born() -> str:
    with contextlib.suppress(OSError):
        return started_at(os.getpid())
    return ""
