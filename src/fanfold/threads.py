"""Background threads of a run, which can be stopped individually as well as with their run."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background(threading.Thread):
    """A daemon thread that runs `work`; `stop` calls `end`, which must make `work` return, and waits for it.

    A run ends its own threads. `stop` is for code that cleans up threads it did not start, as Lightning's test suite does.
    """

    def __init__(self, work: Callable[[], object], name: str, end: Callable[[], object]) -> None:
        super().__init__(target=work, name=f"fanfold-{name}", daemon=True)
        self._end = end

    def stop(self, timeout: float = 10.0) -> None:
        self._end()
        self.join(timeout)
