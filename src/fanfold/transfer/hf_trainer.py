"""Transformers' Trainer: the log history in the `trainer_state.json` of an output folder and its checkpoints.

Each checkpoint repeats the history up to its step, and a folder may hold those of several restarts: they are merged. The
states have no times, so a run lasts from its first checkpoint to its last one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..journal.files import is_folder
from ..plain import plain
from .events import End, Event, Facts, Found, Start, Values
from .reading import Account, Gather, number, read_json, reread, step_of

STATE = "trainer_state.json"
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_CONFIG = (
    "max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps", "num_input_tokens_seen",
)  # fmt: skip
_BEST = ("best_metric", "best_global_step", "best_model_checkpoint")


class State(NamedTuple):
    """One readable trainer_state.json."""

    path: Path
    changed: int  # nanoseconds
    data: dict[str, Any]

    @property
    def step(self) -> int:
        return step_of(self.data.get("global_step")) or 0

    @property
    def history(self) -> list[Any]:
        found = self.data.get("log_history")
        return found if isinstance(found, list) else []


class HFTrainerImporter:
    """Output folders of Transformers' Trainer."""

    kind = "hf_trainer"
    title = "Transformers Trainer"

    def find(self, path: Path) -> Iterator[Found]:
        folder = path.parent if path.name == STATE and path.is_file() else path
        if _CHECKPOINT.fullmatch(folder.name) and (folder / STATE).is_file():
            folder = folder.parent  # a checkpoint is a part of its run
        files = state_files(folder)
        states = [state for file in files if (state := _state(file)) is not None]
        if states or any(read_json(file) is None for file in files):  # what is damaged appears in the account
            folder = folder.absolute()
            yield Found(
                kind=self.kind, id=str(folder), paths=(folder,), project=folder.parent.name or "imported", name=folder.name,
                fanfold_id=_our_run(states),
            )  # fmt: skip

    def read(self, found: Found, position: Any = None) -> Iterator[Event]:
        yield from reread(lambda: self._events(found.paths[0]), position)

    def _events(self, folder: Path) -> Iterator[Event]:
        left, gather = Account(), Gather()
        states = []
        for file in state_files(folder):
            state = _state(file)
            if state is None:
                left.leave("checkpoint", f"its {STATE} cannot be read", file)
            else:
                states.append(state)
        states.sort(key=lambda state: (state.changed, state.step))
        if states:
            last = states[-1]
            began, ended = _times(states)
            yield Start(time_ns=began)
            yield _facts(folder, states)
            epoch_at = None
            for entry in merged(states, left):
                if epoch_at == (entry["step"], entry.get("epoch")):
                    del entry["epoch"]  # an evaluation repeats it
                else:
                    epoch_at = (entry["step"], entry.get("epoch"))
                yield from _entry(entry, gather, left)
            yield from gather.flush()
            if last.step >= (step_of(last.data.get("max_steps")) or 1 << 62):
                yield End(status="finished", time_ns=ended)
        _account_for_files(folder, left)
        yield from left.events()


def state_files(folder: Path) -> list[Path]:
    """Return the states below an output folder: its own, and those of its checkpoints."""
    if not is_folder(folder):
        return []
    inner = [one for one in folder.glob("checkpoint-*") if _CHECKPOINT.fullmatch(one.name) and is_folder(one)]
    places = [folder, *sorted(inner, key=lambda one: int(one.name.rpartition("-")[2][:18]))]
    return [place / STATE for place in places if (place / STATE).is_file()]


def _state(file: Path) -> State | None:
    data = read_json(file)
    if not isinstance(data, dict) or not isinstance(data.get("log_history"), list) or "global_step" not in data:
        return None
    return State(file, file.stat().st_mtime_ns, data)


def _our_run(states: list[State]) -> str | None:
    """Return the id of the fanfold run that recorded this training, which our callback saves in every checkpoint."""
    for state in states:
        callbacks = state.data.get("stateful_callbacks")
        note = callbacks.get("fanfold") if isinstance(callbacks, dict) else None
        if isinstance(note, dict) and isinstance(note.get("run"), str):
            return str(note["run"])
    return None


def _times(states: list[State]) -> tuple[int, int]:
    """Return when the training began and ended: the Trainer's own runtime says how long it took, if it got to its end."""
    began, ended = states[0].changed, states[-1].changed
    runtime = next((number(one.get("train_runtime")) for one in reversed(states[-1].history) if isinstance(one, dict)), None)
    if runtime and 0 < runtime < 1e9:
        began = min(began, ended - int(runtime * 1e9))
    return began, ended


def _facts(folder: Path, states: list[State]) -> Facts:
    last = states[-1]
    config = {name: last.data[name] for name in _CONFIG if last.data.get(name) is not None}
    trial = last.data.get("trial_params")
    models = (read_json(state.path.parent / "config.json") for state in reversed(states))
    model = next((one for one in models if isinstance(one, dict)), None)
    if isinstance(trial, dict) and trial:
        config["trial"] = trial
    if model is not None:
        config["model"] = model
    best = {name: last.data[name] for name in _BEST if last.data.get(name) is not None}
    name = last.data.get("trial_name")
    return Facts(name=str(name) if name else folder.name, config=plain(config), summary=plain(best) if best else None)


def merged(states: list[State], left: Account) -> list[dict[str, Any]]:
    """Return the entries of all states, each once, by step. Where two differ, the newest state counts."""
    known: dict[tuple[int, tuple[str, ...], int], dict[str, Any]] = {}
    for state in reversed(states):  # the newest first
        repeats: dict[tuple[int, tuple[str, ...]], int] = {}
        for entry in state.history:
            step = step_of(entry.get("step")) if isinstance(entry, dict) else None
            if step is None:
                left.leave("log entry", "it has no step", entry)
                continue
            shape = (step, tuple(sorted(map(str, entry))))
            place = (*shape, repeats.get(shape, 0))
            repeats[shape] = place[2] + 1
            if _same(known.setdefault(place, entry), entry):
                continue
            left.leave("log entry", "a newer checkpoint has other values at that step", f"step {step} in {state.path}")
    return [dict(entry) for entry in sorted(known.values(), key=lambda entry: step_of(entry["step"]) or 0)]


def _same(one: Any, two: Any) -> bool:
    return one is two or repr(one) == repr(two)  # NaN equals NaN here


def _entry(entry: dict[str, Any], gather: Gather, left: Account) -> Iterator[Event]:
    step = step_of(entry["step"])
    numbers, texts = {}, {}
    for name, value in entry.items():
        if name == "step":
            continue
        found = number(value)
        if found is not None:
            numbers[key_of(name)] = found
        elif isinstance(value, str):
            texts[key_of(name)] = value
        else:
            left.leave("value", f"it is a {type(value).__name__}, not a number", name)
    yield from gather.add(step, None, numbers)
    if texts:
        yield Values(step=step, time_ns=None, values=texts)


def key_of(name: str) -> str:
    """Return the name under which Transformers' own integrations log an entry's value: eval_loss is eval/loss."""
    for prefix in ("eval_", "test_"):
        if name.startswith(prefix):
            return f"{prefix[:-1]}/{name[len(prefix) :]}"
    return f"train/{name}"


def _account_for_files(folder: Path, left: Account) -> None:
    for place in {folder, *(file.parent for file in state_files(folder))}:
        if (place / "training_args.bin").is_file():
            left.leave("training_args.bin", "it is a pickle, which could run code when read", place)
        weights = [one for one in place.glob("*") if one.suffix in (".safetensors", ".bin", ".pt", ".pth")]
        count = len([one for one in weights if one.name != "training_args.bin"])
        if count:
            left.leave("checkpoint file", "weights and optimizer states stay where they are", place, count)
