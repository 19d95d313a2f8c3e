"""Lightning: a logger for its real Trainer that writes a run on every rank and continues it after a restart.

Lightning calls its loggers on every rank and expects them to log on only one. Ours logs on all: each rank has its own series in
the run, and trackers get rank 0's, or a fold.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickletools
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from ..callbacks.state import TrainerState
from ..callbacks.tell import SteeredTraining
from ..errors import guard, missing_extra, notices, outcome
from ..probes.spans import Span
from ..recording.agreement import end_agreement
from ..recording.api import init
from ._session import TrainingSession


def _library() -> Any:
    """Import Lightning under the name the user has; `lightning` and `pytorch_lightning` are two copies of the same code."""
    names = ("lightning.pytorch", "pytorch_lightning")
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = error
    raise missing_extra("lightning", "lightning", "fanfold.frameworks.lightning") from reason


library: Any = _library()
KEY = "fanfold"
MARK = "fanfold run: "
MAX_PICKLE = 1 << 28
__all__ = ["FanfoldLogger"]


class FanfoldLogger(library.loggers.logger.Logger):  # type: ignore[misc]  # Lightning's types depend on which of its names is used
    """Record what a Trainer logs in a run, on every rank. Arguments are those of fanfold.init(), or `run`, your own run.

    A logger is one run: fit(), validate() and test() log to it, and it stays open until the process ends or fanfold.finish() is
    called. Checkpoints go to `<project>/<run id>/checkpoints` in `save_dir` (default: the Trainer's `default_root_dir`), with
    LightningCLI's `config.yaml` next to them, from the second attempt on in `attempt-2` and so on; `log_checkpoints` stores a
    copy of each checkpoint with the run. `min_lr` and `max_lr` limit what `fanfold tell` may set.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        run: Any = None,
        save_dir: str | os.PathLike[str] | None = None,
        log_checkpoints: bool = False,
        min_lr: float | None = None,
        max_lr: float | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.limits = (min_lr, max_lr)
        self._session = TrainingSession(project, run, **options)
        self._save_dir = None if save_dir is None else os.fspath(save_dir)
        self._log_checkpoints = log_checkpoints
        self._stored: dict[str, float] = {}
        self._step = 0
        self._steered = False

    @property
    def experiment(self) -> Any:
        """The run; opened by the Trainer during setup, once every process has its rank. See OtherRank for ranks above 0."""
        if self._session.run is None:
            trainer, checkpoint = _calling_trainer()
            self._session.begin(_note_in(checkpoint) if checkpoint is not None else None)
            if trainer is not None:
                trainer.callbacks.insert(0, CheckpointNote(self._session))  # callbacks that save stay last
        if not self._steered:
            self._steer(_calling_trainer()[0])
        run = self._session.run
        return run if run.is_main_process else OtherRank(run)

    def _steer(self, trainer: Any) -> None:
        """Let requests to the run steer the Trainer."""
        if trainer is not None:
            self._steered = True
            if not any(isinstance(one, Steering) and one.logger is self for one in trainer.callbacks):
                trainer.callbacks.insert(0, Steering(self))

    def _live(self) -> Any:
        """Return the open run to write to, as a new attempt if it had ended."""
        if self._session.run is None:
            _ = self.experiment
        return self._session.live()

    @property
    def live_run(self) -> Any:
        """The run on this rank itself."""
        return self._live()

    @property
    def name(self) -> str:
        return str(self.experiment.project)

    @property
    def version(self) -> str:
        return str(self.experiment.id)

    @property
    def save_dir(self) -> str:
        """Where checkpoints go. For the Trainer's `log_dir`, this attempt's folder inside it: Lightning never overwrites."""
        home = self._save_dir or _home_of_trainer()
        own = sys._getframe(1).f_code.co_name == "log_dir"  # noqa: SLF001 - Lightning reads this property for both
        if not own:
            return home
        attempt = getattr(self.experiment, "attempt", 1)
        again = (f"attempt-{attempt}",) if attempt > 1 else ()
        return os.path.join(home, self.name, self.version, *again)  # noqa: PTH118 - a path or a URL

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self._step = self._step if step is None else step
        self._live().log(metrics, step)

    def log_hyperparams(self, params: Any, *_args: Any, **_kwargs: Any) -> None:
        self._live().config.update(params)

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        run = self._live()
        if not run.is_main_process or "model" in run.config:
            return
        with guard("describe the model"):
            sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
            trainable = sum(size for size, grad in sizes if grad)
            facts = {
                "class": type(model).__name__,
                "parameters": sum(size for size, _ in sizes),
                "trainable_parameters": trainable,
            }
            run.config.update({"model": facts})
            self.log_text("model/graph", str(model))

    # Media, with the method names of other loggers

    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **each: Sequence[Any]) -> None:
        """Log a list of images; further arguments (`caption`) are also lists, with one item per image."""
        self._log_media("Image", key, images, step, each)

    def log_audio(self, key: str, audios: Sequence[Any], step: int | None = None, **each: Sequence[Any]) -> None:
        """Log a list of sounds; further arguments (`sample_rate`, `caption`) are also lists, with one item per sound."""
        self._log_media("Audio", key, audios, step, each)

    def log_video(self, key: str, videos: Sequence[Any], step: int | None = None, **each: Sequence[Any]) -> None:
        """Log a list of videos; further arguments (`fps`, `caption`) are also lists, with one item per video."""
        self._log_media("Video", key, videos, step, each)

    def log_table(
        self, key: str, columns: Sequence[str] | None = None, data: Any = None, dataframe: Any = None, step: int | None = None
    ) -> None:
        """Log a table, from columns and rows or from a DataFrame."""
        from .. import media

        self._log_at(key, media.Table(columns, data, dataframe=dataframe), step)

    def log_text(
        self, key: str, text: Any = None, data: Any = None, dataframe: Any = None, step: int | None = None, columns: Any = None
    ) -> None:
        """Log a text; with `columns` and `data`, or a DataFrame, a table of texts, as other loggers do."""
        from .. import media

        if isinstance(text, str):
            self._log_at(key, media.Text(text), step)
        else:
            self.log_table(key, text if columns is None else columns, data, dataframe, step)

    def _log_media(self, kind: str, key: str, items: Any, step: int | None, each: Mapping[str, Sequence[Any]]) -> None:
        from .. import media

        if not isinstance(items, list):
            raise TypeError(
                f"{key!r} was given a {type(items).__name__}. Nothing was logged. Pass a list with one item for each."
            )
        uneven = [name for name, values in each.items() if len(values) != len(items)]
        if uneven:
            raise ValueError(f"{', '.join(uneven)} of {key!r}: not {len(items)} items, one for each. Nothing was logged.")
        of_each = [{name: values[i] for name, values in each.items()} for i in range(len(items))]
        self._log_at(key, [getattr(media, kind)(item, **more) for item, more in zip(items, of_each, strict=True)], step)

    def _log_at(self, key: str, value: Any, step: int | None) -> None:
        self._live().log({key: value}, self._step if step is None else step)

    # Checkpoints and the end

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Store a copy of new checkpoints with the run, if requested."""
        found = {checkpoint_callback.last_model_path, checkpoint_callback.best_model_path, *checkpoint_callback.best_k_models}
        for path in sorted(filter(os.path.exists, found if self._log_checkpoints else ())):
            changed = os.path.getmtime(path)  # noqa: PTH204 - Lightning's paths are strings
            if self._stored.get(path) != changed:
                self._stored[path] = changed
                score = checkpoint_callback.best_k_models.get(path)
                facts = {} if score is None else {"score": float(score)}
                self._live().artifact(path, kind="checkpoint", **facts)

    def finalize(self, status: str) -> None:
        """Mark the run failed if an exception ends it; after success it stays open."""
        self._steered = False
        if status == "failed" and self._session.run is not None:
            self._session.fail(*sys.exc_info())
        else:
            self._session.end()


class OtherRank(library.loggers.logger.DummyExperiment):  # type: ignore[misc]  # as above
    """The run as ranks above 0 see it.

    Lightning's loggers give those ranks a dummy that accepts every call, so that a module can call
    `self.logger.experiment.anything()` without checking its rank. So does this one; the run's own methods work as on rank 0.
    """

    def __init__(self, run: Any) -> None:
        self.__dict__["_run"] = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name, self.nop)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._run, name, value)


def _spell_out() -> None:
    """Add the options of fanfold.init() to the logger's signature, from which LightningCLI takes names and types."""
    types = {"tags": list[str] | str | None, "dir": str | None, "fold": dict[str, str] | str | None,
             "tracker_kwargs": dict[str, dict[str, Any]] | None, "ops": bool | dict[str, Any] | None}  # fmt: skip
    types |= dict.fromkeys(("name", "id", "group", "notes", "durability"), str | None)
    types |= dict.fromkeys(("console", "system", "energy", "goodput", "stamp", "strict", "quiet"), bool | None)
    types |= {"trackers": list[str] | str | None, "relay": str, "resume": str | bool | None, "config": Any, "project": str | None}
    types |= {"run": Any, "save_dir": str | None, "log_checkpoints": bool}
    own = inspect.signature(FanfoldLogger.__init__).parameters
    options = [one for name, one in inspect.signature(init).parameters.items() if name in types and name not in own]
    kept = [one for one in own.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    spelled = [one.replace(annotation=types.get(one.name, one.annotation)) for one in (*kept, *options)]
    FanfoldLogger.__init__.__signature__ = inspect.Signature(spelled)  # type: ignore[attr-defined]
    FanfoldLogger.__init__.__annotations__ = {**types, "return": None}


_spell_out()


class CheckpointNote(library.Callback):  # type: ignore[misc]  # as above
    """A callback that writes into every checkpoint which run it belongs to, and times validations."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        self._evaluating = Span("evaluation")

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._evaluating.begin()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._evaluating.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._evaluating.cancel()

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[KEY] = MARK + json.dumps(self._session.note())


class Steering(library.Callback):  # type: ignore[misc]  # as above
    """A callback that carries out requests to the run (`fanfold tell`), on all ranks after the same step."""

    def __init__(self, logger: FanfoldLogger) -> None:
        self.logger = logger
        self._training = SteeredTraining(*logger.limits)
        self._state = TrainerState()

    def __getstate__(self) -> dict[str, Any]:  # a copy in another process has a training of its own
        return {"logger": self.logger, "_training": SteeredTraining(*self.logger.limits), "_state": TrainerState()}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._state = TrainerState(global_step=trainer.global_step, max_steps=max(0, trainer.max_steps))
        schedulers = [one.scheduler for one in trainer.lr_scheduler_configs[:1]] or [None]
        optimizers = trainer.optimizers[:1] or [None]
        can = trainer.enable_validation and hasattr(trainer.fit_loop.epoch_loop, "_should_check_val_fx")
        cannot = {} if can else {"evaluate": "the module has no validation_step, or the Trainer no validation data"}
        self._training.begin(self.logger.live_run, self._state, optimizers[0], schedulers[0], cannot)

    def on_train_batch_end(self, trainer: Any, *_batch: Any, **_more: Any) -> None:
        if trainer.global_step == self._state.global_step:
            return  # gradients are being accumulated
        step = self._state.global_step = trainer.global_step
        actions = self._training.step_end(step)
        if "log" in actions:
            self.logger.log_metrics(trainer.callback_metrics, step)
            self._training.did("log")
        if "save" in actions:
            path = self._checkpoint(trainer, step)
            alone = trainer.world_size == 1  # else the other ranks wait in there, too
            self._training.do("save", lambda: trainer.save_checkpoint(path), f"in {path}", alone=alone)
        if "evaluate" in actions:
            self._evaluate(trainer)
        if "stop" in actions:
            trainer.should_stop = True
            self._training.did("stop")

    def _checkpoint(self, trainer: Any, step: int) -> str:
        own = getattr(trainer.checkpoint_callback, "dirpath", None)
        folder = own or os.path.join(self.logger.save_dir, self.logger.name, self.logger.version, "checkpoints")  # noqa: PTH118
        return os.path.join(folder, f"step-{step}.ckpt")  # noqa: PTH118 - a path or a URL

    def _evaluate(self, trainer: Any) -> None:
        """Let Lightning validate after this batch, as it does when its own interval is over."""
        loop = trainer.fit_loop.epoch_loop

        def due(*_fetcher: Any) -> bool:
            del loop._should_check_val_fx  # noqa: SLF001 - the class has the method itself
            return True

        loop._should_check_val_fx = due  # noqa: SLF001 - Lightning offers no other way

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.did("evaluate")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end()
        end_agreement(self._state)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)


def _calling_trainer() -> tuple[Any, Any]:
    """Return the Trainer that is setting up, and the checkpoint it will fit from, if any.

    Lightning passes neither to a logger, but opens its run before it reads the checkpoint: they are found in the calling frames.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001 - the calling frames are needed
    while frame is not None:
        caller = frame.f_locals.get("self")
        if "ckpt_path" in frame.f_locals and hasattr(caller, "loggers") and hasattr(caller, "callbacks"):
            return caller, frame.f_locals["ckpt_path"] if caller.state.fn == "fit" else None
        frame = frame.f_back
    return None, None


def _home_of_trainer() -> str:
    """Return the `default_root_dir` of the calling Trainer, or Lightning's default."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - as above
    while frame is not None:
        for name in ("self", "trainer"):
            home = getattr(frame.f_locals.get(name), "default_root_dir", None)
            if isinstance(home, (str, os.PathLike)):
                return os.fspath(home)
        frame = frame.f_back
    return os.getcwd()  # noqa: PTH109 - a str, as Lightning's own


def _note_in(checkpoint: Any) -> Any:
    """Return which run a checkpoint belongs to, or None if it does not say."""
    note, error = outcome(lambda: _read_note(os.fspath(checkpoint)))
    if error is not None:
        notices.once(
            f"checkpoint:{checkpoint}",
            f"{checkpoint} does not name the run it belongs to ({error}). Training continues from it, in a new run. "
            "Pass FanfoldLogger(id=…) to continue the right run.",
        )
    return note


def _read_note(path: str) -> Any:
    """Read the note without loading the checkpoint: it is a string in its pickle, which is scanned and never executed."""
    fsspec = importlib.import_module("fsspec")  # as Lightning accesses files, local or remote
    if os.path.isdir(path):  # noqa: PTH112 - a path or a URL; sharded checkpoints keep all but the weights in a file
        path = os.path.join(path, "meta.pt")  # noqa: PTH118 - as above
    with fsspec.open(path, "rb") as file, zipfile.ZipFile(file) as archive:
        entry = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        with archive.open(entry) as pickled:
            texts = (text for _, text, _ in pickletools.genops(pickled.read(MAX_PICKLE)) if isinstance(text, str))
            note = next((text for text in texts if text.startswith(MARK)), MARK + "{}")
    return json.loads(note.removeprefix(MARK))
