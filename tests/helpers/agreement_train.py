"""A multi-rank training for test_agreement.py; it writes the step at which each rank ended, and how.

torchrun … agreement_train.py OUT KIND [name=value …]
"""

import json
import os
import random
import signal
import sys
import time

import torch
import torch.distributed as dist

import fanfold
from fanfold.callbacks import EarlyStoppingCallback, NonFiniteCallback, PreemptionCallback, TrainerCallback

torch.set_num_threads(1)
OUT, KIND = sys.argv[1], sys.argv[2]
OPTIONS = {"steps": 400, "at": 12, "signalled": 1, "first": 0.0, "pace": 0.01, "jitter": 0.0, "faster_after": 0, "eval_steps": 0,
           "save_steps": 0, "kill": -1} | {name: float(value) for name, value in (given.split("=") for given in sys.argv[3:])}  # fmt: skip
RANK = int(os.environ["RANK"])
random.seed(RANK)


def signal_now(step):
    if step == OPTIONS["at"] and OPTIONS["signalled"] == RANK:
        os.kill(os.getpid(), signal.SIGTERM)


def pause(step):
    """Sleep for the duration of a step: the first may be slow, and later ones ten times as fast as earlier ones."""
    seconds = OPTIONS["first"] if step == 1 else OPTIONS["pace"]
    if OPTIONS["faster_after"] and step > OPTIONS["faster_after"]:
        seconds /= 10
    time.sleep(seconds + random.uniform(0, OPTIONS["jitter"]))


class Watches(TrainerCallback):
    """Slow down the steps, send the signal, and record when checkpoints are saved."""

    def __init__(self):
        self.saved = []

    def on_step_begin(self, args, state, control, **kwargs):
        pause(state.global_step + 1)

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if KIND == "nonfinite" and state.global_step + 1 == OPTIONS["at"] and OPTIONS["signalled"] == RANK:
            next(model.parameters()).grad.fill_(float("nan"))

    def on_step_end(self, args, state, control, **kwargs):
        if KIND in ("preempted", "killed"):
            signal_now(state.global_step)
        if KIND == "killed" and state.global_step == OPTIONS["at"] and OPTIONS["kill"] == RANK:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)


class AsksOnOneRank(TrainerCallback):
    """Set flags of `control` on one rank only, as a callback that looks at its own rank's values does."""

    def on_step_end(self, args, state, control, **kwargs):
        if OPTIONS["signalled"] != RANK:
            return
        if state.global_step == OPTIONS["at"]:
            control.should_evaluate = control.should_save = True
        if state.global_step == OPTIONS["at"] + 8:
            control.should_training_stop = True


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        time.sleep(0.05 if not self.training and OPTIONS["eval_steps"] else 0.0)  # an evaluation takes a while
        return {"loss": (self.line(x).squeeze(-1) - labels).square().mean()}


def data(count):
    rows = torch.randn(count, 4, generator=torch.Generator().manual_seed(1))
    return [{"x": row, "labels": row.sum()} for row in rows]


def callbacks(watches):
    chosen = {"preempted": [PreemptionCallback()], "killed": [PreemptionCallback()], "nonfinite": [NonFiniteCallback(action="stop")],
              "flags": [AsksOnOneRank()], "early": [EarlyStoppingCallback(1)]}[KIND]  # fmt: skip
    return [watches, *chosen]


def train_with_trainer(watches):
    import accelerate

    steps = {name: OPTIONS[name] for name in ("eval_steps", "save_steps") if OPTIONS[name]}
    if KIND == "early":
        steps = {
            "eval_steps": 4,
            "save_steps": 4,
            "metric_for_best_model": "loss",
            "load_best_model_at_end": True,
            "learning_rate": 0.0,
        }  # so that no evaluation improves on the first
    arguments = fanfold.TrainingArguments(f"{OUT}/out", max_steps=int(OPTIONS["steps"]), per_device_train_batch_size=2, logging_steps=5,
                                          disable_tqdm=True, save_strategy="steps" if "save_steps" in steps else "no", **steps)  # fmt: skip
    trainer = fanfold.Trainer(
        Net(), arguments, train_dataset=data(64), eval_dataset=data(8), callbacks=callbacks(watches), run=False
    )
    trainer.train()
    assert accelerate.PartialState().num_processes == int(os.environ["WORLD_SIZE"])
    return trainer.state.global_step


def train_by_hand(watches):
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = data(2)
    batch = {"x": torch.stack([row["x"] for row in rows]), "labels": torch.stack([row["labels"] for row in rows])}

    def save(folder):
        torch.save(model.state_dict(), folder / f"weights-{RANK}.pt")

    loop = fanfold.Loop(False, max_steps=int(OPTIONS["steps"]), optimizer=optimizer, model=model.module, callbacks=callbacks(watches),
                        save=save, save_strategy="no", output_dir=f"{OUT}/out", evaluate=lambda: {"loss": 1.0})  # fmt: skip
    with loop:
        for _ in loop.epochs():
            for _ in loop.steps(range(1000)):
                loss = model(**batch)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return loop.state.global_step


def train_apart():
    """Train without a process group in a run of several ranks, so that ranks never wait for each other."""
    run = fanfold.init("apart", system=False)
    watches = Watches()
    loop = fanfold.Loop(run, max_steps=int(OPTIONS["steps"]), callbacks=callbacks(watches), save=lambda folder: None, save_strategy="no",
                        output_dir=f"{OUT}/out-{RANK}")  # fmt: skip
    with loop:
        for _ in loop.epochs():
            for _ in loop.steps(range(100000)):
                pass
    run.finish()
    return loop.state.global_step, watches


def main():
    watches, how = Watches(), os.environ.get("TRAIN_HOW", "trainer")
    if how == "apart":
        ended, watches = train_apart()
    else:
        ended = {"trainer": train_with_trainer, "by hand": train_by_hand}[how](watches)
    with open(f"{OUT}/{RANK}.json", "w") as file:
        json.dump({"step": ended, "saved": watches.saved}, file)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
