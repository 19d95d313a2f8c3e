"""The dashboard's server: a Starlette app over the store. It only reads, unless it is told that it may write."""

from .app import app

__all__ = ["app"]
