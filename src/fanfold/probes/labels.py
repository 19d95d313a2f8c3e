"""label(): name what a stretch of code works on (a model, a request), and the operator profile counts it apart.

The name travels with torch's own thread-local state, into asynchronous forks and backward.
"""

from __future__ import annotations

import threading
from itertools import pairwise
from types import TracebackType
from typing import Any

from ..errors import guard, notices
from .native import library as native

MAX_LABELS = 254  # as many as the native table holds beside "no label" and "other"
_here = threading.local()
_ids: dict[str, int] = {"": 0}
_names: dict[int, dict[str, str]] = {}


class Label:
    """The names of a `with` block, on top of those around it; may be entered again, also inside itself."""

    __slots__ = ("_entered", "_names")

    def __init__(self, names: dict[str, str]) -> None:
        self._names = names
        self._entered: list[list[Any]] = []

    def __enter__(self) -> Label:
        open = _open()
        open.append([self, {**open[-1][1], **self._names}, 0])
        self._entered.append(open)
        _put(open[-1])
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        here = _open()
        if self._entered[-1] is here and here[-1][0] is self:
            self._entered.pop()
            here.pop()
        else:
            self._leave(here)
        library = native.current()
        if library is not None:
            library.ff_label_set(here[-1][2])

    def _leave(self, here: list[Any]) -> None:
        """End a block that is not the innermost (generators and coroutines do not nest), or that began on another thread."""
        at = next((at for at in reversed(range(len(self._entered))) if self._entered[at] is here), 0)
        open = self._entered.pop(at)
        del open[next(at for at in reversed(range(len(open))) if open[at][0] is self)]
        if open is not here:
            open[0][0] = self  # that thread still says so
            return
        for outer, inner in pairwise(open):
            inner[1] = {**outer[1], **inner[0]._names}  # noqa: SLF001 - ours
            _put(inner)


def label(**names: Any) -> Label:
    """Name what a `with` block works on, as in model="encoder", request="42"; inner names add to outer ones."""
    if all(type(value) is str for value in names.values()):
        return Label(names)
    texts: dict[str, str] = {}
    with guard("write a label"):  # a value that has no text must not stop training
        texts = {name: str(value) for name, value in names.items()}
    return Label(texts)


def renew() -> None:
    """Tell a profile that starts inside labelled blocks of this thread."""
    for entry in _open()[1:]:
        _put(entry)


def _open() -> list[Any]:
    """Return this thread's labels, the innermost last: each with all names as of there, and its number."""
    found: list[Any] | None = getattr(_here, "open", None)
    if found is None:
        found = _here.open = [[None, {}, 0]]
    if len(found) == 1:  # backward may have brought one along from the thread that called it
        library = native.current()
        here = 0 if library is None or found[0][0] is not None else library.ff_label_now()
        found[0] = [None, _names.get(here, {}), here]
    return found


def _put(entry: list[Any]) -> None:
    library = native.current()
    if library is None:  # nobody profiles
        return
    text = ",".join([f"{name}={value}" for name, value in entry[1].items()])
    found = _ids.get(text)
    entry[2] = _intern(library, text) if found is None else found
    if found is None:
        _names.setdefault(entry[2], entry[1])
    library.ff_label_set(entry[2])


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
