"""A report: selected charts, tables, pictures and a note in one HTML file that needs no server and loads nothing."""

from .page import ReportOptions, page

__all__ = ["ReportOptions", "page"]
