"""The command line: `fanfold COMMAND`, and `python -m fanfold COMMAND`. One row and one short file per command.

A command's file has `arguments(parser)` and `run(args)`, which returns the exit code. Only the file of the command that
is called is loaded, and rich, numpy and torch only where they are used: `fanfold ls` has to answer at once.
"""

from __future__ import annotations

from collections.abc import Sequence

# name: the file it lives in, and what it does. In the order a newcomer meets them; this is what `fanfold --help` shows.
COMMANDS: dict[str, tuple[str, str]] = {
    "ls": ("ls", "list the runs, newest first"),
    "ui": ("ui", "open the dashboard in the browser"),
    "top": ("top", "watch the runs live in the terminal, with sparklines"),
    "show": ("show", "show one run: how it stands, its figures and charts"),
    "tail": ("tail", "print a run's last figures, and follow it live with -f"),
    "export": ("export", "write runs as CSV, JSON lines or Parquet"),
    "report": ("page", "write charts, settings and figures of runs as one HTML file"),
    "query": ("query", "ask anything of the runs in SQL"),
    "sync": ("sync", "deliver runs to trackers: what is left, or all of it to a new one"),
    "ops": ("ops", "show which PyTorch operators the time went to; compare runs, trace a running job"),
    "usage": ("usage", "tell which PyTorch APIs runs use, and which model files they wrote and read"),
    "inspect": ("inspect", "say which run a model file comes from"),
    "forward": ("forward", "carry the runs of this node to a gateway"),
    "serve": ("serve", "run a gateway that takes in the runs of many nodes"),
    "db": ("db", "make and keep the tables of a ClickHouse store"),
    "token": ("token", "make, list and take back a gateway's tokens"),
    "audit": ("audit", "print what was deleted at a gateway, and who was let in"),
    "rm": ("rm", "delete runs"),
    "prune": ("prune", "free space and lose nothing: pack finished journals, delete leftovers"),
    "merge": ("merge", "make finished and long journals quicker to read"),
    "reindex": ("reindex", "make the catalogue of runs anew"),
    "doctor": ("doctor", "check this machine: directory, disk, ranks, libraries, GPUs"),
    "demo": ("demo", "train a small model on two processes and look at it"),
    "version": ("version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 found nothing, 2 could not be done, 130 interrupted."""
    from .entry import run

    return run(argv)
