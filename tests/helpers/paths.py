"""Paths in the repository."""

from __future__ import annotations

from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
SRC = ROOT / "src"
DOCS = ROOT / "docs"
DATA = TESTS / "data"
GOLDEN = TESTS / "golden"
