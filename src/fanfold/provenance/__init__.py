"""Provenance: model files that name their run. `stamp` writes it into the file, `inspect` reads it without loading weights."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .read import inspect
    from .write import stamp

__all__ = ["inspect", "stamp"]


def __getattr__(name: str) -> Any:
    """Import a name when it is used: each run imports this package for its hooks."""
    if name == "inspect":
        from .read import inspect

        return inspect
    if name == "stamp":
        from .write import stamp

        return stamp
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
