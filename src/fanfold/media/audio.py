"""Audio: samples become WAV, encoded files stay unchanged."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fanfold.errors import notices
from fanfold.media import files
from fanfold.media.arrays import ArrayMedia, dtype_kind, is_array
from fanfold.media.base import UNREADABLE, Encoded, broken, caption_of, number_fact, refused, text_fact

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

FORMATS = ("wav", "mp3", "flac", "ogg")
UNREADABLE_WAV: tuple[type[Exception], ...] = (*UNREADABLE, wave.Error)
MAX_CHANNELS = 32
SAMPLES = ("uint8", "int16", "int32")  # types WAV stores exactly; floats become int16


class Audio(ArrayMedia):
    """Audio: an array of samples with its `sample_rate`, a path, or the bytes of a WAV, MP3, FLAC or Ogg file.

    Samples are (n,) or (n, channels); (channels, n) is transposed if it is the only possible reading. Floats are expected in
    -1..1 and stored as 16-bit WAV; int16, int32 and uint8 are stored exactly.

    Args:
        data: The samples or the file.
        sample_rate: Samples a second; needed for arrays.
        caption: A line shown below it.

    Raises:
        ValueError: The data cannot be read as audio.

    Example:
        ```python
        import numpy as np

        import fanfold

        run = fanfold.init("speech")
        run.log({"tone": fanfold.Audio(np.sin(np.arange(8000) / 10), sample_rate=8000)})
        ```
    """

    kind: ClassVar[str] = "audio"
    _data: bytes | None = None

    def __init__(self, data: Any, *, sample_rate: int | None = None, caption: str | None = None) -> None:
        self.caption = caption_of(caption)
        self.sample_rate = _rate(sample_rate)
        if files.is_source(data):
            self._data, self._ext = files.read(data, FORMATS, "Audio")
            self.sample_rate = self.sample_rate or _wav_rate(self._data)
        elif is_array(data) and _storable(data):
            self._check(tuple(data.shape))
            self._hold(data)
        else:
            what = f"{type(data).__name__} of {data.dtype}" if is_array(data) else type(data).__name__
            raise refused(
                TypeError,
                f"Audio got a value of type {what}",
                "Pass float, int16, int32 or uint8 samples, a path or encoded bytes",
            )

    def _check(self, shape: tuple[int, ...]) -> None:
        if self.sample_rate is None:
            raise refused(ValueError, "Audio got samples without sample_rate", "Pass sample_rate= in Hz, such as 16000")
        if len(shape) not in (1, 2) or (len(shape) == 2 and min(shape) > MAX_CHANNELS) or 0 in shape[1:]:
            raise refused(
                ValueError,
                f"Audio got samples of shape {shape}",
                f"Give (n,) or (n, channels), up to {MAX_CHANNELS} channels",
            )

    def encode(self) -> Encoded:
        if self._data is not None:
            return Encoded(self._data, self._ext, self._facts())
        samples = _pcm(self._frames())
        out = io.BytesIO()
        with wave.open(out, "wb") as file:
            file.setnchannels(samples.shape[1])
            file.setsampwidth(samples.dtype.itemsize)
            file.setframerate(self.sample_rate or 0)
            file.writeframes(samples.tobytes())
        seconds = samples.shape[0] / (self.sample_rate or 1)
        return Encoded(out.getvalue(), "wav", self._facts() | {"channels": samples.shape[1], "seconds": seconds})

    def _frames(self) -> Array:
        """Return the samples as (n, channels)."""
        array = self._host()
        if array.ndim == 1:
            return array[:, None]
        return array.T if array.shape[1] > MAX_CHANNELS else array

    def _facts(self) -> dict[str, object]:
        facts = {"sample_rate": self.sample_rate, "caption": self.caption}
        return {name: value for name, value in facts.items() if value is not None}

    def restore(self, meta: Mapping[str, Any], data: bytes) -> None:
        ext = files.format_of(data, FORMATS, "audio")
        self._data, self._ext, self.caption = bytes(data), ext, text_fact(meta, "caption")
        rate = number_fact(meta, "sample_rate")
        self.sample_rate = _wav_rate(data) or (int(rate) if rate is not None and 0 < rate < 2**31 else None)

    @property
    def data(self) -> bytes:
        """The encoded file."""
        return bytes(self.encode().data)

    def array(self) -> Array:
        """Return the samples: (n,) for one channel, (n, channels) for more.

        Returns:
            The samples.

        Raises:
            ValueError: The file is not WAV.
        """
        samples = _pcm(self._frames()) if self._data is None else _read_wav(self._data, self._ext)
        return samples[:, 0] if samples.shape[1] == 1 else samples


def _rate(rate: Any) -> int | None:
    if rate is None:
        return None
    if isinstance(rate, bool) or not hasattr(rate, "__index__") or not 0 < int(rate) < 2**31:
        raise refused(ValueError, f"Audio got sample_rate={rate!r}", "Pass a whole number of Hz, such as 16000")
    return int(rate)


def _storable(data: Any) -> bool:
    return dtype_kind(data) == "f" or str(data.dtype).removeprefix("torch.") in SAMPLES


def _pcm(samples: Array) -> Array:
    """Return little-endian samples that WAV can store; floats become int16."""
    import numpy as np

    if samples.dtype.kind != "f":
        return np.ascontiguousarray(samples, samples.dtype.newbyteorder("<"))
    values = np.nan_to_num(samples.astype(np.float64), nan=0.0)
    if not np.isfinite(samples).all() or np.abs(values).max(initial=0) > 1:
        notices.once(
            "audio values out of range",
            "Sound has samples outside -1..1, or NaN. They were clipped, so it may crackle; nothing else is touched. "
            "Scale it to -1..1 before fanfold.Audio(...).",
        )
    return np.rint(np.clip(values, -1, 1) * 32767).astype("<i2")


def _wav_rate(data: bytes) -> int | None:
    if files.sniff(data, ("wav",)) is None:
        return None
    try:
        with wave.open(io.BytesIO(data), "rb") as file:
            return file.getframerate() or None
    except UNREADABLE_WAV:
        return None  # a kind of WAV the standard library does not read; the bytes are stored all the same


def _read_wav(data: bytes, ext: str) -> Array:
    if ext != "wav":
        raise refused(ValueError, f"This sound is {ext}, kept as it came", "Decode Audio.data with a library that reads it")
    try:
        with wave.open(io.BytesIO(data), "rb") as file:
            width, channels = file.getsampwidth(), file.getnchannels()
            # Never more than the data contains, whatever the header claims.
            raw = file.readframes(min(file.getnframes(), len(data)))
    except UNREADABLE_WAV as error:
        raise broken("audio", f"{type(error).__name__}: {error}") from error
    return _samples(raw, width, channels)


def _samples(raw: bytes, width: int, channels: int) -> Array:
    import numpy as np

    if width not in (1, 2, 3, 4) or channels < 1:
        raise broken("audio", f"{channels} channels of {width} bytes")
    whole = np.frombuffer(raw[: len(raw) // (width * channels) * (width * channels)], np.uint8)
    if width == 3:  # numpy has no 24-bit integers: move them to the upper bytes of 32-bit ones
        wide = np.zeros((whole.size // 3, 4), np.uint8)
        wide[:, 1:] = whole.reshape(-1, 3)
        whole, width = wide.reshape(-1), 4
    samples: Array = whole.view({1: "u1", 2: "<i2", 4: "<i4"}[width])
    framed: Array = samples.reshape(-1, channels).copy()
    return framed
