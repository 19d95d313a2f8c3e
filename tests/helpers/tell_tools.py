"""A real training that takes requests, in its own processes: see tell_train.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import fanfold
import warm_python
from paths import HELPERS

TRAIN = HELPERS / "tell_train.py"
LIBRARIES = {"trainer": "torch", "transformers": "transformers", "lightning": "lightning"}


class Job:
    """A real training in its own processes."""

    def __init__(self, folder, kind, *options, ranks=1, around=()):
        words = [str(TRAIN), str(folder), kind, *options]
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        env = {**os.environ, "FANFOLD_DIR": str(folder), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.folder, self.ranks, self.log = folder, ranks, folder / "job.log"
        with self.log.open("wb") as log:
            command = [sys.executable, *around, *(around and [sys.executable]), *launch, *words]
            how = {"env": env, "stdout": log, "stderr": log, "start_new_session": True}
            libraries = LIBRARIES.get(kind, "torch" if ranks > 1 else None)
            self.process = (
                warm_python.Popen(command, libraries=libraries, **how) if libraries else subprocess.Popen(command, **how)
            )

    def __enter__(self):
        try:
            self._wait_for_steps()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait_for_steps(self):
        """Wait until every rank has logged something."""
        self.run, deadline = self.opened(), time.monotonic() + 200
        while len(self.run.ranks) < self.ranks or not all(self.series("t", rank) for rank in range(self.ranks)):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(self.log.read_text())
            time.sleep(0.1)
            self.run.refresh()

    def __exit__(self, *_error):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def opened(self):
        while True:
            found = fanfold.runs("tell", dir=self.folder)
            if found:
                return found[0].reopened()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)

    def series(self, key, rank):
        try:
            found = self.run.series(key, rank=rank)
        except fanfold.FanfoldError:
            return {}  # this rank has not logged the key yet
        return dict(zip(found.steps.tolist(), found.values.tolist(), strict=True))

    def steps(self, key):
        """Return the steps at which each rank logged a key."""
        self.run.refresh()
        return [sorted(self.series(key, rank)) for rank in range(self.ranks)]

    def ends(self):
        assert self.process.wait(120) == 0, self.log.read_text()
        self.run.refresh()
