"""Provenance: a model file knows its run. `stamp` writes it into the file, `inspect` reads it without loading a weight."""

from .read import inspect
from .write import stamp

__all__ = ["inspect", "stamp"]
