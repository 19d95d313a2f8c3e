"""Conversion of plain objects to media, for values passed to log() without a media class."""

from __future__ import annotations

from typing import Any

from fanfold.media.arrays import is_array, is_numeric
from fanfold.media.base import Media
from fanfold.media.dataframes import is_frame
from fanfold.media.figure import Figure, is_matplotlib, is_plotly
from fanfold.media.histogram import Histogram, all_numbers
from fanfold.media.image import Image, is_pil
from fanfold.media.table import Table


def coerce(value: Any) -> Media | list[Media] | None:
    """Return the media for `value`, or None; imports no library the user has not imported."""
    if isinstance(value, (list, tuple)):
        return _from_list(value)
    return picture(value) or _from_data(value)


def picture(value: Any) -> Media | None:
    """Return a snapshot of media, or media for PIL images and plots; None for anything else."""
    if isinstance(value, Media):
        return value.snapshot()
    if is_pil(value):
        return Image(value)
    return Figure(value) if is_matplotlib(value) or is_plotly(value) else None


def _from_data(value: Any) -> Media | None:
    if is_frame(value):
        return Table(dataframe=value)
    if is_array(value) and is_numeric(value) and _size(value) > 1:
        return Histogram(value)
    return None


def _size(value: Any) -> int:
    size = 1
    for length in value.shape:
        size *= int(length)
    return size


def _from_list(values: list[Any] | tuple[Any, ...]) -> Media | list[Media] | None:
    if not values:
        return None
    if all_numbers(values):
        return Histogram(values)
    if not all(isinstance(value, Media) or is_pil(value) for value in values):
        return None
    return [media for media in map(picture, values) if media is not None]
