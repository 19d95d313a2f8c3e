"""The forwarder that init() starts: a separate process that outlives training and exits once everything is at the gateway."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

from ..journal import directory, origin
from ..journal.files import open_to_write
from ..journal.packed import raw_size
from ..process import digest, module_command, same_modules
from .destination import Upstream
from .forward_note import Note, home

IDLE_SECONDS = 10.0
FINISH_SECONDS = 10.0
LOOK_SECONDS = 0.05
MAX_LOG = 8 << 20


class Forwarding:
    """Handle on a forwarder process: wakes it, and waits until this rank's journals are at the gateway."""

    def __init__(self, root: Path, gateway: Upstream) -> None:
        self.url = gateway.url
        self._root = root
        self._process = self._start(gateway)

    def _start(self, gateway: Upstream) -> subprocess.Popen[bytes]:
        folder = home(self._root)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        log = folder / f"{digest(self.url)}.log"
        with contextlib.suppress(OSError):
            if log.stat().st_size > MAX_LOG:
                log.unlink()
        with os.fdopen(open_to_write(log, os.O_APPEND), "ab") as output:
            return subprocess.Popen(
                module_command("fanfold", "forward", "--dir", str(self._root), "--idle", str(IDLE_SECONDS), "--started"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **origin.environment(), **same_modules(), **_variables(gateway)},
            )

    def wait(self, run: Path, rank: int, timeout: float) -> list[str]:
        """Wait until this rank's journals are shipped; return a message if they are not in time."""
        self._hurry()
        deadline = time.monotonic() + min(timeout, FINISH_SECONDS)
        while self._left(run, rank):
            if time.monotonic() >= deadline:
                again = f"fanfold server forward --once --to {self.url}"
                return [
                    f"{self.url} does not have everything yet. The forwarder continues; if it cannot, deliver the rest: {again}"
                ]
            time.sleep(LOOK_SECONDS)
        return []

    def _hurry(self) -> None:
        """Wake the forwarder by closing its stdin."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.poll()

    def _left(self, run: Path, rank: int) -> bool:
        note = Note(run, self.url)
        if note.deleted:
            return False
        own = [file for file in directory.journal_files(run) if file.name.startswith(f"{rank}-")]
        try:
            return any(not note.is_over(file) and note.offsets.get(file.stem, -1) < raw_size(file) for file in own)
        except OSError:  # just deleted: nothing to wait for
            return False


def _variables(gateway: Upstream) -> dict[str, str]:
    """Return the gateway's address, token and CA as environment variables for a child process."""
    given = {"FANFOLD_SERVER": gateway.url, "FANFOLD_SERVER_TOKEN": gateway.token, "FANFOLD_SERVER_CA": gateway.ca}
    return {name: str(value) for name, value in given.items() if value}
