"""label(): name what a stretch of code works on (a model, a request), and the operator profile counts it apart.

The name travels with torch's own thread-local state, into asynchronous forks and backward.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from ..errors import notices
from .native import library as native

MAX_LABELS = 254  # as many as the native table holds beside "no label" and "other"
_here = threading.local()
_ids: dict[str, int] = {"": 0}


class Label:
    """One `with` block's names, on top of those around it."""

    __slots__ = ("_before", "_names")

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names

    def __enter__(self) -> Label:
        self._before: dict[str, Any] = getattr(_here, "names", {})
        _put({**self._before, **self._names})
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        _put(self._before)


def label(**names: Any) -> Label:
    """Name what a `with` block works on, as in model="encoder", request="42"; inner names add to outer ones."""
    return Label(names)


def _put(names: dict[str, Any]) -> None:
    _here.names = names
    library = native.current()
    if library is None:  # nobody profiles
        return
    text = ",".join(f"{name}={value}" for name, value in names.items())
    found = _ids.get(text)
    library.ff_label_set(_intern(library, text) if found is None else found)


def _intern(library: Any, text: str) -> int:
    id: int = library.ff_label_id(text.encode("utf-8", "replace")[:127])
    if len(_ids) <= MAX_LABELS:
        _ids[text] = id
    elif id > MAX_LABELS:
        notices.once(
            "labels",
            f"this process has used more than {MAX_LABELS} different labels. Operators of further ones are counted together as "
            "'(other labels)'. Label what has few values (a model), not each request.",
        )
    return id
