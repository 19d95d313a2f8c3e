"""Fixtures for all browser tests."""

from browser import address, browser, context, page, place

__all__ = ["address", "browser", "context", "page", "place"]
