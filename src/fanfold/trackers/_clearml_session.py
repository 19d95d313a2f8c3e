"""ClearML's offline sessions: created under our own id, and counted as their files grow."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..atomic import replace_text
from .tools import GrowingFile, cut_torn_end

METRICS = "metrics.jsonl"
TAG = "fanfold:"  # of a task, followed by the run's id
PLACE = "CLEARML_CACHE_DIR"  # where offline sessions are stored
_places: set[str] = set()  # values of it that we set, not the user


def place_in(folder: Path) -> None:
    """Make ClearML store its offline sessions in a folder, unless the user has chosen one."""
    if os.environ.get(PLACE) in (None, *_places):
        os.environ[PLACE] = str(folder)  # read whenever a session's folder is requested
        _places.add(os.environ[PLACE])


class Events:
    """The events of an offline session by title and series, counted as its file grows."""

    def __init__(self, path: Path | None) -> None:
        self._tail = None if path is None else GrowingFile(path)
        self.found: Counter[tuple[str, str]] = Counter()

    def refresh(self) -> int:
        """Count new events, and return how many there are in total."""
        for line in self._tail.read() if self._tail else ():
            self.found.update((event["metric"], event["variant"]) for event in json.loads(line))
        return self.found.total()


def prepared(number: str, arguments: dict[str, Any]) -> str:
    """Create an offline session under our own id: ClearML would generate a new one each time, and a kill would leave two."""
    from clearml.config import get_offline_dir

    folder = Path(str(get_offline_dir(task_id=number)))
    if not (folder / "task.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        about: dict[str, Any] = {"id": number, "type": "training", "output": {}, "execution": {"parameters": {}, "artifacts": []}}
        about |= {"name": arguments["task_name"], "project_name": arguments["project_name"]}
        replace_text(folder / "task.json", json.dumps(about))
    cut_torn_end(folder / METRICS)  # a line torn by a kill would also corrupt the next one
    return number


@contextlib.contextmanager
def hooks_kept() -> Iterator[None]:
    """Restore signal handlers and the exception hook: ClearML's would end the task while we are still delivering."""
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread()]
    handlers, hook = [signal.getsignal(number) for number in numbers], sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = hook
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
