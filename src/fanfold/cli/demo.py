"""Train a small model in two processes and show what was recorded.

It needs torch and about 20 seconds, and leaves one run in the runs' directory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import notebook
from ..errors import FanfoldError, MissingExtra, RunNotFound
from ..journal.directory import run_path
from ..process import module_command, same_modules
from ..settings import find_directory
from ..store import open_run
from . import choose, output, show, show_sections
from .text import clean, number
from .ui import PORT

EXAMPLE = """examples:
  fanfold demo
  fanfold demo --dir /tmp/try --steps 50
  fanfold demo --examples"""

PROJECT = "demo"
FOLDED = {"loss": "loss", "accuracy": "accuracy", "throughput": "characters/s", "step_seconds": "seconds/step"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=450, metavar="N", help="how long to train (default: 450 steps)")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="how many processes (default: 2)")
    parser.add_argument("--examples", action="store_true", help="write 16 made-up runs instead, in a second and without torch")


def run(args: argparse.Namespace) -> int:
    args.project = args.project or PROJECT
    if args.examples:
        return _examples(args)
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(
            "the demo trains a model with torch, which is not installed. No run was made. Run: pip install torch, or "
            "fanfold demo --examples"
        )
    stored = choose.one(args, _train(args, find_directory(args.dir)))
    if args.json:
        output.print_json(show.facts(stored))
        return 0
    printed = show_sections.RunPrinter(stored)
    printed.print()
    if len(stored.ranks) > 1:
        _print_ranks(printed)
    _print_hints(printed, args)
    stays = os.environ.get("DEMO_EXIT") != "1" and sys.stdin.isatty()
    address = notebook.open_page(stored).url if stays else f"http://localhost:{PORT}/ (start it with: {_command()} ui)"
    printed.line(("Dashboard  ", "bold"), (address, "cyan"))
    if stays:
        printed.line(("Open it in a browser, or try the commands above in another terminal. Ctrl-C ends the demo.", "dim"))
        with contextlib.suppress(KeyboardInterrupt):
            sys.stdin.read()
    return 0


def _examples(args: argparse.Namespace) -> int:
    from ..transfer.examples import write_examples

    added = write_examples(find_directory(args.dir), args.project)
    if args.json:
        output.print_json(show.facts(choose.one(args, "-")))
    else:
        output.remark(args, f"{added} example runs in project {args.project}. See them with: {_command()} ui")
    return 0


def _train(args: argparse.Namespace, root: Path) -> str:
    """Run the training script in several processes, with a progress bar, and return the run's id."""
    run_id = secrets.token_hex(6)
    command = module_command("torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}",
                             "-m", "fanfold.cli.demo_training", str(args.steps))  # fmt: skip
    label = f"Training a small transformer on {args.ranks} processes"
    if not (sys.stderr.isatty() or args.json):
        output.remark(args, f"{label}, {args.steps} steps ...")
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        environment = _environment(root, args.project, run_id, args.ranks)
        trainer = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            steps = _steps(trainer, run_path(root, args.project, run_id))
            for _ in output.progress(args, _narrated(args, steps), args.steps, label, at=int):
                pass
        finally:
            if trainer.poll() is None:
                trainer.terminate()  # torchrun ends its workers
                trainer.wait(30)
        if trainer.returncode:
            log.seek(0)
            raise FanfoldError(
                f"the demo's training ended with exit code {trainer.returncode}. What it logged is kept (`fanfold show -`). "
                f"The end of its output, for a bug report:\n{''.join(log.readlines()[-15:])}"
            )
    return run_id


def _environment(root: Path, project: str, run_id: str, ranks: int) -> dict[str, str]:
    """Return the trainers' environment: our settings, few threads, and this copy of the package."""
    ours = {"DIR": str(root), "PROJECT": project, "RUN_ID": run_id, "MODE": "on", "QUIET": "1"}
    unset = ("FANFOLD_RANK", "FANFOLD_WORLD_SIZE", "FANFOLD_NAME")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {**kept, **{f"FANFOLD_{name}": value for name, value in ours.items()}, **same_modules(),
            "OMP_NUM_THREADS": str(min(threads, 4))}  # fmt: skip


def _steps(trainer: subprocess.Popen[Any], path: Path) -> Iterator[int]:
    """Yield the number of steps done, read from the journal while it is written, until the training ends."""
    done = 0
    while trainer.poll() is None:
        time.sleep(0.25)
        with contextlib.suppress(RunNotFound):
            losses = [latest["loss"] for journal in open_run(path).journals if "loss" in (latest := journal.latest())]
            done = max((step + 1 for step, *_ in losses), default=0)
        yield done


def _narrated(args: argparse.Namespace, steps: Iterator[int]) -> Iterator[int]:
    """Pass the steps on. Without a terminal for a progress bar, print a line at the start and at every fifth of the way."""
    shown = -1
    for step in steps:
        if not (sys.stderr.isatty() or args.json) and step * 5 // args.steps > shown:
            shown = step * 5 // args.steps
            output.remark(args, f"  step {step} of {args.steps}" if step else "  starting the processes, which import torch ...")
        yield step


def _print_ranks(printed: show_sections.RunPrinter) -> None:
    """Print the fold over ranks: the mean, and which rank was lowest and highest."""
    printed.line(("Over ranks", "bold"), (", at the last step", "dim"))
    for key, title in FOLDED.items():
        fold = printed.run.series(key, fold="mean")
        folded: Any = (fold.min, fold.max, fold.min_rank, fold.max_rank)
        low, high, low_rank, high_rank = (column[-1] for column in folded)
        printed.line((f"  {title:<14}", "dim"), f"mean {number(float(fold.values[-1])):>8}",
                     (f"   lowest {number(float(low)):>8} (rank {low_rank})", "green"),
                     (f"   highest {number(float(high)):>8} (rank {high_rank})", "yellow"))  # fmt: skip
    printed.line()


def _print_hints(printed: show_sections.RunPrinter, args: argparse.Namespace) -> None:
    """Print what to try next."""
    place = f" --dir {args.dir}" if args.dir else ""
    where = f", dir={clean(args.dir)!r}" if args.dir else ""
    printed.line(("Next", "bold"))
    call = _command()
    for command, what in (
        (f"{call} ui{place}", "the dashboard in the browser"),
        (f"{call} ls{place}", "all runs"),
        (f"{call} show -{place}", "the newest run, as above"),
        (f"{call} tail - -f{place}", "its metrics, live while it trains"),
        (f"{call} export - -o demo.csv{place}", "its metrics as a table"),
    ):
        printed.line("  ", (f"{clean(command):<{31 + len(call) + len(place)}}", "cyan"), (what, "dim"))
    printed.line("  ", ("python", "cyan"), (" >>> ", "dim"), f"fanfold.open({clean(printed.run.id)!r}{where}).to_pandas()")
    printed.line()


def _command() -> str:
    """Return how to call this fanfold from here: by name if that is the one on the PATH, else by its path."""
    script = Path(sys.executable).with_name("fanfold")
    found = shutil.which("fanfold")
    if found is not None and Path(found).resolve() == script.resolve():
        return "fanfold"
    if script.exists():
        return os.path.relpath(script) if script.is_relative_to(Path.cwd()) else str(script)
    return f"{sys.executable} -m fanfold"
