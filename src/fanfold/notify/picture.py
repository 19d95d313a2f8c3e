"""A small picture of a metric, for services that take one. Needs Pillow, which comes with fanfold[notify]."""

from __future__ import annotations

import io
import math
from typing import Any

from ..store.run import StoredRun

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 30, 30  # margins
POINTS = 600


def draw(run: StoredRun, key: str, mark: int | None = None) -> bytes | None:
    """Return a metric's curve as PNG, with a line at the step `mark`; None without Pillow or without points."""
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        return None
    found = run.curve(key, buckets=POINTS, x="step")
    if found is None or not len(found.x):
        return None
    pairs = [(float(x), float(y)) for x, y in zip(found.x, found.last, strict=True) if math.isfinite(y)]
    if not pairs:
        return None
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    pen: Any = ImageDraw.Draw(image)
    (low_x, high_x), (low, high) = ((min(axis), max(axis)) for axis in zip(*pairs, strict=True))
    high_x, high = high_x + (high_x == low_x), high + (high == low)

    def place(x: float, y: float) -> tuple[float, float]:
        right = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        return right, HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    for part in range(5):
        value = low + (high - low) * part / 4
        down = place(low_x, value)[1]
        pen.line([(LEFT, down), (WIDTH - RIGHT, down)], fill="#dddddd")
        pen.text((6, down - 6), f"{value:.4g}", fill="#555555")
    for x in (low_x, high_x):
        pen.text((min(place(x, low)[0], WIDTH - 60), HEIGHT - BOTTOM + 8), f"{x:,.0f}", fill="#555555")
    if mark is not None and low_x <= mark <= high_x:
        pen.line([place(mark, low), place(mark, high)], fill="#d62728")
    pen.line(
        [place(*pair) for pair in pairs] if len(pairs) > 1 else [place(*pairs[0]), place(*pairs[0])], fill="#1f5fbf", width=2
    )
    pen.text((LEFT, 8), _plain(f"{key}  ·  {run.name}"), fill="#222222")
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def _plain(text: str) -> str:
    """Return text that Pillow's built-in font can draw."""
    return text[:100].encode("latin-1", "replace").decode("latin-1")
