"""Provenance: model files that name their run. `stamp` writes it into the file, `inspect` reads it without loading weights."""

from .read import inspect
from .write import stamp

__all__ = ["inspect", "stamp"]
