"""A Trainer's information for trackers: the config, the checkpoint folder, the finished model."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import guard, notices
from ..facts.mask import mask

# Values logged once, at the end of training: single values of the whole run rather than points of a curve.
SUMMARY = frozenset({"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"})
STAGED = ".fanfold-upload-"  # folders of copies waiting for upload
TRUE = frozenset({"1", "ON", "YES", "TRUE"})


def truth(variable: str) -> bool:
    """Read a yes/no value from the environment, as Transformers does."""
    return os.environ.get(variable, "").upper() in TRUE


def rewrite_logs(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs under Transformers' report names: `eval_x` is `eval/x`, `test_x` is `test/x`, everything else `train/…`."""
    return {_place(key): value for key, value in logs.items()}


def _place(key: str) -> str:
    for part in ("eval", "test"):
        if key.startswith(f"{part}_"):
            return f"{part}/{key[len(part) + 1 :]}"
    return f"train/{key}"


def arguments_of(args: Any) -> dict[str, Any]:
    """Return training arguments as a dict without secrets."""
    found = args.to_dict() if hasattr(args, "to_dict") else dict(vars(args))
    return dict(mask(found))  # type: ignore[call-overload, no-any-return]


def model_config(model: Any) -> dict[str, Any] | None:
    """Return a model's own config without secrets, or None if it has none."""
    config = getattr(model, "config", None)
    if config is None:
        return None
    if not isinstance(config, Mapping):
        config = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return dict(mask(dict(config)))  # type: ignore[call-overload, no-any-return]


def configuration(args: Any, model: Any, *, peft: bool = True) -> dict[str, Any]:
    """Return model and training config as one dict; training takes precedence."""
    found = {**(model_config(model) or {}), **arguments_of(args)}
    if peft and getattr(model, "peft_config", None) is not None:
        found = {"peft_config": model.peft_config, **found}
    return found


def parameter_count(model: Any) -> int | None:
    """Return how many parameters a model has, or None if unknown."""
    if hasattr(model, "num_parameters"):
        return int(model.num_parameters())
    if hasattr(model, "parameters"):
        return sum(int(parameter.numel()) for parameter in model.parameters() if hasattr(parameter, "numel"))
    return None


def checkpoint_of(args: Any, state: Any) -> Path | None:
    """Return the folder of the checkpoint just saved; in a search, it is inside the trial's own folder."""
    name, home = f"checkpoint-{state.global_step}", Path(args.output_dir)
    trials = home.glob(f"*/{name}") if state.is_hyper_param_search else ()
    found = [folder for folder in (home / name, *trials) if folder.is_dir()]
    if not found:
        notices.once(
            "report:no checkpoint",
            f"there is no {name} in {home}, so it is not uploaded. Training continues. A Trainer that saves elsewhere needs an "
            "on_save of its own.",
        )
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def staged_checkpoint(args: Any, state: Any) -> Path | None:
    """Return a copy of the checkpoint just saved, to be uploaded and then passed to unstage()."""
    found = checkpoint_of(args, state)
    if found is not None:
        with guard("set a checkpoint aside for its upload"):
            return staged(found)
    return None


def staged(folder: Path) -> Path:
    """Return a hard-linked copy of a checkpoint: the Trainer may remove the checkpoint before it is uploaded."""
    target = Path(tempfile.mkdtemp(prefix=STAGED, dir=folder.parent)) / folder.name
    shutil.copytree(folder, target, copy_function=_link)
    return target


def unstage(folder: Path) -> None:
    """Remove a copy made by staged()."""
    shutil.rmtree(folder.parent, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # hard links are not supported here
        shutil.copy2(source, target)


@contextlib.contextmanager
def saved_model(args: Any, model: Any, processing_class: Any) -> Iterator[Path | None]:
    """Yield a folder with the saved model, or None if this process does not hold all of it."""
    if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
        notices.once(
            "report:sharded model",
            "the model is spread over processes, so the final model is not uploaded from this one. Training is not touched. "
            "Upload checkpoints instead, or the folder trainer.save_model() writes.",
        )
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        save_model(model, processing_class, Path(folder))
        (Path(folder) / "model_architecture.txt").write_text(f"{model}\n", encoding="utf-8")
        yield Path(folder)


def save_model(model: Any, processing_class: Any, folder: Path) -> None:
    """Save a model and its processing class to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        import torch

        torch.save(model.state_dict(), folder / "pytorch_model.bin")
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)
