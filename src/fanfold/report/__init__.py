"""A report: chosen charts, tables, pictures and a note of runs in one HTML file that needs no server and asks for nothing."""

from .page import Options, page

__all__ = ["Options", "page"]
