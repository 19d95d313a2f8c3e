"""The demo's training: a small character-level transformer on made-up sentences, data-parallel on two CPU processes.

`train()` starts torchrun on this module and watches the run while it is written; the lower half is what each process
runs. torch is imported late.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import FanfoldError, MissingExtra, RunNotFound
from ..journal.directory import run_path

SUBJECTS = "the cat,a small dog,the old fox,my sister,the captain,a quiet owl,the moon,every child".split(",")
VERBS = "sees,finds,follows,paints,remembers,carries,counts,hears".split(",")
OBJECTS = "the sea,a red boat,seven stars,the long road,an empty house,the first snow,a paper kite,her name".split(",")
ENDS = "at night,in spring,without a word,once more,by the river,and smiles".split(",")
ALPHABET = "abcdefghijklmnopqrstuvwxyz .\n"
CONTEXT, BATCH, WIDTH, HEADS, LAYERS, PEAK_LR = 48, 16, 48, 4, 2, 4e-3


# In the process that was asked for the demo


def train(root: Path, project: str, *, ranks: int, steps: int, quiet: bool = False) -> str:
    """Train on `ranks` processes and return the run's id."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("the demo trains a model with torch, which is not installed. No run was made. Run: pip install torch")
    run_id = secrets.token_hex(6)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
               "-m", "fanfold.cli.demo_training", str(steps)]  # fmt: skip
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        environment = _environment(root, project, run_id, ranks)
        trainer = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            _watch(trainer, run_path(root, project, run_id), ranks, steps, quiet)
        finally:
            _stop(trainer)
        if trainer.returncode:
            raise _failed(trainer.returncode, said)
    return run_id


def _environment(root: Path, project: str, run_id: str, ranks: int) -> dict[str, str]:
    """Return the trainers' environment: our settings, few threads, and this very package."""
    ours = {"DIR": str(root), "PROJECT": project, "RUN_ID": run_id, "MODE": "on", "QUIET": "1"}
    kept = {
        name: value for name, value in os.environ.items() if name not in ("FANFOLD_RANK", "FANFOLD_WORLD_SIZE", "FANFOLD_NAME")
    }
    path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = max(1, (os.cpu_count() or 1) // ranks)
    return {**kept, **{f"FANFOLD_{name}": value for name, value in ours.items()}, "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": str(min(threads, 4))}  # fmt: skip


def _watch(trainer: subprocess.Popen[Any], path: Path, ranks: int, steps: int, quiet: bool) -> None:
    """Wait for the end; on a terminal, show how far it is, read from the journal while it is written."""
    if quiet or not sys.stderr.isatty():
        if not quiet:
            print(f"Training a small transformer on {ranks} processes, {steps} steps ...", file=sys.stderr)
        trainer.wait()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"Starting {ranks} processes", total=steps)
        for step, loss in _progress(trainer, path):
            bar.update(task, completed=step + 1, description=f"Training on {ranks} processes, loss {loss:.3f}")


def _progress(trainer: subprocess.Popen[Any], path: Path) -> Iterator[tuple[int, float]]:
    from ..store import StoredRun, open_run

    run: StoredRun | None = None
    while trainer.poll() is None:
        time.sleep(0.25)
        with contextlib.suppress(RunNotFound):
            run = run.refresh() if run is not None else open_run(path)
        for journal in run.journals if run is not None else ():
            last = journal.latest().get("loss")
            if last is not None and journal.header.rank == 0:
                yield last[0], float(last[2])


def _stop(trainer: subprocess.Popen[Any]) -> None:
    if trainer.poll() is None:
        trainer.terminate()  # torchrun ends its workers
        trainer.wait(30)


def _failed(code: int, said: Any) -> FanfoldError:
    said.seek(0)
    tail = "".join(said.readlines()[-15:])
    return FanfoldError(
        f"the demo's training ended with exit code {code}. What it logged until then is kept (`fanfold show -`). "
        f"Its last words, for a report:\n{tail}"
    )


# In each training process


def sentence(dice: random.Random) -> str:
    return f"{dice.choice(SUBJECTS)} {dice.choice(VERBS)} {dice.choice(OBJECTS)} {dice.choice(ENDS)}.\n"


def corpus(seed: int, count: int = 400) -> list[int]:
    """Make up a text, as numbers."""
    dice = random.Random(seed)
    return [ALPHABET.index(char) for _ in range(count) for char in sentence(dice)]


def build() -> Any:
    """Make the model: characters in, the next character's odds out."""
    import torch
    from torch import nn

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.characters = nn.Embedding(len(ALPHABET), WIDTH)
            self.places = nn.Embedding(CONTEXT, WIDTH)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH * 4, 0.0, "gelu", batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.odds = nn.Linear(WIDTH, len(ALPHABET))

        def forward(self, text: Any) -> Any:
            length = text.shape[1]
            mask = torch.full((length, length), float("-inf")).triu(1)
            hidden = self.characters(text) + self.places(torch.arange(length))
            return self.odds(self.layers(hidden, mask=mask))

    return Model()


class Trainer:
    """One rank's training loop, and what it logs."""

    def __init__(self, steps: int) -> None:
        import torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        import fanfold

        self.torch, self.steps, self.rank = torch, steps, dist.get_rank()
        torch.manual_seed(7)
        self.model = DistributedDataParallel(build())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=PEAK_LR)
        torch.manual_seed(100 + self.rank)  # each rank draws batches of its own
        self.text, self.unseen = torch.tensor(corpus(self.rank)), torch.tensor(corpus(99, 60))
        size = sum(parameter.numel() for parameter in self.model.parameters())
        self.run = fanfold.init(
            tags=["demo"],
            notes="a character-level transformer on made-up sentences",
            config={"model": {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "parameters": size},
                    "batch": BATCH, "context": CONTEXT, "lr": PEAK_LR, "steps": steps},
        )  # fmt: skip
        self.run.define_metric("val/*", summary="min")

    def batch(self, text: Any, count: int = BATCH) -> tuple[Any, Any]:
        starts = self.torch.randint(len(text) - CONTEXT - 1, (count,))
        rows = self.torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def losses(self, model: Any, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        odds = model(pair[0])
        loss = self.torch.nn.functional.cross_entropy(odds.flatten(0, 1), pair[1].flatten())
        return loss, (odds.argmax(-1) == pair[1]).float().mean()

    def train(self) -> None:
        for step in range(self.steps):
            began = time.perf_counter()
            lr = PEAK_LR * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / self.steps))
            self.optimizer.param_groups[0]["lr"] = lr
            loss, accuracy = self.losses(self.model, self.batch(self.text))
            self.optimizer.zero_grad()
            loss.backward()
            norm = self.torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            took = time.perf_counter() - began
            self.run.log({"loss": loss, "accuracy": accuracy, "lr": lr, "grad_norm": norm, "step_seconds": took,
                          "throughput": BATCH * CONTEXT / took}, step=step)  # fmt: skip
            if self.rank == 0 and (step % max(1, self.steps // 12) == 0 or step == self.steps - 1):
                self.look(step)

    def look(self, step: int) -> None:
        """Log what only one rank has to: the unseen text, the weights, a sample."""
        import fanfold

        model = self.model.module
        with self.torch.no_grad():
            loss, accuracy = self.losses(model, self.batch(self.unseen, 64))
        weights = model.odds.weight.detach()
        picture = fanfold.Image(_picture(weights), caption=f"output weights at step {step}")
        self.run.log({"val/loss": loss, "val/accuracy": accuracy, "weights/output": fanfold.Histogram(weights),
                      "pictures/output": picture, "sample": self.write("the ")}, step=step)  # fmt: skip

    def write(self, text: str, length: int = 48) -> str:
        """Let the model write on."""
        while len(text) < length:
            tail = [ALPHABET.index(char) for char in text[-CONTEXT:]]
            with self.torch.no_grad():
                odds = self.model.module(self.torch.tensor([tail]))[0, -1]
            text += ALPHABET[int(odds.argmax())]
        return text.partition("\n")[0]

    def finish(self) -> None:
        import fanfold

        if self.rank == 0:
            begins = ["the ", "a small ", "my ", "every "]
            rows = [[begin, self.write(begin)] for begin in begins]
            self.run.log({"samples": fanfold.Table(["begin", "written"], rows)}, step=self.steps - 1)
        self.run.finish()


def _picture(weights: Any) -> Any:
    """Return a matrix as grey values between 0 and 1, each a block of dots."""
    low, high = weights.min(), weights.max()
    grey = (weights - low) / (high - low).clamp(min=1e-9)
    return grey.repeat_interleave(4, 0).repeat_interleave(4, 1).numpy()


def main(steps: int) -> None:
    """Train one rank."""
    import torch.distributed as dist

    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one node: no need to resolve its name
    dist.init_process_group("gloo")
    try:
        trainer = Trainer(steps)
        trainer.train()
        trainer.finish()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]))
