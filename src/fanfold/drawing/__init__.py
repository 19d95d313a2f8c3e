"""Charts and tables as text a browser shows without a script, a server or a request: for reports and notebooks."""

from .chart import Line, chart, drawn, line_of
from .markup import STYLE, Markup, escape, table, tag

__all__ = ["STYLE", "Line", "Markup", "chart", "drawn", "escape", "line_of", "table", "tag"]
