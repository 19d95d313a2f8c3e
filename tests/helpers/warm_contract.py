"""The tracker contract in programs that find the slowest libraries imported; the relays they start are plain Pythons."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import warm_python
from fanfold.testing import TIMEOUT, TrackerContract


class WarmContract(TrackerContract):
    def script(self, folder: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
        settings = {"FANFOLD_CACHE_DIR": str(folder / "cache"), "HOME": str(folder / "home"), **self.environment(folder), **env}
        (folder / "home").mkdir(exist_ok=True)
        return warm_python.run(
            [sys.executable, "-c", textwrap.dedent(script)], libraries="trackers", env={**os.environ, **settings}, cwd=folder,
            capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
