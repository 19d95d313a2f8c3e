"""Folders of other tools beside the dashboard: imported into the user's cache and followed, in a process of its own.

The folders themselves are only read. The process ends when the pipe from its parent closes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ..errors import FanfoldError
from ..journal.directory import run_directories
from ..process import digest, module_command, same_modules
from ..settings import cache_directory
from .importing import POLL_SECONDS, Import

LARGEST: Final = 16 << 20  # bytes of a file that is copied to the cache
MOST_PROCESSES: Final = 4  # that import at once, when the dashboard starts
FEWEST: Final = 8  # runs for each of them


def own_runs(path: Path) -> Path | None:
    """Return the directory of our own runs at a path: the path itself, or `.fanfold` in it; None if there is none."""
    for place in (path, path / ".fanfold"):
        if next(iter(run_directories(place)), None) is not None:
            return place
    return None


def cache_of(path: Path) -> Path:
    """Return the directory in the user's cache that runs imported from a path go to."""
    return cache_directory() / "imports" / digest(str(path))


@contextlib.contextmanager
def following(paths: Sequence[Path]) -> Iterator[None]:
    """Import and follow these paths while the context lasts."""
    if not paths:
        yield
        return
    command = module_command("fanfold.transfer.follower", *map(str, paths))
    environment = {**os.environ, **same_modules()}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
    try:
        yield
    finally:
        assert child.stdin is not None
        child.stdin.close()
        try:
            child.wait(5.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def follow(paths: Sequence[str]) -> None:
    """Import and follow these paths until stdin closes."""
    work = [Import([path], dir=cache_of(Path(path)), largest=LARGEST) for path in paths]
    helpers = _helpers(work)
    stop = threading.Event()
    threading.Thread(target=_watch, args=[stop], daemon=True).start()
    try:
        while not stop.is_set():
            for one in work:
                one.round(stop, lambda _account: None)
            helpers = [helper for helper in helpers if os.waitpid(helper, os.WNOHANG)[0] == 0]
            stop.wait(POLL_SECONDS)
    finally:
        for helper in helpers:
            os.kill(helper, signal.SIGTERM)
            os.waitpid(helper, 0)
        for one in work:
            one.close()


def _helpers(work: Sequence[Import]) -> list[int]:
    """Start processes that import a part of the runs each, one for each other core; return their ids.

    They are forked, before there is any thread, because a new Python would take longer to start than most folders to import.
    """
    if not sys.platform.startswith("linux"):
        return []
    known = sum(one.look(time.monotonic()) for one in work)
    count = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, known // FEWEST)
    follower = os.getpid()
    helpers = []
    for place in range(1, count):
        child = os.fork()
        if child == 0:
            try:
                for one in work:
                    one.share(place, count, lambda: os.getppid() != follower)
            finally:
                os._exit(0)
        helpers.append(child)
    return helpers


def _watch(stop: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    stop.set()


if __name__ == "__main__":
    try:
        follow(sys.argv[1:])
    except FanfoldError as error:
        sys.exit(f"fanfold: {error}")
    except KeyboardInterrupt:
        pass
