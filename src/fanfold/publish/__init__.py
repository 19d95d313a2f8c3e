"""A published folder: the dashboard over files, without a server."""

from .folder import Options, publish

__all__ = ["Options", "publish"]
