"""Fixtures of every test in a browser."""

from browser import address, browser, context, page, place

__all__ = ["address", "browser", "context", "page", "place"]
