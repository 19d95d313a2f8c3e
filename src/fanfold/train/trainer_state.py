"""The Trainer's part of a checkpoint: weights, optimizer, schedule, scaler and random states.

Everything is read without unpickling code. Random states are stored per rank; everything else by the main process.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RunError, SettingError, needed, notices
from ..process import detect

if TYPE_CHECKING:
    from .arguments import TrainingArguments
    from .trainer import Trainer

WEIGHTS, OPTIMIZER, SCHEDULER, SCALER = "model.safetensors", "optimizer.pt", "scheduler.pt", "scaler.pt"


def make_accelerator(args: TrainingArguments) -> Any:
    """Return the Accelerator for `args`. Its state is shared by the process; a different precision resets it."""
    with needed("accelerate", "accelerate", "Trainer"):
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState
        from accelerate.utils import DistributedDataParallelKwargs
    precision, cpu = "bf16" if args.bf16 else "fp16" if args.fp16 else "no", on_cpu(args.use_cpu)
    known = AcceleratorState._shared_state  # noqa: SLF001 - there is no other way to read it without setting it
    if known and (known.get("_mixed_precision") != precision or bool(known.get("_cpu")) != cpu):
        AcceleratorState._reset_state(reset_partial_state=True)  # noqa: SLF001 - as above
    handlers = []
    if args.ddp_find_unused_parameters is not None:
        handlers.append(DistributedDataParallelKwargs(find_unused_parameters=args.ddp_find_unused_parameters))
    made = Accelerator(mixed_precision=precision, cpu=cpu, kwargs_handlers=handlers)
    _check_ranks(made)
    return made


def reset_accumulation(accelerator: Any) -> None:
    """Reset the gradient accumulation state that all Accelerators of a process share.

    An interrupted `accelerator.accumulate`, or another Trainer that was stopped, leaves it in the middle of a step:
    `optimizer.step()` would then do nothing, and losses would be divided by another training's number of batches.
    """
    from accelerate.state import GradientState

    GradientState()  # fills in the defaults if they were cleared
    accumulate(accelerator, last=True)
    accelerator.gradient_state.dataloader_references = [None]
    accelerator.step = 0


def accumulate(accelerator: Any, *, last: bool) -> None:
    """Set the shared accumulation state for one batch: whether it is the `last` of its step.

    Every batch needs it: a callback that trains something else with an Accelerator of its own leaves that one's state behind.
    """
    state = accelerator.gradient_state
    state._set_sync_gradients(last)  # noqa: SLF001 - Transformers' Trainer sets it the same way
    state.plugin_kwargs["num_steps"] = 1  # the loop itself divides by the accumulated batches


class FirstStepCheck:
    """A check that the first `optimizer.step()` of a training reaches the torch optimizer; afterwards it costs nothing."""

    def __init__(self, optimizer: Any) -> None:
        inner = getattr(optimizer, "optimizer", optimizer)
        register = getattr(inner, "register_step_post_hook", None)
        self.pending = register is not None  # a non-torch optimizer is called directly, so nothing can skip it
        self._stepped = False
        self._hook = register(self._on_step) if register is not None else None

    def _on_step(self, *_call: Any) -> None:
        self._stepped = True

    def confirm(self, *, overflow: bool) -> None:
        """Raise if the optimizer was not called; after an update skipped because of an overflow, check again at the next one."""
        if self._stepped and self._hook is not None:
            self._hook.remove()
            self.pending = False
        elif not overflow:
            raise RunError(
                "optimizer.step() returned without updating the weights, so nothing would be learned. Training was stopped at "
                "its first step. Accelerate skips updates while its shared GradientState says sync_gradients=False: look for "
                "code that sets it while a loss is computed, such as accelerator.accumulate() inside the model."
            )


def on_cpu(asked: bool) -> bool:
    """Return whether to compute on the CPU. Ranks without a device must request it: Accelerate would not connect them."""
    import torch

    device = torch.accelerator.is_available() if hasattr(torch, "accelerator") else torch.cuda.is_available()
    return asked or (detect().world_size > 1 and not device)


def _check_ranks(accelerator: Any) -> None:
    me = detect()
    if accelerator.num_processes != me.world_size:
        raise SettingError(
            f"this is rank {me.rank} of {me.world_size} ({me.launcher}), but Accelerate opened a group of "
            f"{accelerator.num_processes}: the ranks would train apart and overwrite each other's checkpoints. Nothing was "
            "started. Launch with torchrun or accelerate launch; where each process is meant to train by itself, set "
            "FANFOLD_RANK=0 and FANFOLD_WORLD_SIZE=1."
        )


def seed_everything(seed: int) -> None:
    """Seed every random generator a training uses."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # including those of every GPU


def model_facts(model: Any) -> dict[str, Any]:
    """Return a run's facts about a model: its own config, and its size."""
    config: Any = getattr(model, "config", None)
    facts = {"model": config.to_dict()} if hasattr(config, "to_dict") else {}
    return {**facts, "parameters": sum(parameter.numel() for parameter in model.parameters())}


def save(trainer: Trainer, folder: Path) -> None:
    """Write this rank's part of a checkpoint."""
    import torch

    if trainer.is_world_process_zero():
        save_weights(trainer.model, folder, trainer.processing_class)
        (folder / "training_args.json").write_text(trainer.args.to_json_string(), encoding="utf-8")
    if trainer.args.save_only_model:
        return
    rank = trainer.accelerator.process_index
    torch.save(_random_states(), folder / f"rng_state_{rank}.pth")
    if trainer.is_world_process_zero():
        torch.save(trainer.optimizer.state_dict(), folder / OPTIMIZER)
        torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER)
        if trainer.accelerator.scaler is not None:
            torch.save(trainer.accelerator.scaler.state_dict(), folder / SCALER)


def save_weights(model: Any, folder: Path, processing_class: Any = None) -> None:
    """Write a model's weights, with its own method if it has one."""
    from safetensors.torch import save_model

    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        save_model(model, str(folder / WEIGHTS))
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)


def load_weights(model: Any, folder: Path) -> None:
    """Load a model's weights."""
    from safetensors.torch import load_model

    if not (folder / WEIGHTS).is_file():
        raise SettingError(
            f"there are no weights in {folder}: {WEIGHTS} is missing. Nothing was loaded. Choose another checkpoint."
        )
    load_model(model, folder / WEIGHTS)


def load_optimizer(trainer: Trainer, folder: Path) -> None:
    """Load optimizer, schedule and scaler; a checkpoint with only the model has none."""
    import torch

    if not (folder / OPTIMIZER).is_file():
        notices.once(
            f"no optimizer:{folder}",
            f"{folder} keeps a model and no optimizer, so training continues with a fresh one and will not end where an "
            "uninterrupted one would. Save with save_only_model=False to keep it.",
        )
        return
    device = "cpu"  # the optimizer moves its states to the device of its parameters
    trainer.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, map_location=device, weights_only=True))
    trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER, map_location=device, weights_only=True))
    if trainer.accelerator.scaler is not None and (folder / SCALER).is_file():
        trainer.accelerator.scaler.load_state_dict(torch.load(folder / SCALER, map_location=device, weights_only=True))


def _random_states() -> dict[str, Any]:
    import numpy as np
    import torch

    kind, keys, *rest = np.random.get_state()
    states = {"python": random.getstate(), "torch": torch.get_rng_state()}
    states["numpy"] = (str(kind), torch.as_tensor(np.asarray(keys, dtype=np.int64)), *rest)
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def load_random_states(folder: Path, rank: int) -> None:
    """Restore a rank's random states; warn once if the checkpoint was saved by a different number of ranks."""
    import numpy as np
    import torch

    path = folder / f"rng_state_{rank}.pth"
    if not path.is_file():
        notices.once(
            f"no random states:{folder}",
            f"{path.name} is not in {folder}, so random numbers (dropout, augmentation) start over, and training will not end "
            "exactly where an uninterrupted one would. Resume with as many processes as saved it.",
        )
        return
    states = torch.load(path, map_location="cpu", weights_only=True)
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
