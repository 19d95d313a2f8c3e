"""Probes: sources of records that fanfold collects by itself, in addition to what the user logs."""

__all__ = ["energy", "system"]
