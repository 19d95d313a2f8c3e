"""Fixtures every test may use: a place for runs, and a process that says everything anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fanfold import errors


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Take no setting from the outside, and keep derived data out of the user's cache."""
    for name in [name for name in os.environ if name.startswith("FANFOLD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FANFOLD_CACHE_DIR", str(tmp_path / "cache"))
    errors.notices.counts.clear()


@pytest.fixture
def runs_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder where init() puts its runs, and so do child processes."""
    folder = tmp_path / "runs"
    monkeypatch.setenv("FANFOLD_DIR", str(folder))
    monkeypatch.setenv("FANFOLD_QUIET", "1")
    return folder
