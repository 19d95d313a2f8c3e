"""Measure what a run costs in energy and emissions, with CodeCarbon, from a process of its own.

The library starts threads and child processes, writes files, takes a lock and looks up places on the network. Here it runs
beside training, in a session without a terminal (nothing can ask for a password), and says its figures over a pipe.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from fanfold import errors

NAME = "codecarbon"
INTERVAL = 15.0
JOULES = 3.6e6  # in a kWh
SHORTEST_WINDOW = 0.5  # seconds; over less, the library's own rounding would decide the power
PARENT_SECONDS = 5.0  # how often the process looks whether training still lives
STOP_SECONDS = 5.0  # a run shorter than the library's start waits so long for its one figure


def named(trackers: Any) -> bool:
    """Tell whether CodeCarbon is among what init(trackers=…) was given: it goes to every tracker, and is none itself."""
    listed = trackers if isinstance(trackers, (list, tuple, set)) else [trackers]
    return any(str(item) == NAME for item in listed if isinstance(item, (str, enum.Enum)))


def check(arguments: Mapping[str, Any]) -> None:
    """Raise for what cannot work, before anything of the run is written: the library is missing, or arguments are no JSON."""
    if not _installed():
        raise errors.missing_extra("codecarbon", NAME, "Measuring energy")
    try:
        json.dumps(dict(arguments))
    except (TypeError, ValueError) as error:
        raise errors.SettingError(
            f"tracker_kwargs[{NAME!r}] holds what cannot travel to the probe's process: {error}. The run was not started. "
            "Pass plain values."
        ) from error


def _installed() -> bool:
    try:
        return importlib.util.find_spec(NAME) is not None
    except (ImportError, ValueError):
        return False


class EnergyProbe:
    """Hand energy, emissions and power of this node to `write` each `interval` seconds, and once more at the end.

    `arguments` go to CodeCarbon's tracker; `online=True` lets it look up where the node is. Its words go to `log`.
    """

    def __init__(
        self, write: Callable[[dict[str, float]], None], *, interval: float = INTERVAL,
        arguments: Mapping[str, Any] | None = None, log: Path | None = None,
    ) -> None:  # fmt: skip
        self._write = write
        self._setup = {"arguments": {"measure_power_secs": interval, **(arguments or {})}, "parent": os.getpid()}
        self._log = log or Path(os.devnull)
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process, and a thread that takes its figures."""
        with errors.guard("start the energy probe"):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "fanfold.probes.energy"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    start_new_session=True, env=_environment(),
                )  # fmt: skip
            self._say(json.dumps(self._setup))
            self._thread = threading.Thread(target=self._listen, args=(self._process,), name="fanfold-energy", daemon=True)
            self._thread.start()

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Take the last figures; a process that does not give them within `timeout` seconds is ended."""
        process, thread = self._process, self._thread
        if process is None or thread is None:
            return
        self._say("stop")
        thread.join(timeout)
        self._process = self._thread = None
        if thread.is_alive():
            errors.notices.once(
                "energy probe hangs",
                f"the energy probe did not give its last figures within {timeout:g} s. The run ends without them; nothing else "
                f"is missing. Look into {self._log}, or turn it off with energy=False.",
            )
        process.kill()
        process.wait()

    def _say(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: its log says why
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        heard = False
        for line in process.stdout:
            with errors.guard("write energy figures"):
                heard = self._take(json.loads(line)) or heard
        if not heard and self._thread is threading.current_thread():
            self._silent(f"it ended without a figure; {self._log} says more")

    def _take(self, said: dict[str, Any]) -> bool:
        """Write figures; whatever the process says instead of them is why there are none."""
        if "error" in said:
            self._silent(said["error"])
        elif self._thread is threading.current_thread():  # else the run has ended while the library hung
            self._write(said)
        return True

    def _silent(self, why: str) -> None:
        errors.notices.once(
            "energy probe",
            f"the energy probe gives no figures: {why}. Training goes on, and the run has no energy/… keys. "
            f"Look at tracker_kwargs[{NAME!r}], or turn it off with energy=False.",
        )


def _environment() -> dict[str, str]:
    """Return an environment in which the same modules are in reach and the working directory shadows none of them."""
    path = os.pathsep.join(dict.fromkeys(part or os.getcwd() for part in sys.path))  # noqa: PTH109 - a text is wanted
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


# The process


def figures(total: Any, delta: Any) -> dict[str, float]:
    """Return what CodeCarbon measured under our keys: sums since the start, power since the figures before."""
    parts = ["cpu", "ram", *(["gpu"] if total.gpu_count else [])]
    found = {"energy/kwh": total.energy_consumed, "energy/emissions_kg": total.emissions}
    found |= {f"energy/{part}_kwh": getattr(total, f"{part}_energy") for part in parts}
    if delta.duration >= SHORTEST_WINDOW:
        found |= {f"energy/{part}_w": getattr(delta, f"{part}_energy") * JOULES / delta.duration for part in parts}
    return {key: float(value) for key, value in found.items()}


def make(arguments: Mapping[str, Any], out: IO[str], folder: str) -> Any:
    """Make CodeCarbon's tracker so that it writes no file, takes no lock and asks no network unless told to."""
    from codecarbon import EmissionsTracker, OfflineEmissionsTracker
    from codecarbon.output_methods.base_output import BaseOutput

    class Handler(BaseOutput):  # type: ignore[misc]  # the library has no types
        def out(self, total: Any, delta: Any) -> None:
            print(json.dumps(figures(total, delta)), file=out, flush=True)

    given = dict(arguments)
    kind = EmissionsTracker if given.pop("online", False) else OfflineEmissionsTracker
    quiet = {"output_methods": [], "output_dir": folder, "allow_multiple_runs": True, "log_level": "error"}
    offline = {"emissions_endpoint": None, "electricitymaps_api_token": None}
    _know(kind, given)
    return kind(**{**quiet, **offline, **given, "output_handlers": [Handler()]})


def _know(kind: Any, given: Mapping[str, Any]) -> None:
    """Raise for unknown arguments: CodeCarbon swallows its own errors, and would measure nothing without a word."""
    import inspect

    known = {name for cls in kind.__mro__[:2] for name in inspect.signature(cls.__init__).parameters} - {"self", "args", "kwargs"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise errors.SettingError(f"CodeCarbon does not know {', '.join(unknown)}. Known: online, {', '.join(sorted(known))}")


def serve(setup: Mapping[str, Any], commands: int, out: IO[str]) -> None:
    """Measure until told to stop, or until training is gone; then say the last figures."""
    interval = float(setup["arguments"]["measure_power_secs"])
    with tempfile.TemporaryDirectory(prefix="fanfold-energy-") as folder:
        tracker = make(setup["arguments"], out, folder)
        tracker.start()
        while not _told(commands, interval, setup["parent"]):
            tracker.flush()
        tracker.stop()


def _told(commands: int, seconds: float, parent: int) -> bool:
    """Wait for a word or the end of the pipe. A forked child of training may hold the pipe open: so look for training, too."""
    while seconds > 0:
        if select.select([commands], [], [], min(seconds, PARENT_SECONDS))[0] or os.getppid() != parent:
            return True
        seconds -= PARENT_SECONDS
    return False


def main() -> None:
    """Run as the probe's process: set-up on stdin, figures on stdout, whatever the library prints on stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(_line(0))
    _, error = errors.outcome(lambda: serve(setup, 0, out))
    if error is not None and not isinstance(error, BrokenPipeError):
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)


def _line(fd: int) -> bytes:
    """Read one line and not a byte more: what follows is waited for by descriptor."""
    found = b""
    while not found.endswith(b"\n") and (byte := os.read(fd, 1)):
        found += byte
    return found


if __name__ == "__main__":
    main()
