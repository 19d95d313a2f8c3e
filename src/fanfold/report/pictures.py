"""The runs' last pictures, embedded in the file: within limits, and only formats that a browser shows and never executes."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..drawing import Markup, tag
from ..drawing.markup import lone
from ..errors import JournalError
from ..store import StoredRun
from ..store.run import MediaPoint

PICTURES = ("image", "figure", "video")
ONE, ALL, KEYS, EACH = 2 << 20, 24 << 20, 24, 16  # bytes of one picture and of all; keys; pictures per key, run and step
# The format by its first bytes, because a run's claim about a file is not trusted.
_MAGIC = ((b"\x89PNG\r\n\x1a\n", "image/png"), (b"\xff\xd8\xff", "image/jpeg"), (b"GIF8", "image/gif"), (b"BM", "image/bmp"))


@dataclass
class Budget:
    """The space left for pictures in the file, and what did not fit."""

    room: int = ALL
    count: int = 0
    left_out: list[str] = field(default_factory=list)
    shown: Counter[str] = field(default_factory=Counter)  # tables, histograms, texts

    def take(self, point: MediaPoint) -> str | None:
        """Return a picture as a data URL, or None after recording why it is left out."""
        said = f"{point.key} at step {point.step}"
        try:
            data = point.run.blob(str(point.entry.get("blob")))
        except (OSError, JournalError):
            self.left_out.append(f"{said}: its file is missing or damaged")
            return None
        kind = _kind(data)
        if kind is None or len(data) > min(ONE, self.room):
            why = (
                f"a {point.kind} of this kind cannot be shown in a report"
                if kind is None
                else f"{len(data) / 1e6:.1f} MB, too large"
            )
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
    """Yield, by key, each run's pictures (images, drawn figures, GIFs) of the last step that has any."""
    keys = list(dict.fromkeys(key for run in runs for key in run.keys("media") if last(run, key)))
    for key in keys[:KEYS]:
        figures = [
            one for run in runs for point in _some(last(run, key), budget) if (one := _figure(run, point, budget)) is not None
        ]
        if figures:
            yield tag("h3", key)
            yield tag("div", *figures, class_="pictures")
    budget.left_out += [f"{key}: a report shows pictures of {KEYS} keys" for key in keys[KEYS:]]


def last(run: StoredRun, key: str) -> list[MediaPoint]:
    """Return the pictures of a key at the last step that has one."""
    points = [point for point in run.media(key) if point.kind in PICTURES]
    return [point for point in points if point.step == points[-1].step] if points else []


def _some(points: list[MediaPoint], budget: Budget) -> list[MediaPoint]:
    if len(points) > EACH:
        budget.left_out.append(f"{points[0].key} at step {points[0].step}: {len(points) - EACH} of {len(points)} pictures")
    return points[:EACH]


def _figure(run: StoredRun, point: MediaPoint, budget: Budget) -> Markup | None:
    address = budget.take(point)
    if address is None:
        return None
    caption = str(point.entry.get("caption") or "")
    said = f"{run.name}, step {point.step}" + (f", rank {point.rank}" if len(run.ranks) > 1 else "")
    image = lone("img", src=address, alt=caption or f"{point.key} of {said}")
    return tag("figure", image, tag("figcaption", caption + " " if caption else "", tag("span", said, class_="dim")))
