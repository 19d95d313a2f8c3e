"""Videos: arrays become an animated GIF, encoded files stay unchanged."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from fanfold.errors import missing_extra, needed
from fanfold.media import files, pixels
from fanfold.media.arrays import ArrayMedia, is_array, is_numeric
from fanfold.media.base import UNREADABLE, Encoded, broken, caption_of, number_fact, refused, text_fact

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

FORMATS = ("mp4", "webm", "gif")
MAX_FILM = 350_000_000  # pixels of all frames together: a malicious GIF can declare a huge film in a few bytes
MAX_FPS = 50  # GIF counts time in hundredths of a second, and browsers slow down anything under two of them


class Video(ArrayMedia):
    """A video: an array of frames with `fps`, a path, or the bytes of an MP4, WebM or GIF file.

    Frames are (time, height, width, channels), (time, channels, height, width) or (time, height, width). They are stored as GIF,
    which has 256 colours per frame; encode to MP4 yourself if you need more.

    Args:
        data: The frames or the file.
        fps: Frames a second.
        caption: A line shown below it.
        layout: The order of the axes if the shape fits several: `"NHW"`, `"NHWC"` or `"NCHW"`, where N is time.

    Raises:
        ValueError: The data cannot be read as a video.

    Example:
        ```python
        import numpy as np

        import fanfold

        run = fanfold.init("rl")
        run.log({"episode": fanfold.Video(np.zeros((4, 32, 32, 3), np.uint8), fps=8)})
        ```
    """

    kind: ClassVar[str] = "video"
    _data: bytes | None = None
    _layout: str = ""
    _count: int | None = None
    _rescaled: tuple[float, float] | None = None

    def __init__(self, data: Any, *, fps: float = 4, caption: str | None = None, layout: str | None = None) -> None:
        self.caption = caption_of(caption)
        self.fps: float | None = None
        if files.is_source(data):
            self._data, self._ext = files.read(data, FORMATS, "Video")
        elif is_array(data) and is_numeric(data):
            self.fps = _rate(fps)
            self._layout = _layout(tuple(data.shape), layout)
            self._count = int(data.shape[0])
            self._hold(data)
        else:
            raise refused(
                TypeError, f"Video got a value of type {type(data).__name__}", "Pass an array of frames, a path or encoded bytes"
            )

    def encode(self) -> Encoded:
        if self._data is not None:
            return Encoded(self._data, self._ext, self._facts())
        return Encoded(self._gif(self.frames()), "gif", self._facts())

    def _facts(self) -> dict[str, object]:
        rescaled = None if self._rescaled is None else list(self._rescaled)
        facts = {"caption": self.caption, "fps": self.fps, "frames": self._count, "rescaled": rescaled}
        return {name: value for name, value in facts.items() if value is not None}

    def _gif(self, frames: Array) -> bytes:
        import PIL.Image

        pictures = [PIL.Image.fromarray(frame[..., 0] if frame.shape[2] == 1 else frame) for frame in frames]
        starts = _starts(len(pictures), self.fps or 1)
        delays = [10 * (after - before) for before, after in pairwise(starts)]
        out = io.BytesIO()
        pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=delays, loop=0)
        return out.getvalue()

    def restore(self, meta: Mapping[str, Any], data: bytes) -> None:
        ext = files.format_of(data, FORMATS, "video")
        self._data, self._ext, self.caption = bytes(data), ext, text_fact(meta, "caption")
        fps, count = number_fact(meta, "fps"), number_fact(meta, "frames")
        self.fps = fps if fps is not None and 0 < fps <= MAX_FPS else None
        self._count = int(count) if count is not None and 0 < count < 2**24 else None

    @property
    def data(self) -> bytes:
        """The encoded file."""
        return bytes(self.encode().data)

    def frames(self) -> Array:
        """Return the frames as uint8, time x height x width x channels. Of encoded files, only GIF can be decoded.

        Returns:
            The frames.

        Raises:
            ValueError: The file is not a GIF.
        """
        if self._data is None:
            shown, self._rescaled = pixels.brightness(pixels.arrange(self._host(), self._layout))
            return shown
        if self._ext != "gif":
            raise refused(
                ValueError,
                f"This video is {self._ext}, kept as it came",
                "Decode Video.data with a library that reads it",
            )
        return _read_gif(self._data, self._count, self.fps)


def _rate(fps: Any) -> float:
    if isinstance(fps, bool) or not isinstance(fps, (int, float)) or not 0 < fps <= MAX_FPS:
        raise refused(ValueError, f"Video got fps={fps!r}", f"Pass a number above 0, up to {MAX_FPS}")
    if importlib.util.find_spec("PIL") is None:
        raise missing_extra("pillow", "media", "A video from an array")
    return float(fps)


def _layout(shape: tuple[int, ...], layout: str | None) -> str:
    wanted = "NHW" if len(shape) == 3 and layout is None else layout
    found = pixels.layout_of(shape, wanted, "Video")
    if found[0] != "N":
        raise refused(
            ValueError,
            f"Video got shape {shape}, which has no time axis",
            "Put time first: (time, height, width, channels)",
        )
    return found


def _starts(count: int, fps: float) -> list[int]:
    """Return when each frame begins, in hundredths of a second, without accumulating rounding errors."""
    return [math.floor(index * 100 / fps + 0.5) for index in range(count + 1)]


def _read_gif(data: bytes, count: int | None, fps: float | None) -> Array:
    with needed("pillow", "media", "Reading a video back"):
        import PIL.Image
    too_large = (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)
    try:
        shown = _gif_frames(data)
    except (*UNREADABLE, *too_large) as error:
        raise broken("video", f"{type(error).__name__}: {error}") from error
    return _spread(shown, count, fps)


def _gif_frames(data: bytes) -> list[tuple[Array, int]]:
    """Return each frame and its duration."""
    import numpy as np
    import PIL.Image
    import PIL.ImageSequence

    seen, shown = 0, []
    picture = PIL.Image.open(io.BytesIO(data), formats=("GIF",))
    for frame in PIL.ImageSequence.Iterator(picture):
        seen += frame.size[0] * frame.size[1]
        if seen > MAX_FILM:
            raise ValueError(f"its frames have more than {MAX_FILM} pixels")
        shown.append((np.asarray(frame.convert("RGB")), int(frame.info.get("duration", 0))))
    return shown


def _spread(shown: list[tuple[Array, int]], count: int | None, fps: float | None) -> Array:
    """Repeat frames that the GIF writer merged: equal consecutive frames are stored once, with a longer delay."""
    import numpy as np

    pictures = np.stack([picture for picture, _ in shown])
    if count is None or fps is None or count <= len(shown) or count * pictures[0].size > 3 * MAX_FILM:
        return pictures
    ends = np.cumsum([delay // 10 for _, delay in shown])
    starts = np.array(_starts(count, fps)[:-1])
    index = np.minimum(np.searchsorted(ends, starts, side="right"), len(shown) - 1)
    return pictures[index]
