"""Trackers for the relay's tests: plain files to read back, and every kind of failure. Imported by relay processes."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from fanfold.trackers import Destination, GeneralTracker, register_tracker_class

WHO = contextvars.ContextVar("WHO", default="nobody")


class Lines(GeneralTracker):
    """A tracker as a user would write it: one line of JSON per call."""

    name = "lines"
    requires_logging_directory = False

    def __init__(self, run_name: str, path: str = "", **kwargs) -> None:
        super().__init__()
        self.run_name = run_name
        self.path = path or os.environ["LINES"]

    @property
    def tracker(self):
        return self.file

    def start(self) -> None:
        self.file = Path(self.path).open("a")  # noqa: SIM115 - closed by finish()
        self.say(
            "start",
            who=WHO.get(),
            pid=os.getpid(),
            rank=os.environ.get("RANK"),
            gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
            project=self.run_name,
        )

    def say(self, event: str, **facts) -> None:
        self.file.write(json.dumps({"event": event, **facts}) + "\n")
        self.file.flush()

    def store_init_configuration(self, values) -> None:
        self.say("config", values=values)

    def log(self, values, step=None, **kwargs) -> None:
        self.say("log", step=step, values={key: str(value) if not isinstance(value, (int, float)) else value for key, value in values.items()},
                 who=WHO.get(), kwargs=kwargs)  # fmt: skip

    def finish(self) -> None:
        self.say("finish")
        self.file.close()


class Readable(Destination):
    """A file that can be read back. Each write waits a little, so that a kill interrupts a delivery."""

    name = "readable"
    delivery = "readable"
    pause = 0.0005

    def __init__(self, run_name: str, path: str, **kwargs) -> None:
        super().__init__(run_name)
        self.path = path

    @property
    def remote(self):
        return self.path

    def begin(self, identity, remote):
        self.file = Path(self.path).open("a")  # noqa: SIM115 - closed by close()
        return self.file

    def write(self, points):
        for point in points:
            self.file.write("".join(json.dumps([key, point.step, value]) + "\n" for key, value in point.values.items()))
            self.file.flush()
            time.sleep(self.pause)

    def counts(self):
        found: dict[str, int] = {}
        for key, _, _ in map(json.loads, Path(self.path).read_text().splitlines()):
            found[key] = found.get(key, 0) + 1
        return found

    def close(self, status: str) -> None:
        Path(f"{self.path}.status").write_text(status)
        self.file.close()


class LateFlush(Readable):
    """Holds its data until its process exits while its barrier fails, which it does in the first process that starts it."""

    name = "late_flush"

    def begin(self, identity, remote):
        file = super().begin(identity, remote)
        self.held: list[str] = []
        first = Path(f"{self.path}.first")
        if not first.exists():
            first.write_text(str(os.getpid()))
        self.down = first.read_text() == str(os.getpid())
        atexit.register(self.flush, 2.0)
        return file

    def write(self, points):
        self.held += [json.dumps([key, point.step, value]) + "\n" for point in points for key, value in point.values.items()]
        Path(f"{self.path}.held").touch()

    def settle(self) -> None:
        if self.down:
            raise ConnectionError("the server does not answer")
        self.flush()

    def flush(self, pause: float = 0.0) -> None:
        time.sleep(pause)
        with Path(self.path).open("a") as file:
            file.write("".join(self.held))
        self.held = []


class Clumsy(Readable):
    """A destination with bugs: it fails on text, files, configs and at the end."""

    name = "clumsy"
    broken = ("text",)

    def write(self, points):
        for point in points:
            for key, value in point.values.items():
                if key in self.broken:
                    value.nonsense  # noqa: B018 - the bug
                super().write([point._replace(values={key: value})])

    def set_config(self, values) -> None:
        values + 0  # the bug

    def artifact(self, path, name) -> None:
        raise NotImplementedError("later")

    def close(self, status: str) -> None:
        super().close(status)
        raise KeyError(status)


class Sequences(Readable):
    """Stores each image of a list separately; killed once, in the middle of the fifth."""

    name = "sequences"
    counts_each = True

    def write(self, points):
        for point in points:
            for key, pictures in point.values.items():
                for picture in pictures:
                    if sum(self.counts().values()) == 4 and not Path(f"{self.path}.killed").exists():
                        Path(f"{self.path}.killed").touch()
                        os.kill(os.getpid(), signal.SIGKILL)
                    self.file.write(json.dumps([key, point.step, int(picture.array().max())]) + "\n")
                    self.file.flush()


class Stuck(Readable):
    """A destination whose start hangs and ignores the first interrupt."""

    name = "stuck"

    def __init__(self, run_name: str, **kwargs) -> None:
        super().__init__(run_name, os.devnull)

    def begin(self, identity, remote):
        with contextlib.suppress(TimeoutError):
            time.sleep(10_000)
        time.sleep(10_000)


class Heavy(Readable):
    """A destination whose start is busy for a while, like an import on a slow machine."""

    name = "heavy"

    def begin(self, identity, remote):
        until = time.thread_time() + 1.5
        while time.thread_time() < until:
            pass
        return super().begin(identity, remote)


class Raising(Lines):
    """A tracker that is down until the file UP exists."""

    name = "raising"

    def log(self, values, step=None, **kwargs) -> None:
        if not Path(f"{self.path}.up").exists():
            raise ConnectionError("the server is on holiday")
        super().log(values, step, **kwargs)


class Picky(Lines):
    """A tracker with a bug: it cannot handle text."""

    name = "picky"

    def log(self, values, step=None, **kwargs) -> None:
        for value in values.values():
            value + 0
        super().log(values, step, **kwargs)


class Flaky(Lines):
    """A tracker of which every third call fails once."""

    name = "flaky"
    calls = 0

    def log(self, values, step=None, **kwargs) -> None:
        type(self).calls += 1
        if self.calls % 3 == 0:
            raise ConnectionError("try again")
        super().log(values, step, **kwargs)


class Hanging(Lines):
    name = "hanging"

    def log(self, values, step=None, **kwargs) -> None:
        time.sleep(10_000)


class HangingStart(Lines):
    name = "hanging_start"

    def start(self) -> None:
        time.sleep(10_000)


class Slow(Lines):
    name = "slow"

    def log(self, values, step=None, **kwargs) -> None:
        time.sleep(0.05)
        super().log(values, step, **kwargs)


class Meddler(Lines):
    """A tracker that changes its process as tracker libraries do."""

    name = "meddler"

    def start(self) -> None:
        super().start()
        random.seed(1)
        for name in ("numpy", "torch"):
            module = sys.modules.get(name)
            if module is not None:
                (module.random.seed if name == "numpy" else module.manual_seed)(1)
        sys.excepthook = lambda *_: None
        sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - as libraries do
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, lambda *_: None)


for cls in (
    Lines,
    Readable,
    LateFlush,
    Clumsy,
    Sequences,
    Stuck,
    Heavy,
    Raising,
    Picky,
    Flaky,
    Hanging,
    HangingStart,
    Slow,
    Meddler,
):
    register_tracker_class(cls)
