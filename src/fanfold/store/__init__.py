"""The store: the reading side. Runs, series, folds, tables, and the catalogue that makes a thousand runs fast."""

from .query import find_unfinished, open_run
from .run import Series, StoredRun

__all__ = ["Series", "StoredRun", "find_unfinished", "open_run"]
