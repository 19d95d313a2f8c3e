"""A forwarder's note in a run directory: how much of each journal was shipped. A cache; the gateway has the truth."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

from ..atomic import replace_text
from ..journal.directory import encode_name
from ..journal.files import is_folder, read_text
from ..journal.packed import raw_size
from ..process import digest

FOLDER = "forward"  # in a run: its notes
HOME = ".forward"  # beside the projects: locks and logs


def home(root: Path) -> Path:
    """Return this user's folder of locks and logs: another one's forwarder cannot read what is private to us."""
    folder = root / HOME
    with contextlib.suppress(FileNotFoundError):
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return root / f"{HOME}-{os.geteuid()}"
    return folder


class Note:
    """Offsets by journal. `over` holds the journals that ended, with their final size."""

    def __init__(self, run: Path, url: str) -> None:
        self.path = run / FOLDER / f"{digest(url)}.json"
        self.url = url
        self.offsets: dict[str, int] = {}
        self.over: dict[str, int] = {}
        self.whole = False  # every known journal is over, and every blob is at the gateway
        self.deleted = False  # the gateway reported this run as deleted
        self.project = ""  # the project it was shipped to
        self._saved = ""
        self._load()
        if self.project and encode_name(self.project) != run.parent.name:  # moved: the gateway does not have it there yet
            self.forget()

    def _load(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            if not is_folder(self.path.parent):
                return
            known = json.loads(read_text(self.path))
            self.offsets = {str(name): int(offset) for name, offset in known["offsets"].items()}
            self.over = {str(name): int(size) for name, size in known["over"].items()}
            self.whole = known["whole"] is True
            self.deleted = known.get("deleted") is True
            self.project = str(known.get("project") or "")

    def is_over(self, journal: Path) -> bool:
        """Return whether a journal was shipped to its end and has not grown since."""
        try:
            return self.over.get(journal.stem) == raw_size(journal)
        except OSError:
            return False

    def forget(self) -> None:
        """Delete the note: the gateway is asked about everything again."""
        if is_folder(self.path.parent):
            self.path.unlink(missing_ok=True)
        self.offsets, self.over, self.whole, self.deleted, self.project, self._saved = {}, {}, False, False, "", ""

    def save(self) -> None:
        """Replace the file if anything changed. Failing to write it only costs a few extra requests."""
        text = json.dumps(
            {
                "server": self.url,
                "project": self.project,
                "whole": self.whole,
                "deleted": self.deleted,
                "offsets": self.offsets,
                "over": self.over,
            }
        )
        if text == self._saved:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(exist_ok=True, mode=0o700)
            if is_folder(self.path.parent):  # and not a link to someone else's
                replace_text(self.path, text)
                self._saved = text


def behind(run: Path, journal: Path) -> list[str]:
    """Return the gateways this run was forwarded to that, according to the notes, do not have all of a journal."""
    found = []
    for path in sorted((run / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = Note(run, str(json.loads(read_text(path))["server"]))
            if not note.is_over(journal):
                found.append(note.url)
    return found
