"""The journal: the append-only file of one process of one run, and the source of truth that everything else reads."""

from .format import Kind
from .reader import Journal
from .walker import Record
from .writer import Writer

__all__ = ["Journal", "Kind", "Record", "Writer"]
