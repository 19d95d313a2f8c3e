"""The dashboard's server: a Starlette app over the store. Read-only unless started with write access."""

from .app import app

__all__ = ["app"]
