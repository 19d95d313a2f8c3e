"""A published folder: the dashboard over files, without a server."""

from .folder import PublishOptions, publish

__all__ = ["PublishOptions", "publish"]
