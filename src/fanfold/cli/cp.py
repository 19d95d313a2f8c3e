"""Copy runs to another project. The copy keeps the run's id, and is not delivered to the trackers of the original.

A run that is still being written is refused.
"""

from __future__ import annotations

import argparse

from ..store.move import copy
from . import mv

EXAMPLE = """examples:
  fanfold cp quick-otter-42 --project paper"""


PROJECT = "the project to copy the runs to"
arguments = mv.arguments


def run(args: argparse.Namespace) -> int:
    return mv.to_project(args, "cp", "copied", copy)
