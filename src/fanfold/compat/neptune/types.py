"""`from neptune.types import File` in a script for Neptune."""

from .client import File as File  # noqa: PLC0414 - part of this module
