"""Plain text and HTML, stored in the frame if short and in a blob if long."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from fanfold.errors import clean_text
from fanfold.media import files
from fanfold.media.base import Encoded, Media, broken, refused, text_fact

INLINE = 4096  # bytes of UTF-8; longer texts go to a blob


class Text(Media):
    """Text of any length.

    Args:
        text: The text.

    Example:
        ```python
        import fanfold

        run = fanfold.init("samples")
        run.log({"sample": fanfold.Text("Once upon a time")})
        ```
    """

    kind: ClassVar[str] = "text"
    ext: ClassVar[str] = "txt"

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise refused(TypeError, f"{type(self).__name__} got a value of type {type(text).__name__}", "Pass a string")
        self.text = clean_text(str(text))

    def encode(self) -> Encoded:
        data = self.text.encode()
        if len(data) <= INLINE:
            return Encoded(b"", self.ext, {"text": self.text})
        return Encoded(data, self.ext, {"length": len(self.text)})

    def restore(self, meta: Mapping[str, Any], data: bytes) -> None:
        inline = text_fact(meta, "text")
        try:
            self.text = inline if inline is not None else bytes(data).decode()
        except UnicodeDecodeError as error:
            raise broken(self.kind, error) from error


class Html(Text):
    """An HTML page or fragment: a string, or a path to a file (a Path, or a string ending in .html).

    Args:
        html: The HTML or its file.

    Example:
        ```python
        import fanfold

        run = fanfold.init("pages")
        run.log({"page": fanfold.Html("<h1>Hello</h1>")})
        ```
    """

    kind: ClassVar[str] = "html"
    ext: ClassVar[str] = "html"

    def __init__(self, html: str | os.PathLike[str]) -> None:
        if isinstance(html, os.PathLike) or (isinstance(html, str) and _is_path(html)):
            html = files.read_path(html, "Html").decode("utf-8", "replace")
        super().__init__(html)

    @property
    def html(self) -> str:
        """The HTML."""
        return self.text


def _is_path(text: str) -> bool:
    return len(text) < 4096 and text.endswith((".html", ".htm")) and not any(sign in text for sign in "<\n")
