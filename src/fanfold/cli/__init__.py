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
    "show": ("show", "show one run: status, metrics and charts"),
    "tail": ("tail", "print a run's latest metrics; -f follows it live"),
    "export": ("export", "write runs as CSV, JSON lines or Parquet"),
    "report": ("report", "write charts, config and metrics of runs to one HTML file"),
    "query": ("query", "query the runs in SQL"),
    "sync": ("sync", "deliver runs to trackers: the remaining points, or a whole run to a new tracker"),
    "ops": ("ops", "show where PyTorch spent its time, by operator; compare runs, trace a running job"),
    "usage": ("usage", "list the PyTorch APIs that runs use and the model files they wrote and read"),
    "inspect": ("inspect", "show which run a model file comes from"),
    "server start": ("serve", "run a gateway that collects the runs of many nodes"),
    "server forward": ("forward", "send the runs of this node to a gateway"),
    "server token": ("token", "create, list and revoke a gateway's tokens"),
    "server db": ("db", "create, check and rebuild the tables of a ClickHouse store"),
    "server audit": ("audit", "print who deleted runs and who logged in at a gateway"),
    "rm": ("rm", "delete runs"),
    "prune": ("prune", "losslessly compress finished runs and delete leftover files"),
    "doctor": ("doctor", "check this machine: directory, disk, ranks, libraries, GPUs"),
    "demo": ("demo", "train a small model in two processes and show the run"),
}

# The first word of several commands, and what they are about.
GROUPS: dict[str, str] = {"server": "run a gateway for many nodes; manage its tokens, database and forwarders"}

# Names from before, and commands that are rarely needed: they work, and are not listed.
HIDDEN: dict[str, tuple[str, str]] = {
    "serve": COMMANDS["server start"],
    "forward": COMMANDS["server forward"],
    "token": COMMANDS["server token"],
    "db": COMMANDS["server db"],
    "audit": COMMANDS["server audit"],
    "merge": ("merge", "make finished and long journals faster to read"),
    "reindex": ("reindex", "rebuild the run index"),
    "version": ("version", "print the version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 found nothing, 2 could not be done, 130 interrupted."""
    from .entry import run

    return run(argv)
