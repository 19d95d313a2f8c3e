"""The command line: `fanfold COMMAND`, and `python -m fanfold COMMAND`. One row here and one short file per command.

A command's file has a docstring (its help), `EXAMPLE`, `arguments(parser)` and `run(args)`, which returns the exit code. Only
the file of the command that is called is imported, and rich, numpy and torch only where they are used, so that `fanfold ls`
answers at once.
"""

from __future__ import annotations

from collections.abc import Sequence

# What `fanfold --help` shows, in its order. Heading: name: (its file, its help).
SECTIONS: dict[str, dict[str, tuple[str, str]]] = {
    "Look at runs": {
        "ls": ("ls", "list the runs, newest first"),
        "ui": ("ui", "open the dashboard in the browser"),
        "top": ("top", "watch the runs live in the terminal, with sparklines"),
        "show": ("show", "show one run: status, metrics and charts"),
        "tail": ("tail", "print a run's latest metrics; -f follows it live"),
        "points": ("points", "print a metric's curve in a few exact numbers"),
        "compare": ("compare", "show what differs between two runs"),
        "query": ("query", "query the runs in SQL"),
        "report": ("report", "write charts, config and metrics of runs to one HTML file"),
        "publish": ("publish", "write a read-only copy of the dashboard to a folder for any web host"),
    },
    "Find out what happened": {
        "diagnose": ("diagnose", "find out what went wrong in a run, or what limits it"),
        "hang": ("hang", "show why a job hangs or how it died: the rank to blame, and the line each rank is on"),
        "memory": ("memory", "show what held the memory when a job ran out of it"),
        "goodput": ("goodput", "show where the time of runs went: steps, restarts, checkpoints, waiting"),
        "nodes": ("nodes", "find slow nodes and GPUs by comparing ranks over many runs"),
        "ops": ("ops", "show where PyTorch spent its time, by operator; compare runs, trace a running job"),
        "usage": ("usage", "list the PyTorch APIs that runs use and the model files they wrote and read"),
        "inspect": ("inspect", "show which run a model file comes from"),
    },
    "Work with running jobs": {
        "exec": ("exec", "run any command as a run: console, exit code, time and resources"),
        "wait": ("wait", "wait for runs to end or for a condition; the exit code is the outcome"),
        "tell": ("tell", "ask a running job to stop, save, evaluate, log, or change a value"),
        "notify test": ("notify_test", "send a test message to everybody who is notified"),
        "notify show": ("notify_show", "show what was sent about a run, and what was not"),
    },
    "Organize runs": {
        "tag": ("tag", "show or change the tags of runs"),
        "note": ("note", "set or add to the notes of a run"),
        "rename": ("rename", "give a run another name"),
        "archive": ("archive", "hide runs from lists without deleting anything"),
        "mv": ("mv", "move runs to another project"),
        "cp": ("cp", "copy runs to another project"),
        "rm": ("rm", "delete runs"),
        "prune": ("prune", "losslessly compress finished runs and delete leftover files"),
    },
    "Bring runs in and send them out": {
        "import": ("import_", "import runs of other tools: TensorBoard, W&B, MLflow, …"),
        "export": ("export", "write runs as CSV, JSON lines or Parquet, or a whole project as a bundle"),
        "sync": ("sync", "deliver runs to trackers: the remaining points, or a whole run to a new tracker"),
    },
    "Servers, agents and this machine": {
        "server start": ("serve", "run a gateway that collects the runs of many nodes"),
        "server forward": ("forward", "send the runs of this node to a gateway"),
        "server token": ("token", "create, list and revoke a gateway's tokens"),
        "server db": ("db", "create, check and rebuild the tables of a ClickHouse store"),
        "server audit": ("audit", "print who deleted runs and who logged in at a gateway"),
        "mcp": ("mcp", "serve the runs to a coding agent over MCP"),
        "skill": ("skill", "teach a coding agent to use fanfold: install its SKILL.md"),
        "schema": ("schema", "print the JSON Schema of what a command prints with --json"),
        "completion": ("completion", "complete commands, options and names of runs in bash, zsh and fish"),
        "doctor": ("doctor", "check this machine: directory, disk, ranks, libraries, GPUs"),
        "demo": ("demo", "train a small model in two processes and show the run"),
    },
}
COMMANDS: dict[str, tuple[str, str]] = {name: row for section in SECTIONS.values() for name, row in section.items()}

# The first word of several commands, and its help.
GROUPS: dict[str, str] = {
    "notify": "send a test message; show what was sent about a run",
    "server": "run a gateway for many nodes; manage its tokens, database and forwarders",
}

# Earlier names, and upkeep that happens by itself: these still work, but are not listed.
HIDDEN: dict[str, tuple[str, str]] = {
    "serve": COMMANDS["server start"],
    "forward": COMMANDS["server forward"],
    "token": COMMANDS["server token"],
    "db": COMMANDS["server db"],
    "audit": COMMANDS["server audit"],
    "merge": ("merge", "bring the run index and the caches up to date now"),
    "reindex": ("merge", "bring the run index and the caches up to date now"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 nothing found, 2 failed, 130 interrupted."""
    from .entry import run

    return run(argv)
