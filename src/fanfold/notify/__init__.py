"""Notifications: messages about a run's alerts, rules and end, sent to people by a process that outlives training."""

from __future__ import annotations

import os
from pathlib import Path

from .. import approvals

VARIABLE = "FANFOLD_NOTIFY"
NAME = "notify"  # among a run's relays; relay/process.py has the address of its class


def settings_file() -> Path:
    """Return the path of the user's own settings file."""
    return approvals.folder().parent / "settings.toml"


def configured() -> bool:
    """Return whether the environment or the user's settings may name somebody to tell: asked by every init()."""
    return VARIABLE in os.environ or settings_file().exists()
