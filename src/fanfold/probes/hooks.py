"""See every optimizer step and every wait for data, from Python: a callback of torch's would cost each node of backward.

torch calls hooks around `Optimizer.step`, for all optimizers at once; for data, the one method that all iterators of
DataLoaders share is wrapped. Both can be taken off again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def install(library: Any) -> Callable[[], None]:
    """Tell the native library of steps and waits; return how to stop."""
    from torch.compiler import is_compiling
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    begin, end = library.ff_step_begin, library.ff_step_end
    names = _Names("Optimizer.step#{}.step")

    def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():  # else this is traced, and must leave nothing in the graph
            begin(id(optimizer), names[type(optimizer)])

    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_compiling():
            end(id(optimizer))

    handles = (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after))
    unwrap = _wrap_loaders(library)

    def remove() -> None:
        for handle in handles:
            handle.remove()
        unwrap()

    return remove


class _Names(dict[type, bytes]):
    """What torch calls the ranges of a class, in the form the library takes."""

    def __init__(self, form: str) -> None:
        self._form = form

    def __missing__(self, cls: type) -> bytes:
        name = self[cls] = self._form.format(cls.__name__).encode()
        return name


def _wrap_loaders(library: Any) -> Callable[[], None]:
    from torch.utils.data import dataloader

    Iterator: Any = dataloader._BaseDataLoaderIter  # noqa: N806, SLF001 - a class; torch has no hook here
    begin, end, names, on = library.ff_wait_begin, library.ff_wait_end, _Names("enumerate(DataLoader)#{}.__next__"), [True]
    inner = Iterator.__next__

    @functools.wraps(inner)
    def following(self: Any) -> Any:
        if not on:
            return inner(self)
        begin(id(self), names[type(self)])
        try:
            return inner(self)
        finally:
            end(id(self))

    def unwrap() -> None:
        on.clear()  # somebody may have wrapped the wrapper: then it stays, and does nothing
        if Iterator.__next__ is following:
            Iterator.__next__ = inner

    Iterator.__next__ = following
    return unwrap
