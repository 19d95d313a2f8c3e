"""Paths in the repository, and of the browser."""

from __future__ import annotations

import shutil
from pathlib import Path

HELPERS = Path(__file__).parent
TESTS = HELPERS.parent
ROOT = TESTS.parent
SRC = ROOT / "src"
DOCS = ROOT / "docs"
DATA = TESTS / "data"
GOLDEN = TESTS / "golden"

# The first is Chromium without windows, as Playwright would download it: a page costs a third of the CPU time.
_BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, _BROWSERS)), None)
