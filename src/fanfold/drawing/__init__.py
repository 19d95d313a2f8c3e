"""Charts and tables as static markup that needs no script, server or request: for reports and notebooks."""

from .chart import Line, chart, drawn, line_of
from .markup import STYLE, Markup, escape, table, tag

__all__ = ["STYLE", "Line", "Markup", "chart", "drawn", "escape", "line_of", "table", "tag"]
