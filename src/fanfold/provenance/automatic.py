"""Automatic stamps on everything saved while a run is active: savers are hooked from the first active run to the last.

Libraries that are not imported yet are hooked when they are.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..errors import guard
from .hooks import ImportHook
from .record import of_process
from .savers import HOOKS
from .stamper import Stamper, active, export_natively


def refresh() -> None:
    """Update the natively exported stamp to the run's current step."""
    for newest in active[-1:]:  # a slice, read once: a run may end in another thread
        export_natively(Stamper(newest))


def _put_on(name: str, *, fresh: bool = False) -> None:
    for hook in HOOKS:
        if hook.module == name and active:
            with guard(f"hook {name} to stamp what it saves"):
                hook.put_on(sys.modules[name], fresh=fresh)


_later = ImportHook(frozenset(hook.module for hook in HOOKS), functools.partial(_put_on, fresh=True))


def start(run: Any) -> Callable[[float], None]:
    """Stamp everything saved from now on with `run`; return a function that ends that."""
    active.append(run)
    export_natively(Stamper(run))
    for name in {hook.module for hook in HOOKS}:
        if name in sys.modules:
            _put_on(name)
    if _later not in sys.meta_path:
        sys.meta_path.insert(0, _later)
    # git may take a second in a large repository: run it now, in the background, not at the first checkpoint.
    threading.Thread(target=of_process, name="fanfold-stamp", daemon=True).start()
    return lambda _timeout: _stop(run)


def _stop(run: Any) -> None:
    if run in active:
        active.remove(run)
    export_natively(Stamper(active[-1]) if active else None)
    if not active:
        for hook in HOOKS:
            hook.take_off()
        if _later in sys.meta_path:
            sys.meta_path.remove(_later)
