"""Skip marks for tests that need special conditions."""

from __future__ import annotations

import os

import pytest

needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting needs root")
