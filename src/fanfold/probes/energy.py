"""Measurement of a run's energy use and emissions with CodeCarbon, in a separate process.

CodeCarbon starts threads and child processes, writes files, takes a lock and looks up its location on the network. So it runs
outside the training process, in a session without a terminal (nothing can ask for a password), and sends metrics over a pipe.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import os
import select
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from fanfold import errors
from fanfold.journal.files import open_to_write
from fanfold.process import module_command, same_modules

NAME = "codecarbon"
INTERVAL = 15.0
JOULES = 3.6e6  # per kWh
SHORTEST_WINDOW = 0.5  # seconds; over less, CodeCarbon's rounding would dominate the power
PARENT_SECONDS = 5.0  # how often the process checks whether training is still running
STOP_SECONDS = 5.0  # how long a run that ends while CodeCarbon is starting waits for its only measurement


def named(trackers: Any) -> bool:
    """Return whether init(trackers=…) names CodeCarbon, which is not a tracker: its metrics go to every tracker."""
    listed = trackers if isinstance(trackers, (list, tuple, set)) else [trackers]
    return any(str(item) == NAME for item in listed if isinstance(item, (str, enum.Enum)))


def check(arguments: Mapping[str, Any]) -> None:
    """Raise if CodeCarbon is missing or the arguments are not valid JSON, before anything of the run is written."""
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
    """A probe that passes energy, emissions and power of this node to `write` every `interval` seconds, and at the end.

    `arguments` go to CodeCarbon's tracker; `online=True` lets it look up the node's location. Its output goes to `log`.
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
        """Start the process, and a thread that receives its metrics."""
        with errors.guard("start the energy probe"):
            self._log.parent.mkdir(parents=True, exist_ok=True)
            silent = self._log == Path(os.devnull)
            with os.fdopen(os.open(self._log, os.O_WRONLY) if silent else open_to_write(self._log, os.O_APPEND), "wb") as log:
                self._process = subprocess.Popen(
                    module_command("fanfold.probes.energy"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                    start_new_session=True, env=_environment(),
                )  # fmt: skip
            self._say(json.dumps(self._setup))
            self._thread = threading.Thread(target=self._listen, args=(self._process,), name="fanfold-energy", daemon=True)
            self._thread.start()

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """Receive the last metrics, and kill the process, at the latest after `timeout` seconds."""
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
        with contextlib.suppress(BrokenPipeError):  # the process died: its log says why
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
        """Write metrics, or warn with the error that the process reports instead."""
        if "error" in said:
            self._silent(said["error"])
        elif self._thread is threading.current_thread():  # else the run ended while CodeCarbon hung
            self._write(said)
        return True

    def _silent(self, why: str) -> None:
        errors.notices.once(
            "energy probe",
            f"the energy probe gives no values: {why}. Training continues, and the run has no energy/… keys. "
            f"Look at tracker_kwargs[{NAME!r}], or turn it off with energy=False.",
        )


def _environment() -> dict[str, str]:
    """Return an environment in which the process finds the same modules, and the working directory shadows none of them."""
    return {"OMP_NUM_THREADS": "1", **os.environ, **same_modules()}


# Code of the probe's process


def figures(total: Any, delta: Any) -> dict[str, float]:
    """Return CodeCarbon's measurements under our keys: totals since the start, power since the previous measurement."""
    parts = ["cpu", "ram", *(["gpu"] if total.gpu_count else [])]
    found = {"energy/kwh": total.energy_consumed, "energy/emissions_kg": total.emissions}
    found |= {f"energy/{part}_kwh": getattr(total, f"{part}_energy") for part in parts}
    if delta.duration >= SHORTEST_WINDOW:
        found |= {f"energy/{part}_w": getattr(delta, f"{part}_energy") * JOULES / delta.duration for part in parts}
    return {key: float(value) for key, value in found.items()}


def make(arguments: Mapping[str, Any], out: IO[str], folder: str) -> Any:
    """Return a CodeCarbon tracker that writes no file, takes no lock and uses no network unless configured to."""
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
    """Raise for unknown arguments: CodeCarbon swallows its own errors, and would silently measure nothing."""
    import inspect

    known = {name for cls in kind.__mro__[:2] for name in inspect.signature(cls.__init__).parameters} - {"self", "args", "kwargs"}
    unknown = sorted(set(given) - known)
    if unknown:
        raise errors.SettingError(f"CodeCarbon does not know {', '.join(unknown)}. Known: online, {', '.join(sorted(known))}")


def serve(setup: Mapping[str, Any], commands: int, out: IO[str]) -> None:
    """Measure until told to stop or until training has exited; then send the last metrics."""
    interval = float(setup["arguments"]["measure_power_secs"])
    with tempfile.TemporaryDirectory(prefix="fanfold-energy-") as folder:
        tracker = make(setup["arguments"], out, folder)
        tracker.start()
        while not _told(commands, interval, setup["parent"]):
            tracker.flush()
        tracker.stop()


def _told(commands: int, seconds: float, parent: int) -> bool:
    """Return whether to stop: on a command, at the end of the pipe, or if training is gone (its forks may hold the pipe open)."""
    while seconds > 0:
        if select.select([commands], [], [], min(seconds, PARENT_SECONDS))[0] or os.getppid() != parent:
            return True
        seconds -= PARENT_SECONDS
    return False


def main() -> None:
    """Run the probe's process: setup on stdin, metrics on stdout, CodeCarbon's own output on stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(_line(0))
    _, error = errors.outcome(serve, setup, 0, out)
    if error is not None and not isinstance(error, BrokenPipeError):
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({"error": f"{type(error).__name__}: {error}"}), file=out, flush=True)


def _line(fd: int) -> bytes:
    """Read one line, without buffering more: select() waits for the rest on the descriptor."""
    found = b""
    while not found.endswith(b"\n") and (byte := os.read(fd, 1)):
        found += byte
    return found


if __name__ == "__main__":
    main()
