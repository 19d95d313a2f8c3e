"""Lightning's CSVLogger: `version_N/metrics.csv`, one sparse row per log call, and `hparams.yaml` beside it.

The file has no times, so a run ends when its file was last written and begins when its folder was made.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from ..journal.files import open_regular
from .events import Event, Facts, Found, Start, Values
from .reading import UNREADABLE, Account, Gather, number_in, read_document, read_yaml, reread, step_of, text_lines

METRICS, HPARAMS = "metrics.csv", "hparams.yaml"
_VERSION = re.compile(r"version_\d+")


class CSVLoggerImporter:
    """Folders of Lightning's CSVLogger."""

    kind = "csv_logger"
    title = "Lightning CSVLogger"

    def find(self, path: Path) -> Iterator[Found]:
        folder = path.parent if path.name == METRICS else path
        if not is_ours(folder / METRICS):
            return
        folder = folder.absolute()
        version = bool(_VERSION.fullmatch(folder.name))
        above = folder.parent.name if version else folder.name
        yield Found(
            kind=self.kind, id=str(folder), paths=(folder / METRICS, folder / HPARAMS), project=above or "imported",
            name=f"{above}/{folder.name}" if version else folder.name,
        )  # fmt: skip

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        yield from reread(lambda: self._events(*found.paths), position)

    def _events(self, metrics: Path, hparams: Path) -> Iterator[Event]:
        left, gather = Account(), Gather()
        times = [file.stat().st_mtime_ns for file in (metrics, hparams) if file.is_file()]
        yield Start(time_ns=min(times, default=None))
        if hparams.is_file():
            yield from _config(hparams, left)
        try:
            with open_regular(metrics) as file:
                yield from _rows(file, gather, left)
        except (*UNREADABLE, csv.Error) as error:
            left.leave("file", f"it cannot be read further ({error})", metrics)
        yield from gather.flush()
        yield from left.events()


def is_ours(file: Path) -> bool:
    """Return whether a file is the table of a CSVLogger: by its name, its step column, and its folder."""
    if file.name != METRICS or not (_VERSION.fullmatch(file.parent.name) or (file.parent / HPARAMS).is_file()):
        return False
    try:
        with open_regular(file) as opened:
            head = opened.readline(1 << 20).decode("utf-8", "replace")
        return "step" in next(csv.reader([head]), [])
    except (OSError, csv.Error):
        return False


def _config(hparams: Path, left: Account) -> Iterator[Facts]:
    try:
        config = read_yaml(read_document(hparams))
    except UNREADABLE as error:
        left.leave("config", f"{HPARAMS} was not read: {error}", hparams)
        return
    if isinstance(config, dict) and config:
        yield Facts(config=config)


def _rows(file: IO[bytes], gather: Gather, left: Account) -> Iterator[Event]:
    """Yield the values of each row under the names of the first; empty cells are values that were not logged."""
    rows = csv.reader(line.decode("utf-8", "replace") for line in text_lines(file, left, "row"))
    names = next(rows, [])
    if "step" not in names:
        return
    at = names.index("step")
    for row in rows:
        step = step_of(row[at]) if len(row) == len(names) else None
        if step is None:
            left.leave("row", "it has other columns than the first one, or no step", ",".join(row))
            continue
        cells = {name: cell for name, cell in zip(names, row, strict=True) if cell != "" and name != "step"}
        numbers = {name: found for name, cell in cells.items() if (found := number_in(cell)) is not None}
        yield from gather.add(step, None, numbers)
        if len(numbers) < len(cells):
            texts = {name: cell for name, cell in cells.items() if name not in numbers}
            yield Values(step=step, time_ns=None, values=texts)
