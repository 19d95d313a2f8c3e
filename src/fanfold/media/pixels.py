"""Conversion of arrays to pixels: the meaning of axes, the mapping of numbers to brightness, and PNG without Pillow."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

from fanfold.errors import notices
from fanfold.media.base import refused

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

CHANNELS = (1, 3, 4)
LAYOUTS = ("HW", "HWC", "CHW", "NHW", "NHWC", "NCHW")
SMALL = 16.0  # floats with a maximum above 1 and below this are taken as normalised rather than 0..255
GAP = 2  # black pixels between the pictures of a batch


def layout_of(shape: tuple[int, ...], layout: str | None, what: str, *, channels_first: bool = False) -> str:
    """Return the layout of an array of `shape`, or raise an error if it is ambiguous.

    If both ends could be channels, as in (4, 4, 3), the convention of the array's library decides: `channels_first`.
    """
    if 0 in shape:
        raise refused(ValueError, f"{what} got an empty array of shape {shape}", "Give it at least one pixel")
    found = _given(shape, layout, what) if layout is not None else _guessed(shape, channels_first)
    if found is None:
        raise refused(
            ValueError,
            f"{what} cannot tell the layout of an array of shape {shape}",
            f"Pass layout=, one of {', '.join(LAYOUTS)}",
        )
    return found


def _given(shape: tuple[int, ...], layout: str, what: str) -> str:
    if layout not in LAYOUTS:
        raise refused(ValueError, f"{what} got layout={layout!r}", f"Use one of {', '.join(LAYOUTS)}")
    if len(layout) != len(shape) or ("C" in layout and shape[layout.index("C")] not in CHANNELS):
        raise refused(
            ValueError,
            f"{what} got shape {shape} with layout={layout!r}",
            "Give one axis per letter, and 1, 3 or 4 channels",
        )
    return layout


def _guessed(shape: tuple[int, ...], channels_first: bool) -> str | None:
    if len(shape) == 2:
        return "HW"
    if len(shape) not in (3, 4):
        return None
    first, last = shape[-3] in CHANNELS, shape[-1] in CHANNELS
    if not first and not last:
        return None
    return "N" * (len(shape) - 3) + ("CHW" if first and (channels_first or not last) else "HWC")


def arrange(array: Array, layout: str) -> Array:
    """Move the axes to (…, height, width, channels)."""
    import numpy as np

    if "C" not in layout:
        return array[..., None]
    return np.moveaxis(array, layout.index("C"), -1)


def grid(batch: Array) -> Array:
    """Arrange a batch of pictures in a near-square grid."""
    import numpy as np

    count, height, width, channels = batch.shape
    across = int(np.ceil(np.sqrt(count)))
    down = -(-count // across)
    sheet = np.zeros((down * (height + GAP) - GAP, across * (width + GAP) - GAP, channels), batch.dtype)
    for index, picture in enumerate(batch):
        top, left = index // across * (height + GAP), index % across * (width + GAP)
        sheet[top : top + height, left : left + width] = picture
    return sheet


def to_uint8(array: Array) -> Array:
    """Convert numbers to brightness; see `brightness`."""
    return brightness(array)[0]


def brightness(array: Array) -> tuple[Array, tuple[float, float] | None]:
    """Convert numbers to brightness, and return the original range if they had to be rescaled.

    uint8 stays unchanged. bool: 0 and 255. uint16: 0..65535 scaled down. Other integers: 0..255, clipped. Floats within 0..1:
    times 255. Floats with a negative value, as after normalisation, or with a maximum above 255: rescaled from lowest to highest.
    So are floats whose maximum is above 1 and below SMALL: a picture of 0..255 is rarely that dark, and a normalised one often
    that bright. Other floats: 0..255. NaN is black, infinities are the darkest and the brightest.
    """
    import numpy as np

    if array.dtype == np.uint8:
        return array, None
    if array.dtype == np.bool_:
        lit: Array = np.where(array, np.uint8(255), np.uint8(0))
        return lit, None
    if array.dtype == np.uint16:
        scaled: Array = (array.astype(np.uint32) + 128) // 257
        return scaled.astype(np.uint8), None
    return (_integers(array), None) if array.dtype.kind in "iu" else _floats(array)


def _integers(array: Array) -> Array:
    import numpy as np

    _say_if_clipped(array.min() < 0 or array.max() > 255)
    return np.clip(array, 0, 255).astype(np.uint8)


def _floats(array: Array) -> tuple[Array, tuple[float, float] | None]:
    import numpy as np

    finite = np.isfinite(array)
    low = float(array.min(where=finite, initial=np.inf))
    top = float(array.max(where=finite, initial=-np.inf))
    outside = low < 0 or 1 < top < SMALL or 255 < top < np.inf
    values: Array = np.asarray(array, np.float64 if array.dtype.itemsize > 4 else np.float32)
    if outside and low < top:
        values = (values / 2 - low / 2) / (top / 2 - low / 2)  # halved: the difference may overflow float64
    elif outside:
        values = np.where(finite, 0.5, values)  # one colour: neither black nor white
    else:
        values = values / (1 if top <= 1 else 255)
    shown: Array = np.rint(np.clip(np.nan_to_num(values, nan=0, posinf=1, neginf=0), 0, 1) * 255)
    return shown.astype(np.uint8), (low, top) if outside else None


def _say_if_clipped(clipped: Any) -> None:
    if clipped:
        notices.once(
            "image values out of range",
            "An image of integers has values outside 0..255. They were clipped, so its colours may be wrong; the numbers "
            "logged beside it are not affected. Scale it to 0..255 before fanfold.Image(...).",
        )


def write_png(pixels: Array) -> bytes:
    """Encode height x width x channels of uint8 as PNG, without an imaging library."""
    import numpy as np

    height, width, channels = pixels.shape
    lines = np.zeros((height, 1 + width * channels), np.uint8)  # each line starts with filter type 0: none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2, 4: 6}[channels], 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 1)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
