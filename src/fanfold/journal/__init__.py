"""The journal: the append-only file of one process of one run, and the source of truth that everything else reads."""

from typing import TYPE_CHECKING, Any

from .format import Kind

if TYPE_CHECKING:
    from .reader import Journal
    from .walker import Record
    from .writer import Writer

__all__ = ["Journal", "Kind", "Record", "Writer"]


def __getattr__(name: str) -> Any:
    """Import a name when it is used: a reader starts sooner without the writer, and a writer without the readers."""
    if name == "Journal":
        from .reader import Journal

        return Journal
    if name == "Record":
        from .walker import Record

        return Record
    if name == "Writer":
        from .writer import Writer

        return Writer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
