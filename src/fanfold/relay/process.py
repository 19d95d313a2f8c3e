"""A relay in a process of its own: tracker libraries patch, seed, hook and hang, and none of that reaches training.

It is started by rank 0, in a new session, with no GPU and no rank in its environment; what it needs comes over stdin, so
no secret is ever in an argument or on disk. It ends when the run has ended and all is delivered.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import SettingError
from ..mask import is_secret
from ..trackers.registry import find_class
from .cursor import Cursor, Owned, cursor_name
from .worker import Worker

_RANKS = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "FANFOLD_RANK FANFOLD_WORLD_SIZE FANFOLD_RUN_ID".split()
)
_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MV2_", "TORCHELASTIC_", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP")


def check_arguments(name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tracker's arguments if they can travel to another process, else raise at once."""
    find_class(name)
    try:
        return dict(json.loads(json.dumps(dict(kwargs))))
    except (TypeError, ValueError) as error:
        raise SettingError(
            f"tracker_kwargs[{name!r}] holds what cannot travel to the relay's process: {error}. The run was not started. "
            "Pass plain values, or relay='thread' to keep the tracker in this process."
        ) from error


def cursor_of(run: Path, name: str, kwargs: Mapping[str, Any]) -> Cursor:
    """Return a tracker's cursor for a run; arguments that are secret neither name nor enter it."""
    public = {key: value for key, value in kwargs.items() if not is_secret(key)}
    cursor = Cursor.load(run / "relay" / f"{cursor_name(name, public)}.cursor")
    cursor.tracker, cursor.kwargs = name, public
    return cursor


class Relay:
    """The training side of a relay process: start it, ask how far it is, wait for it."""

    def __init__(self, run: Path, name: str, kwargs: Mapping[str, Any], fold: Mapping[str, str]) -> None:
        self.run = run
        self.name = name
        self.kwargs = check_arguments(name, kwargs)
        self.fold = dict(fold)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        folder = self.run / "relay"
        folder.mkdir(exist_ok=True, mode=0o700)
        with (folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fanfold.relay"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=clean_environment(),
            )
        setup = {"run": str(self.run), "name": self.name, "kwargs": self.kwargs, "fold": self.fold}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(setup).encode())
        self._process.stdin.close()

    def wait(self, timeout: float) -> bool:
        """Wait for the relay to deliver everything and leave; tell whether it has."""
        if self._process is None:
            return True
        try:
            return self._process.wait(timeout) == 0 and self.left() is None
        except subprocess.TimeoutExpired:
            return False

    def left(self) -> str | None:
        """Say what is not delivered yet, or None."""
        cursor = cursor_of(self.run, self.name, self.kwargs)
        if cursor.closed and not cursor.error:
            return None
        why = f" ({cursor.error})" if cursor.error else ""
        rest = f"fanfold sync {self.run.name} --to {self.name}"
        return f"{self.name} has {cursor.delivered} values settled so far{why}; the rest: {rest}"


def clean_environment() -> dict[str, str]:
    """Return our environment without ranks and GPUs: the relay is no member of the job."""
    kept = {name: value for name, value in os.environ.items() if name not in _RANKS and not name.startswith(_PREFIXES)}
    return {
        **kept,
        "CUDA_VISIBLE_DEVICES": "",
        "FANFOLD_RELAY": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


def serve(run: Path, name: str, kwargs: Mapping[str, Any], fold: Mapping[str, str], *, follow: bool) -> Cursor:
    """Deliver one run to one tracker from this process; raise Owned when another does it already."""
    arguments = dict(kwargs)
    probes = bool(arguments.pop("probes", False))
    cursor = cursor_of(run, name, kwargs)
    cursor.acquire()
    stop = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    try:
        tracker = make(name, arguments, run)
        Worker(run, tracker, cursor, fold=fold, probes=probes, stop=stop).serve(follow=follow)
    finally:
        cursor.release()
    return cursor


def make(name: str, kwargs: Mapping[str, Any], run: Path) -> Any:
    """Construct a tracker by name for a run: project first, then a directory of the run's own where it needs one."""
    from ..journal.directory import decode_name

    cls = find_class(name)
    arguments = dict(kwargs)
    project = arguments.pop("run_name", None) or decode_name(run.parent.name)
    if cls.requires_logging_directory:
        return cls(project, arguments.pop("logging_dir", None) or str(run / "trackers" / name), **arguments)
    return cls(project, **arguments)


def main() -> int:
    """Run as the relay process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    setup = json.loads(sys.stdin.buffer.read())
    try:
        serve(Path(setup["run"]), setup["name"], setup["kwargs"], setup["fold"], follow=True)
    except Owned as owned:
        logging.getLogger("fanfold").info("%s", owned)
    return 0
