"""See every optimizer step and every wait for data, from Python: a callback of torch's would cost each node of backward.

torch calls a hook after `Optimizer.step`, for all optimizers at once. Ours is registered once and stays, silent while nobody
listens: compiled functions guard on the list of hooks, and torch walks it while others may want to leave. For data, the one
method that all iterators of DataLoaders share is wrapped, and unwrapped again.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable
from typing import Any

from ..errors import notices

Listener = Callable[[], None]


class _Heard:
    """Who hears of steps: the native library, and others who want to know when one has ended."""

    registered = False
    library: Any = None
    listeners: tuple[Listener, ...] = ()  # replaced as a whole: a step may be walking it


def after_step(listener: Listener) -> Callable[[], None]:
    """Call `listener` after every step of every optimizer that is not inside a compiled function; return how to stop."""
    _register()
    _Heard.listeners = (*_Heard.listeners, listener)

    def remove() -> None:
        _Heard.listeners = tuple(one for one in _Heard.listeners if one is not listener)

    return remove


def install(library: Any) -> Callable[[], None]:
    """Tell the native library of steps and waits; return how to stop."""
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
        if is_compiling():  # then this is traced, and must leave nothing in the graph
            return
        if (library := _Heard.library) is not None and library.ff_step():
            library.ff_step_turn()
        for listener in _Heard.listeners:
            listener()

    register_optimizer_step_post_hook(after)
    _Heard.registered = True


class _Names(dict[tuple[type, type], bytes]):
    """What torch calls the wait for an iterator of a class, and whose data it is, in the form the library takes."""

    def __missing__(self, classes: tuple[type, type]) -> bytes:
        iterator, data = (one.__name__ for one in classes)
        found = self[classes] = f"enumerate(DataLoader)#{iterator}.__next__({data})".encode(errors="replace")
        return found


def _say_unseen(iterator: Any) -> None:
    """Say it once when workers were not forked: they are programs of their own, and nothing of ours is in them."""
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
    global _unwrap  # noqa: PLW0603 - a forked child that starts a run of its own has its parent's wrapper on
    if _unwrap is not None:
        _unwrap()
    from torch.utils.data import dataloader

    Iterator: Any = dataloader._BaseDataLoaderIter  # noqa: N806, SLF001 - a class; torch has no hook here
    begin, end, names, on = library.ff_wait_begin, library.ff_wait_end, _Names(), [True]
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
        on.clear()  # somebody may have wrapped the wrapper: then it stays, and does nothing
        if Iterator.__next__ is following:
            Iterator.__next__ = inner

    Iterator.__next__ = following
    _unwrap = unwrap
    return unwrap
