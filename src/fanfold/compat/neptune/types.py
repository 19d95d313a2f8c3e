"""`from neptune.types import File` in a script for Neptune."""

from .client import File

__all__ = ["File"]
