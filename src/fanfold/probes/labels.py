"""label(): name what a block of code works on (a model, a request), so that the operator profile counts it separately.

The name travels with torch's own thread-local state, into asynchronous forks and backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType
from typing import Any

from ..errors import guard, notices
from .native import library as native

MAX_LABELS = 254  # what the native table holds besides "no label" and "other"
NOT_YET = 2**32 - 1  # a number that no label has
_here = threading.local()
_ids: dict[str, int] = {}
_names: dict[int, dict[str, str]] = {}
_follower: Callable[[str], object] | None = None


class LabelledBlock:
    """An open `with` block of a thread: its label, all names in effect there, and their number in the native table.

    Each profile has its own label numbers, and the table refuses those of an earlier one.
    """

    __slots__ = ("label", "names", "number")

    def __init__(self, label: Label | None, names: dict[str, str], number: int = NOT_YET) -> None:
        self.label, self.names, self.number = label, names, number


class Label:
    """The names of a `with` block, added to those of enclosing blocks; reentrant, also inside itself."""

    __slots__ = ("_entered", "names")

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        self._entered: list[list[LabelledBlock]] = []  # for each entry, the list of its thread's blocks

    def __enter__(self) -> Label:
        open = _open()
        open.append(LabelledBlock(self, {**open[-1].names, **self.names}))
        self._entered.append(open)
        _put(open[-1])
        if _follower is not None:
            _follower(_text(open[-1]))
        return self

    def __exit__(self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        here = _open()
        if self._entered[-1] is here and here[-1].label is self:
            self._entered.pop()
            here.pop()
        else:
            self._leave(here)
        library = native.current()
        if library is not None and not library.ff_label_set(here[-1].number):
            _put(here[-1])
        if _follower is not None:
            _follower(_text(here[-1]))

    def _leave(self, here: list[LabelledBlock]) -> None:
        """Exit a block that is not the innermost (generators and coroutines do not nest), or was entered on another thread."""
        at = next((at for at in reversed(range(len(self._entered))) if self._entered[at] is here), 0)
        open = self._entered.pop(at)
        del open[next(at for at in reversed(range(len(open))) if open[at].label is self)]
        if open is not here:
            open[0].label = self  # torch's state on that thread keeps the label until its next one
            return
        for outer, inner in pairwise(open):
            inner.names = {**outer.names, **(inner.label.names if inner.label else {})}
            _put(inner)


def label(**names: Any) -> Label:
    """Name what a `with` block works on, as in model="encoder", request="42"; inner names add to outer ones.

    Args:
        names: Names and their values; values become texts.

    Returns:
        A context manager.

    Example:
        ```python
        import torch

        import fanfold

        fanfold.init("llm", ops=True)
        with fanfold.label(model="encoder"):
            torch.nn.Linear(4, 4)(torch.randn(2, 4))
        ```
    """
    if all(type(value) is str for value in names.values()):
        return Label(names)
    texts: dict[str, str] = {}
    with guard("write a label"):  # a value whose str() fails must not stop training
        texts = {name: str(value) for name, value in names.items()}
    return Label(texts)


def renew() -> None:
    """Forget the numbers of an earlier profile, and set this thread's open label in the new one."""
    _ids.clear()
    _names.clear()
    if len(open := _open()) > 1:
        _put(open[-1])  # enclosing blocks follow when they are the innermost again


def _open() -> list[LabelledBlock]:
    """Return this thread's blocks, the innermost last; the first stands for the state before any of them."""
    found: list[LabelledBlock] | None = getattr(_here, "open", None)
    if found is None:
        found = _here.open = [LabelledBlock(None, {}, 0)]
    if len(found) == 1:  # backward may have set the label of the thread that called it
        library = native.current()
        number = 0 if library is None or found[0].label is not None else library.ff_label_now()
        found[0] = LabelledBlock(None, _names.get(number, {}), number)
    return found


def _text(block: LabelledBlock) -> str:
    return ",".join([f"{name}={value}" for name, value in block.names.items()])


def follow(follower: Callable[[str], object] | None) -> None:
    """Call `follower` with the text of each label that begins, and with the one around it (or "") when it ends."""
    global _follower  # noqa: PLW0603 - one at a time: torch's allocator
    _follower = follower


def _put(block: LabelledBlock) -> None:
    library = native.current()
    if library is None:  # no profile is running
        return
    text = _text(block)
    block.number = _ids.get(text, NOT_YET)
    if not library.ff_label_set(block.number):
        block.number = _intern(library, text)
        _names.setdefault(block.number, block.names)
        library.ff_label_set(block.number)


def _intern(library: Any, text: str) -> int:
    whole = text.replace("\0", "\\0")  # texts in the table end at the first null byte
    id: int = library.ff_label_id(whole.encode("utf-8", "replace")[:127])
    if text in _ids or len(_ids) < MAX_LABELS:
        _ids[text] = id
    elif id % (MAX_LABELS + 2) > MAX_LABELS:
        notices.once(
            "labels",
            f"this process has used more than {MAX_LABELS} different labels in a run. Operators of further ones are counted "
            "together as '(other labels)'. Label what has few values (a model), not each request.",
        )
    return id
