"""Aim's reporting callback."""

from __future__ import annotations

from typing import ClassVar

from ..tracking import TrackingCallback


class AimCallback(TrackingCallback):
    """Log to an Aim repository in `output_dir/runs`; arguments go to `aim.Run`."""

    system: ClassVar[str] = "aim"
