"""The runs' last pictures, inside the file: within bounds, and only kinds that a browser shows and never runs."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..drawing import Markup, tag
from ..drawing.markup import lone
from ..errors import JournalError
from ..journal import blobs
from ..store import StoredRun
from ..store.run import MediaPoint

ONE, ALL, KEYS, EACH = 2 << 20, 24 << 20, 24, 8  # bytes of one and of all; keys; pictures of one key, run and step
# kind by its first bytes: what a run says of a file is not believed
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"), (b"BM", "image/bmp"))


@dataclass
class Budget:
    """How much of the file's room is left for pictures, and what did not fit."""

    room: int = ALL
    count: int = 0
    left_out: list[str] = field(default_factory=list)

    def take(self, point: MediaPoint) -> str | None:
        """Return a picture as an address that holds it, or None and remember why not."""
        said = f"{point.key} at step {point.step}"
        try:
            data = blobs.get(point.run, str(point.entry.get("blob")))
        except (OSError, JournalError):
            self.left_out.append(f"{said}: its file is missing or damaged")
            return None
        kind = _kind(data)
        if kind is None or len(data) > min(ONE, self.room):
            why = "its kind cannot be shown" if kind is None else f"{len(data) / 1e6:.1f} MB do not fit"
            self.left_out.append(f"{said}: {why}")
            return None
        self.room -= len(data)
        self.count += 1
        return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _kind(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC if data.startswith(magic)), None)


def pictures(runs: Sequence[StoredRun], budget: Budget) -> Iterator[Markup]:
    """Yield, by key, each run's pictures of the last step that has any; and what was left out."""
    keys = list(dict.fromkeys(key for run in runs for key in run.keys("media")))
    shown = 0
    for key in keys:
        figures = [one for run in runs for point in last(run, key) if (one := _figure(run, point, budget)) is not None]
        if figures and shown < KEYS:
            shown += 1
            yield tag("h3", key)
            yield tag("div", *figures, class_="pictures")
    if budget.left_out:
        yield tag("p", f"Left out: {'; '.join(budget.left_out[:20])}.", class_="dim")


def last(run: StoredRun, key: str) -> list[MediaPoint]:
    """Return the pictures under a key at the last step that has one."""
    points = [point for point in run.media(key) if point.kind == "image"]
    return [point for point in points if point.step == points[-1].step][:EACH] if points else []


def _figure(run: StoredRun, point: MediaPoint, budget: Budget) -> Markup | None:
    address = budget.take(point)
    if address is None:
        return None
    caption = str(point.entry.get("caption") or "")
    said = f"{run.name}, step {point.step}" + (f", rank {point.rank}" if len(run.ranks) > 1 else "")
    image = lone("img", src=address, alt=caption or f"{point.key} of {said}")
    return tag("figure", image, tag("figcaption", caption + " " if caption else "", tag("span", said, class_="dim")))
