"""`from neptune.utils import stringify_unsupported` in a script for Neptune."""

from .client import stringify_unsupported as stringify_unsupported  # noqa: PLC0414 - part of this module
