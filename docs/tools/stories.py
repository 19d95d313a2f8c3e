"""Play a tutorial as a reader does: save its files, type its commands, paste its other Python, in page order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

BLOCK = re.compile(r"^```(python|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
FOUND_SOMETHING = 3  # the exit code of `fanfold diagnose` when it reports something


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of a reader who works in a folder."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {
        "OMP_NUM_THREADS": "1",
        "FANFOLD_SYSTEM": "0",
        "FANFOLD_DIR": str(folder / ".fanfold"),
        "FANFOLD_CACHE_DIR": str(folder / "cache"),
    }
    return {**os.environ, "PATH": path, **ours}


def run(command: list[str], folder: Path, *, allowed: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, check=False, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=200)
    if done.returncode not in allowed or "Traceback" in done.stderr:
        raise RuntimeError(f"exit code {done.returncode} of:\n{command[-1]}\n{done.stdout}\n{done.stderr}")
    return done.stdout


def play(page: Path, folder: Path) -> str:
    """Do everything a page says, and return what was printed."""
    printed = []
    for language, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        file = re.match(r"# (\w+\.py)\n", code)
        if language == "python" and file:
            (folder / file[1]).write_text(code, encoding="utf-8")
        elif language == "python":
            printed.append(run([sys.executable, "-c", code], folder))
        else:
            printed += [typed(line, folder) for line in code.splitlines() if not line.startswith("pip install")]
    return "\n".join(printed)


def typed(line: str, folder: Path) -> str:
    return run(["bash", "-c", line], folder, allowed=(0, FOUND_SOMETHING) if "diagnose" in line else (0,))
