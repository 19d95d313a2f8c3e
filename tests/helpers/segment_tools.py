"""Runs with merged segments, and their content."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fanfold.store import merge, segments
from fanfold.store.query import LocalStore
from store_data import Call, write_run


@pytest.fixture
def small(monkeypatch):
    """Shrink segments to a few kilobytes, so that a short journal has many."""
    monkeypatch.setattr(merge, "RANGE_BYTES", 4096)
    monkeypatch.setattr(segments, "WORTH_BYTES", 256)


@pytest.fixture
def cache():
    return Path(os.environ["FANFOLD_CACHE_DIR"])


def made(root, count=400, **options):
    values = np.random.default_rng(1).normal(size=count).astype(np.float32).tolist()
    return write_run(root, [Call(0, 0, i, 10**7, {"a": values[i], "n": i, "pi": 3.14159 * i}) for i in range(count)], **options)


def read(root):
    """Read everything with a fresh reader."""
    run = LocalStore(root).run("p", "r")
    return {
        key: [column.tolist() for column in run.series(key).__dict__.values() if hasattr(column, "tolist")]
        for key in list(run.keys())
    }


def merge_all(folder):
    return [one for path in (folder / "journal").glob("*.ffj") for one in merge.merge(path)]


def files(cache):
    return sorted((cache / "segments").glob("*/*"), key=lambda path: int(path.stem.partition("-")[0]))
