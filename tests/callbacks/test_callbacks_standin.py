"""The module in the place of transformers.trainer_callback: same names, same signatures, same training under the real Trainer."""

import inspect
import json
import subprocess
import sys

import pytest

import fanfold.callbacks

SCRIPT = """
import json, logging, sys
which, out = sys.argv[1:]
if which == "ours":
    import fanfold.callbacks
    sys.modules["transformers.trainer_callback"] = fanfold.callbacks
import torch, transformers
from transformers import Trainer, TrainingArguments, trainer_callback as module
from transformers.trainer_callback import EarlyStoppingCallback, TrainerCallback

said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append([record.args == (), "Recorder" in record.msg])
module.logger.addHandler(Keep())

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)
    def forward(self, x, labels=None):
        y = self.layer(x)
        return {"loss": ((y - labels) ** 2).mean(), "logits": y}

torch.manual_seed(1)
data = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(24)]
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_") and name != "on_exception"]

class Recorder(TrainerCallback):
    def __init__(self):
        self.events = []
for event in EVENTS:
    def hear(self, args, state, control, _event=event, **kwargs):
        flags = "".join(str(int(value)) for value in control.state()["args"].values())
        self.events.append([_event, state.global_step, flags, sorted(kwargs)])
    setattr(Recorder, event, hear)

def train(name, *callbacks, resume=None, **given):
    recorder = Recorder()
    args = TrainingArguments(f"{out}/{name}", **{**dict(use_cpu=True, report_to="none", disable_tqdm=True, per_device_train_batch_size=4), **given})
    trainer = Trainer(Model(), args, train_dataset=data, eval_dataset=data[:8], callbacks=[recorder, *callbacks])
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.predict(data[:4])
    history = [{k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k} for logs in trainer.state.log_history]
    kept = json.load(open(f"{out}/{name}/checkpoint-{trainer.state.global_step}/trainer_state.json"))["stateful_callbacks"] if given.get("save_strategy") != "no" else {}
    weights = [p.tolist() for p in trainer.model.parameters()]
    return {"events": recorder.events, "history": history, "kept": kept, "weights": weights, "fields": sorted(vars(trainer.state)), "metrics": sorted(result.metrics)}

report = {
    "steps": train("steps", max_steps=7, logging_steps=2, eval_strategy="steps", eval_steps=3, save_steps=4, logging_first_step=True),
    "epochs": train("epochs", num_train_epochs=2, logging_strategy="epoch", eval_strategy="epoch", save_strategy="epoch", gradient_accumulation_steps=4),
    "early": train("early", EarlyStoppingCallback(1, 100.0), num_train_epochs=5, eval_strategy="epoch", save_strategy="epoch",
                   load_best_model_at_end=True, metric_for_best_model="loss"),
    "twice": train("twice", Recorder(), max_steps=3, logging_steps=2, save_strategy="no", disable_tqdm=False),
}
report["said"] = list(said)
report["resumed"] = train("steps", EarlyStoppingCallback(3), EarlyStoppingCallback(4), max_steps=12, logging_steps=2, eval_strategy="steps", eval_steps=4,
                          save_steps=4, resume=f"{out}/steps/checkpoint-4", metric_for_best_model="loss", load_best_model_at_end=True) if which == "ours" else None
print("REPORT " + json.dumps(report))
"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """What the real Trainer does with Transformers' own callbacks, and with ours in their place; both at the same time."""
    running = {}
    for which in ("theirs", "ours"):
        folder = tmp_path_factory.mktemp(which)
        running[which] = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, which, str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    found = {}
    for which, process in running.items():
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        found[which] = json.loads(out.split("REPORT ", 1)[1])
    return found


@pytest.mark.parametrize("configuration", ["steps", "epochs", "early", "twice"])
def test_the_real_trainer_does_the_same_with_our_module(reports, configuration):
    ours, theirs = reports["ours"][configuration], reports["theirs"][configuration]
    assert ours["events"] == theirs["events"]
    assert len(ours["events"]) > 10
    for name in ("kept", "weights"):
        assert ours[name] == theirs[name]
    hidden = {"total_flos"}  # their printer takes it out of everybody's dict; ours leaves it
    assert [{k: v for k, v in logs.items() if k not in hidden} for logs in ours["history"]] == [
        {k: v for k, v in logs.items() if k not in hidden} for logs in theirs["history"]
    ]
    assert set(theirs["fields"]) <= set(ours["fields"])
    assert set(ours["metrics"]) - set(theirs["metrics"]) <= hidden
    assert set(theirs["metrics"]) <= set(ours["metrics"])


def test_warnings_go_through_the_modules_logger_as_ready_strings(reports):
    assert [said for said in reports["ours"]["said"] if said[1]] == [[True, True]]
    assert reports["ours"]["said"] == reports["theirs"]["said"]


def test_callbacks_added_on_a_resume_do_not_break_the_first_save(reports):
    resumed = reports["ours"]["resumed"]
    assert resumed["events"][-1][1] == 12
    assert resumed["kept"]["EarlyStoppingCallback"]["args"]["early_stopping_patience"] == 4


def test_every_public_name_has_their_signature():
    from transformers import trainer_callback as theirs

    names = [
        name
        for name, thing in vars(theirs).items()
        if getattr(thing, "__module__", "") == theirs.__name__ and inspect.isclass(thing)
    ]
    assert len(names) == 9
    assert hasattr(fanfold.callbacks, "logger")
    for name in [
        name for name in vars(theirs) if name in ("IntervalStrategy", "SaveStrategy", "TrainingArguments", "has_length", "tqdm")
    ]:
        assert getattr(fanfold.callbacks, name) is getattr(theirs, name)
    for name in names:
        theirs_class, our_class = getattr(theirs, name), getattr(fanfold.callbacks, name)
        assert parameters(our_class)[: len(parameters(theirs_class))] == parameters(theirs_class)
        for method, function in vars(theirs_class).items():
            if not callable(function) or (method.startswith("__") and method != "__init__"):
                continue
            ours, wanted = parameters(getattr(our_class, method)), parameters(getattr(theirs_class, method))
            assert [p for p in ours if p[1] != "keyword-only"] == wanted, (name, method)


def parameters(function):
    return [(p.name, p.kind.description, p.default) for p in inspect.signature(function).parameters.values()]
