"""Hooks on optimizer steps and waits for data, in Python: a torch callback would add cost to every node of backward.

torch calls a global hook after every `Optimizer.step`. Ours is registered once and stays, doing nothing without listeners:
compiled functions guard on the list of hooks, and torch may be iterating over it when one wants to leave. For data, the one
method that all DataLoader iterators share is wrapped, and unwrapped again.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

from ..errors import notices

Listener = Callable[[], None]


class _Heard:
    """The receivers of step events: the native library, and listeners."""

    registered = False
    library: Any = None
    listeners: tuple[Listener, ...] = ()  # replaced as a whole: a step may be iterating over it


def after_step(listener: Listener) -> Callable[[], None]:
    """Call `listener` after every optimizer step outside compiled functions; return a function that stops it."""
    _register()
    _Heard.listeners = (*_Heard.listeners, listener)

    def remove() -> None:
        _Heard.listeners = tuple(one for one in _Heard.listeners if one is not listener)

    return remove


def install(library: Any) -> Callable[[], None]:
    """Report steps and waits for data to the native library; return a function that stops it."""
    _register()
    _Heard.library = library
    unwrap = _wrap_loaders(library)

    def remove() -> None:
        _Heard.library = None
        unwrap()

    return remove


def _register() -> None:
    if _Heard.registered:
        return
    from torch.compiler import is_compiling
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after(*_: Any) -> None:
        if is_compiling():  # the hook is being traced, and must leave nothing in the graph
            return
        if (library := _Heard.library) is not None and library.ff_step():
            library.ff_step_turn()
        for listener in _Heard.listeners:
            listener()

    register_optimizer_step_post_hook(after)
    _Heard.registered = True


class _StepNames(dict[tuple[type, type], bytes]):
    """The library's names for waits: torch's own name for the iterator class, plus the dataset class."""

    def __missing__(self, classes: tuple[type, type]) -> bytes:
        iterator, data = (one.__name__ for one in classes)
        found = self[classes] = f"enumerate(DataLoader)#{iterator}.__next__({data})".encode(errors="replace")
        return found


def _say_unseen(iterator: Any) -> None:
    """Warn once if workers were not forked: fanfold is not loaded in them."""
    worker = next(iter(getattr(iterator, "_workers", ())), None)
    how = worker and (getattr(worker, "_start_method", None) or multiprocessing.get_start_method())
    if how not in (None, "fork"):
        notices.once(
            "ops unseen workers",
            f"a DataLoader's workers are started by {how}: their operators are not in the profile. How long training waits for "
            "them is. Pass multiprocessing_context='fork' to see what they do.",
        )


_unwrap: Callable[[], None] | None = None


def _wrap_loaders(library: Any) -> Callable[[], None]:
    global _unwrap  # noqa: PLW0603 - a forked child that starts its own run inherits its parent's wrapper
    if _unwrap is not None:
        _unwrap()
    from torch.utils.data import dataloader

    Iterator: Any = dataloader._BaseDataLoaderIter  # noqa: N806, SLF001 - a class; torch has no hook for this
    begin, end, names, on = library.ff_wait_begin, library.ff_wait_end, _StepNames(), [True]
    inner = Iterator.__next__

    @functools.wraps(inner)
    def following(self: Any) -> Any:
        if not on:
            return inner(self)
        if not self._num_yielded:
            _say_unseen(self)
        begin(id(self), names[type(self), type(self._dataset)])
        try:
            return inner(self)
        finally:
            end(id(self))

    def unwrap() -> None:
        on.clear()  # the wrapper may itself have been wrapped: then it stays, and does nothing
        if Iterator.__next__ is following:
            Iterator.__next__ = inner

    Iterator.__next__ = following
    _unwrap = unwrap
    return unwrap
