"""Images: from PIL, arrays, tensors, files and bytes; stored as PNG, or unchanged if already encoded."""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from fanfold.errors import missing_extra, needed
from fanfold.media import files, pixels
from fanfold.media.arrays import ArrayMedia, is_a, is_array, is_numeric
from fanfold.media.base import UNREADABLE, Encoded, broken, caption_of, refused, text_fact
from fanfold.media.figure import draw, is_matplotlib

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

FORMATS = ("png", "jpg", "gif", "webp", "bmp", "tiff")
PIL_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")  # never formats that run programs, such as EPS
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
UNREADABLE_HEADER: tuple[type[Exception], ...] = (*UNREADABLE, Warning)  # Pillow warns about large pictures
MAX_NOTES = 256 * 1024  # boxes and masks are stored in the frame, not in the blob


def is_pil(value: object) -> bool:
    """Return whether a value is a PIL image."""
    return is_a(value, "PIL.Image", "Image")


class Image(ArrayMedia):
    """An image: PIL image, array or tensor, path, encoded bytes, or a matplotlib figure, which is drawn at once.

    Arrays are HxW, HxWxC, CxHxW or a batch of these (arranged in a grid), with 1, 3 or 4 channels; pass `layout` if the shape is
    ambiguous. If it fits both, a torch tensor is read as CxHxW and any other array as HxWxC. See `pixels.brightness` for how
    numbers map to brightness. `boxes` and `masks` are small annotations (lists of dicts) stored with the image.

    Args:
        data: The image.
        caption: A line shown below it.
        layout: The order of the axes: `"HW"`, `"HWC"`, `"CHW"`, `"NHW"`, `"NHWC"` or `"NCHW"`.
        boxes: Bounding boxes to draw over it.
        masks: Segmentation masks to draw over it.

    Raises:
        ValueError: The data cannot be read as an image.

    Example:
        ```python
        import numpy as np

        import fanfold

        run = fanfold.init("vision")
        pixels = np.zeros((64, 64, 3), np.uint8)
        run.log({"sample": fanfold.Image(pixels, boxes=[{"box": [8, 8, 40, 40], "label": "cat"}])})
        ```
    """

    kind: ClassVar[str] = "image"
    _pil: Any = None
    _data: bytes | None = None
    _layout: str = ""
    _rescaled: tuple[float, float] | None = None

    def __init__(
        self, data: Any, *, caption: str | None = None, layout: str | None = None, boxes: Any = None, masks: Any = None
    ) -> None:
        self.caption = caption_of(caption)
        self.boxes = _notes("boxes", boxes)
        self.masks = _notes("masks", masks)
        if files.is_source(data):
            self._data, self._ext = files.read(data, FORMATS, "Image")
        elif is_pil(data):
            self._pil = data.copy()
        elif is_matplotlib(data):
            self._data, self._ext = draw(data), "png"
        elif is_array(data) and is_numeric(data):
            first = type(data).__module__.partition(".")[0] == "torch"  # PyTorch puts channels first, numpy and JAX last
            self._layout = pixels.layout_of(tuple(data.shape), layout, "Image", channels_first=first)
            self._hold(data)
        else:
            raise refused(
                TypeError,
                f"Image got a value of type {_named(data)}",
                "Pass a PIL image, a numeric array or tensor, a matplotlib figure, a path or encoded bytes",
            )

    def encode(self) -> Encoded:
        if self._data is not None:
            size = _size(self._data)
            return Encoded(self._data, self._ext, self._facts(size))
        picture = self._to_pil()
        if picture is None:  # no Pillow
            array = self.array()
            return Encoded(pixels.write_png(array), "png", self._facts((array.shape[1], array.shape[0])))
        out = io.BytesIO()
        picture.save(out, "PNG", compress_level=1)  # 3 to 5 times faster than the default, about a tenth larger
        return Encoded(out.getvalue(), "png", self._facts(picture.size))

    def _facts(self, size: tuple[int, int] | None) -> dict[str, object]:
        facts: dict[str, object] = {"caption": self.caption, "boxes": self.boxes, "masks": self.masks}
        if self._rescaled is not None:
            facts["rescaled"] = list(self._rescaled)
        if size is not None:
            facts |= {"width": int(size[0]), "height": int(size[1])}
        return {name: value for name, value in facts.items() if value is not None}

    def restore(self, meta: Mapping[str, Any], data: bytes) -> None:
        ext = files.format_of(data, FORMATS, "image")
        self._data, self._ext = bytes(data), ext
        self.caption, self.boxes, self.masks = text_fact(meta, "caption"), meta.get("boxes"), meta.get("masks")

    def array(self) -> Array:
        """Return the image as uint8, height x width x channels.

        Returns:
            The pixels.
        """
        if self._data is not None:
            return _channels(_open(self._data))
        if self._pil is not None:
            return _channels(self._pil)
        shown, self._rescaled = pixels.brightness(pixels.arrange(self._host(), self._layout))
        return pixels.grid(shown) if shown.ndim == 4 else shown

    def pil(self) -> Any:
        """Return the image as a PIL image.

        Returns:
            The image.

        Raises:
            MissingExtra: Pillow is not installed.
        """
        if self._data is not None:
            return _open(self._data)
        picture = self._to_pil()
        if picture is None:
            raise missing_extra("pillow", "media", "Image.pil()")
        return picture.copy()

    def _to_pil(self) -> Any:
        """Return a PIL image that PNG can store, or None without Pillow."""
        try:
            import PIL.Image
        except ImportError:
            return None
        if self._pil is not None and self._pil.mode in PNG_MODES:
            return self._pil
        array = self.array()
        return PIL.Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def _named(value: object) -> str:
    dtype = getattr(value, "dtype", None)
    return type(value).__name__ + (f" of {dtype}" if dtype is not None else "")


def _notes(name: str, value: Any) -> Any:
    """Copy annotations through msgpack, which checks them, limits their size and detaches them from the caller's objects."""
    if value is None:
        return None
    import msgspec

    try:
        packed = msgspec.msgpack.encode(value, enc_hook=lambda odd: odd.tolist())
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        raise refused(TypeError, f"{name}= cannot be stored: {error}", "Use lists and dicts of numbers and strings") from error
    if len(packed) > MAX_NOTES:
        raise refused(
            ValueError,
            f"{name}= takes {len(packed)} bytes, more than {MAX_NOTES}",
            "Log large masks as images of their own",
        )
    return msgspec.msgpack.decode(packed)


def _size(data: bytes) -> tuple[int, int] | None:
    """Return width and height from the header, or None: an image that cannot be parsed here is stored all the same."""
    if data.startswith(b"\x89PNG") and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return width, height
    try:
        import PIL.Image

        size: tuple[int, int] = PIL.Image.open(io.BytesIO(data), formats=PIL_FORMATS).size
    except UNREADABLE_HEADER:
        return None
    return size


def _open(data: bytes) -> Any:
    """Open untrusted bytes with Pillow's raster formats only, within its limit on pixels."""
    with needed("pillow", "media", "Reading an image back"):
        import PIL.Image
    too_large = (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)
    try:
        picture = PIL.Image.open(io.BytesIO(data), formats=PIL_FORMATS)
        _bounded(picture)
        picture.load()
    except (*UNREADABLE, *too_large) as error:
        raise broken("image", f"{type(error).__name__}: {error}") from error
    return picture


def _bounded(picture: Any) -> None:
    import PIL.Image

    limit = PIL.Image.MAX_IMAGE_PIXELS
    if limit is not None and picture.size[0] * picture.size[1] > limit:
        raise ValueError(f"{picture.size[0]} x {picture.size[1]} pixels are more than PIL.Image.MAX_IMAGE_PIXELS ({limit})")


def _channels(picture: Any) -> Array:
    """Return a PIL image of any mode as uint8, height x width x channels."""
    import numpy as np

    if picture.mode == "F" or picture.mode.startswith("I"):
        deep = np.asarray(picture)
        if picture.mode != "F" and (picture.mode != "I" or deep.max() > 255):
            deep = np.clip(deep, 0, 65535).astype(np.uint16)
        return pixels.to_uint8(deep)[..., None]
    if picture.mode == "1":
        picture = picture.convert("L")
    elif picture.mode not in ("L", "RGB", "RGBA"):
        clear = "transparency" in picture.info or picture.mode.endswith(("A", "a"))
        picture = picture.convert("RGBA" if clear else "RGB")
    array = np.array(picture)
    return array[..., None] if array.ndim == 2 else array
