"""A report: selected charts, tables, pictures and a note in one HTML file that needs no server and loads nothing."""

from .page import Options, page

__all__ = ["Options", "page"]
