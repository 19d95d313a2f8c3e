"""Plots of matplotlib (stored as PNG) and plotly (stored as JSON)."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

from fanfold.errors import MissingExtra
from fanfold.media.arrays import is_a
from fanfold.media.base import Encoded, Media, broken, caption_of, refused, text_fact

PNG = b"\x89PNG\r\n\x1a\n"


def is_matplotlib(value: object) -> bool:
    """Return whether a value is a matplotlib figure, its axes, or the pyplot module, which means the current figure."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    return (
        (pyplot is not None and value is pyplot)
        or is_a(value, "matplotlib.figure", "FigureBase")
        or is_a(value, "matplotlib.axes", "Axes")
    )


def is_plotly(value: object) -> bool:
    """Return whether a value is a plotly figure."""
    return is_a(value, "plotly.basedatatypes", "BaseFigure")


class Figure(Media):
    """A plot: a matplotlib figure or axes, `plt` itself for the current figure, or a plotly figure.

    A matplotlib figure is drawn in the constructor, by the caller (20 to 200 ms): the library is not thread-safe, and the figure
    is usually closed or drawn over on the next line. A plotly figure is converted to JSON in the constructor.

    Args:
        figure: The plot.
        caption: A line shown below it.

    Raises:
        TypeError: It is not a figure.

    Example:
        ```python
        import matplotlib.pyplot as plt

        import fanfold

        run = fanfold.init("plots")
        figure, axes = plt.subplots()
        axes.plot([3, 1, 2])
        run.log({"curve": fanfold.Figure(figure)})
        ```
    """

    kind: ClassVar[str] = "figure"

    def __init__(self, figure: Any, *, caption: str | None = None) -> None:
        self.caption = caption_of(caption)
        if is_matplotlib(figure):
            self._data = draw(figure)
        elif is_plotly(figure):
            self._data = figure.to_json().encode()
        else:
            raise refused(TypeError, f"Figure got a value of type {type(figure).__name__}", "Pass a matplotlib or plotly figure")

    def encode(self) -> Encoded:
        facts: dict[str, object] = {"caption": self.caption} if self.caption is not None else {}
        return Encoded(self._data, "png" if self.png is not None else "json", facts)

    def restore(self, meta: Mapping[str, Any], data: bytes) -> None:
        self._data, self.caption = bytes(data), text_fact(meta, "caption")
        if self.png is None:
            _check_json(self._data)

    @property
    def png(self) -> bytes | None:
        """The PNG of a matplotlib figure."""
        return self._data if self._data.startswith(PNG) else None

    @property
    def json(self) -> str | None:
        """The JSON of a plotly figure."""
        return None if self.png is not None else self._data.decode()

    @property
    def html(self) -> str:
        """The figure as an HTML fragment; a plotly figure loads plotly.js from its CDN."""
        if self.png is not None:
            return f'<img alt="figure" src="data:image/png;base64,{base64.b64encode(self.png).decode()}">'
        try:
            import plotly.io
        except ImportError as error:
            raise MissingExtra("Figure.html needs plotly, which is not installed. Run: pip install plotly") from error
        import msgspec

        content = msgspec.json.decode(self._data)
        page: str = plotly.io.to_html(content, full_html=False, include_plotlyjs="cdn", validate=False)
        return page


def draw(figure: Any) -> bytes:
    """Return a matplotlib figure as PNG."""
    if isinstance(figure, ModuleType):
        if not figure.get_fignums():
            raise refused(ValueError, "Figure got pyplot, which has no figure open", "Draw one first, or pass the figure")
        figure = figure.gcf()
    while not hasattr(figure, "savefig"):  # axes and subfigures have a reference to their figure
        figure = figure.figure
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _check_json(data: bytes) -> None:
    import msgspec

    try:
        figure = msgspec.json.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise broken("figure", f"it is neither PNG nor JSON: {error}") from error
    if not isinstance(figure, dict):
        raise broken("figure", "its JSON is not a plotly figure")
