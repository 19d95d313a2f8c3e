"""A forwarder's note beside a run: how far each journal was shipped. It only saves questions; the gateway has the truth."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from ..journal.files import is_folder, read_text, replace_text
from ..journal.packed import raw_size
from ..process import digest

FOLDER = "forward"  # in a run: its notes
HOME = ".forward"  # beside the projects: locks and logs


class Note:
    """Offsets by journal. `over` are those that ended, with the size they had."""

    def __init__(self, run: Path, url: str) -> None:
        self.path = run / FOLDER / f"{digest(url)}.json"
        self.url = url
        self.offsets: dict[str, int] = {}
        self.over: dict[str, int] = {}
        self.whole = False  # every journal that was there is over, and every blob is at the gateway
        self.deleted = False  # the gateway said that it deleted this run
        self._saved = ""
        self._load()

    def _load(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            if not is_folder(self.path.parent):
                return
            known = json.loads(read_text(self.path))
            self.offsets = {str(name): int(offset) for name, offset in known["offsets"].items()}
            self.over = {str(name): int(size) for name, size in known["over"].items()}
            self.whole = known["whole"] is True
            self.deleted = known.get("deleted") is True

    def is_over(self, journal: Path) -> bool:
        """Tell whether a journal was shipped to its end, and is as it was then."""
        try:
            return self.over.get(journal.stem) == raw_size(journal)
        except OSError:
            return False

    def forget(self) -> None:
        """Drop the note: everything is to be asked anew."""
        if is_folder(self.path.parent):
            self.path.unlink(missing_ok=True)
        self.offsets, self.over, self.whole, self.deleted, self._saved = {}, {}, False, False, ""

    def save(self) -> None:
        """Replace the file if anything changed; that it cannot be written costs a few questions, no more."""
        text = json.dumps(
            {"server": self.url, "whole": self.whole, "deleted": self.deleted, "offsets": self.offsets, "over": self.over}
        )
        if text == self._saved:
            return
        with contextlib.suppress(OSError):
            self.path.parent.mkdir(exist_ok=True, mode=0o700)
            if is_folder(self.path.parent):  # and not a link to one of somebody's
                replace_text(self.path, text)
                self._saved = text


def behind(run: Path, journal: Path) -> list[str]:
    """Return the gateways a run was ever forwarded to that do not have all of a journal, as far as is noted."""
    found = []
    for path in sorted((run / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note = Note(run, str(json.loads(read_text(path))["server"]))
            if not note.is_over(journal):
                found.append(note.url)
    return found
