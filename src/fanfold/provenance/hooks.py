"""Temporary replacements of names inside other libraries, also of libraries that are imported later."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import Future
    from importlib.machinery import ModuleSpec


class Hook:
    """One name inside a saver, replaced while the hook is on."""

    def __init__(self, module: str, path: str, make_wrapper: Callable[[Any], Callable[..., Any]]) -> None:
        self.module, self.path, self.make_wrapper = module, path, make_wrapper
        self.owner: Any = None
        self.kept: Any = None  # from the owner's __dict__: in torch's classes that is a descriptor, not a function
        self.wrapper: Any = None
        self.needed: list[Future[Any]] = []

    def put_on(self, module: ModuleType, *, fresh: bool = False) -> None:
        """Replace the name. In a `fresh`, just loaded module it is the library's own, even if we replaced it before."""
        *owners, name = self.path.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        original = getattr(owner, name, None)
        if owner is None or original is None:
            return  # another version of the library, without this name
        if self.wrapper is not None and (original is self.wrapper or not fresh):
            return  # ours is on, perhaps below another wrapper
        self.owner, self.kept = owner, vars(owner).get(name, original)
        self.wrapper = functools.wraps(original)(self.make_wrapper(original))
        setattr(owner, name, self.wrapper)

    def keep_for(self, future: Future[Any]) -> None:
        """Keep the hook on until the future is done, even if take_off() is called."""
        self.needed.append(future)
        future.add_done_callback(self.needed.remove)

    def take_off(self) -> None:
        """Restore the original, unless ours was wrapped since or is still needed: then it stays, and only passes calls on."""
        if any(not future.done() for future in tuple(self.needed)):
            return
        name = self.path.rpartition(".")[2]
        if self.wrapper is not None and getattr(self.owner, name, None) is self.wrapper:
            setattr(self.owner, name, self.kept)
        self.owner = self.kept = self.wrapper = None


class ImportHook:
    """An import finder that calls `loaded` with the name when one of certain libraries is imported."""

    def __init__(self, names: frozenset[str], loaded: Callable[[str], None]) -> None:
        self.names, self.loaded = names, loaded

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name not in self.names:
            return None
        finders = sys.meta_path
        behind = finders[finders.index(self) + 1 :] if self in finders else []  # the finders before us were already asked
        for finder in behind:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader, self.loaded)  # type: ignore[assignment]  # without importlib.abc, which is slow
                return spec
        return None


class _Loader:
    """A wrapper around a loader that calls `loaded` when it is done."""

    def __init__(self, inner: Any, loaded: Callable[[str], None]) -> None:
        self.inner, self.loaded = inner, loaded

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.inner.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        self.loaded(module.__name__)
