"""Train tiny models with reporting callbacks: `python reporting_train.py CASES.json`, each case in its own process.

They are forked after the slowest imports, which start no threads; each ends like a normal program.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from reporting_cases import SECRET

AT_ONCE = 3
ARGUMENTS = {
    "max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "save_total_limit": 1,
    "per_device_train_batch_size": 4, "use_cpu": True, "run_name": "tiny-run", "disable_tqdm": True,
}  # fmt: skip


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, width=4, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class Tiny(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config=None, fails_at=None):
        super().__init__(config or TinyConfig(api_key=SECRET))
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(self.config.width, 1)
        self.post_init()
        self.calls, self.fails_at = 0, fails_at

    def _init_weights(self, module):
        """Leave the weights unchanged."""

    def forward(self, x=None, labels=None):
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("a bad batch")
        y = self.layer(x).squeeze(-1)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}


def fresh():
    return Tiny()


def data(count=16):
    torch.manual_seed(1)
    return [{"x": torch.randn(4), "labels": torch.tensor(float(i % 3))} for i in range(count)]


class Recorder(TrainerCallback):
    """Record what a Trainer passes to its callbacks."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not state.is_world_process_zero:
            return
        self.rows.append([state.global_step, {key: float(value) for key, value in logs.items()}])
        Path("logs.json").write_text(json.dumps(self.rows))

    def on_predict(self, args, state, control, metrics=None, **kwargs):
        self.on_log(args, state, control, metrics)


class Boom(TrainerCallback):
    """Raise after the first evaluation, if that is the run's last step."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise RuntimeError("a bad callback")


class Kill(TrainerCallback):
    """Kill the process in the middle of training, right after a log call."""

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == args.max_steps - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def made(kind, name, options):
    """Return a callback, with Transformers' own arguments where they differ from fanfold's."""
    if kind == "ours":
        from fanfold.callbacks.reporting import INTEGRATION_TO_CALLBACK as known
    else:
        from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK as known
    if name == "dvclive" and kind == "theirs":
        from dvclive import Live

        return known[name](live=Live(dir="dvclive", save_dvc_exp=False))
    return known[name](**options.get(name, {}))


def in_transformers(case):
    """Train, evaluate and predict with Transformers' Trainer."""
    callbacks = [made(case["kind"], name, case["options"]) for name in case["names"]]
    more = [Kill] if case["action"] == "kill" else []
    search = case["action"] == "search"
    model = None if search else Tiny(fails_at=case.get("fails_at"))
    trained = Trainer(model, arguments(TrainingArguments, case, report_to="none"), train_dataset=data(), eval_dataset=data(4),
                      callbacks=[*callbacks, Recorder, *more], model_init=fresh if search else None)  # fmt: skip
    follow(trained, case)


def in_trainer(case):
    """Train, evaluate and predict with fanfold's Trainer."""
    import fanfold

    args = arguments(fanfold.TrainingArguments, case, report_to=case["names"])
    more = {"boom": [Boom], "kill": [Kill]}.get(case["action"], [])
    follow(fanfold.Trainer(Tiny(), args, train_dataset=data(), eval_dataset=data(4), callbacks=[Recorder, *more]), case)


def arguments(cls, case, **more):
    return cls(output_dir="out", **{**ARGUMENTS, **more, **case.get("arguments", {})})


def follow(trained, case):
    if case["action"] == "search":
        trained.hyperparameter_search(lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-5, 1e-3)},
                                      n_trials=2, backend="optuna", direction="minimize")  # fmt: skip
        return
    trained.train()
    if case["action"] == "train":
        trained.evaluate()
        trained.predict(data(4))


def in_loop(case):
    """Train in a hand-written loop."""
    import fanfold

    model, batches = (
        Tiny(),
        [{key: torch.stack([row[key] for row in data()[i : i + 4]]) for key in ("x", "labels")} for i in range(0, 16, 4)],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fanfold.Loop(epochs=1, logging_steps=2, eval_steps=2, save_steps=2, output_dir="out", run_name="tiny-run", model=model,
                      evaluate=lambda: {"loss": float(model(**batches[0])["loss"].detach())}, save=model.save_pretrained, report_to=case["names"],
                      optimizer=optimizer, callbacks=[Recorder, *([Boom] if case["action"] == "boom" else [])]) as loop:  # fmt: skip
        for _epoch in loop.epochs():
            for batch in loop.steps(batches):
                loss = model(**batch)["loss"]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                loop.log({"loss": loss.detach()})


def in_flyte(case):
    """Train inside a Flyte task that runs locally."""
    from flytekit import FlyteContextManager, task

    training.case = case
    task(enable_deck=True)(training)()
    Path("sandbox").write_text(str(FlyteContextManager.current_context().file_access.local_sandbox_dir))


def training() -> None:
    in_transformers(training.case)


WAYS = {"transformers": in_transformers, "trainer": in_trainer, "loop": in_loop, "flyte": in_flyte}


def import_first():
    """Import, once for all cases, the libraries whose import starts nothing and reads no settings."""
    for module in (
        "alembic", "aim", "azure.storage.blob", "azureml.core", "fastapi", "matplotlib.figure", "neptune", "pandas",
        "plotly.graph_objects", "sqlalchemy", "torch.utils.tensorboard", "wandb",
    ):  # fmt: skip
        importlib.import_module(module)


def fork_all(cases):
    """Fork a process per rank of each case, a few cases at a time; return the case in the child, None in the parent."""
    running = {}
    waiting = [(case, rank) for case in cases for rank in range(case.get("ranks", 1))]
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            case, rank = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                become(case, rank)
                return case
            running[pid] = case, rank
        pid, status = os.wait()
        case, rank = running.pop(pid)
        Path(case["folder"], f"code-{rank}").write_text(str(os.waitstatus_to_exitcode(status)))
    return None


def become(case, rank):
    folder = Path(case["folder"])
    os.chdir(folder)
    os.environ.update(case["env"])
    out = os.open("output" if rank == 0 else f"output-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    tempfile.tempdir = None
    atexit.register(print, "the very end", flush=True)  # registered first, so it runs last: stdout must still work
    if case.get("ranks", 1) > 1:  # as torchrun does
        world = str(case["ranks"])
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1")


if __name__ == "__main__":
    import_first()
    mine = fork_all(json.loads(Path(sys.argv[1]).read_text()))
    if mine is not None:
        WAYS[mine["way"]](mine)
