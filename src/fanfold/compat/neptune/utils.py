"""`from neptune.utils import stringify_unsupported` in a script for Neptune."""

from .client import stringify_unsupported

__all__ = ["stringify_unsupported"]
