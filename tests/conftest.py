"""Fixtures shared by the tests: a place for runs, a cache of its own, and a clean environment."""

import os

import pytest

from fanfold.errors import notices


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path_factory):
    for name in list(os.environ):
        if name.startswith("FANFOLD_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    notices.counts.clear()


@pytest.fixture
def runs_dir(tmp_path, monkeypatch):
    path = tmp_path / "runs"
    monkeypatch.setenv("FANFOLD_DIR", str(path))
    return path
