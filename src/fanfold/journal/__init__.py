"""The journal: the append-only file of one process of one run, and the source of truth that everything else reads."""

from typing import TYPE_CHECKING, Any

from .format import Kind
from .reader import Journal
from .walker import Record

if TYPE_CHECKING:
    from .writer import Writer

__all__ = ["Journal", "Kind", "Record", "Writer"]


def __getattr__(name: str) -> Any:
    if name != "Writer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .writer import Writer  # a reader starts sooner without it

    return Writer
