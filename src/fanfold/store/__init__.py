"""The store, the reading side: runs, series, folds, tables, and the catalogue that lists a thousand runs quickly."""

from .query import find_unfinished, open_run
from .run import Series, StoredRun

__all__ = ["Series", "StoredRun", "find_unfinished", "open_run"]
