"""Probes: what produces records by itself, next to what the user logs."""

__all__ = ["energy", "system"]
