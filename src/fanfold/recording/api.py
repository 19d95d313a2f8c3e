"""Module-level functions that act on the current run: the one created by the last init()."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import RunError, SettingError, notices, suggestion
from ..settings import find_directory, read_file, resolve, unknown_variables

if TYPE_CHECKING:
    from .run import Run

run: Run | None
"""The current run: the one of the last init(), or None.

Example:
    ```python
    import fanfold

    fanfold.init("llm")
    print(fanfold.run.id)
    ```
"""
config: Any
"""The config of the current run: a dict that records changes.

Example:
    ```python
    import fanfold

    fanfold.init("llm", config={"lr": 1e-3})
    fanfold.config["layers"] = 12
    print(fanfold.config["lr"])
    ```
"""
summary: Any
"""The summary of the current run: one value per key, and values of your own.

Example:
    ```python
    import fanfold

    fanfold.init("llm")
    fanfold.summary["best accuracy"] = 0.93
    ```
"""
_current: Any = None
_cells: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # runs of a notebook, by the cell that started them

# Arguments of other libraries' init() that have no effect here; scripts that pass them keep working.
_FOREIGN = frozenset(
    (
        "entity mode reinit settings job_type anonymous sync_tensorboard monitor_gym save_code allow_val_change "
        "force config_exclude_keys config_include_keys resume_from embed space_id auto_log_gpu "
        "auto_log_cpu private description experiment_name workspace logdir load public"
    ).split()
)


def init(
    project: str | None = None,
    *,
    name: str | None = None,
    config: Any = None,
    trackers: Any = None,
    tracker_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    fold: Mapping[str, str] | str | None = None,
    relay: str = "process",
    notify: Any = None,
    alerts: Sequence[str] | str | None = None,
    id: str | None = None,
    resume: str | bool | None = None,
    fork: str | None = None,
    group: str | None = None,
    tags: Sequence[str] | str | None = None,
    notes: str | None = None,
    dir: str | os.PathLike[str] | None = None,
    durability: str | None = None,
    console: bool | None = None,
    system: bool | None = None,
    energy: bool | None = None,
    blackbox: bool | Mapping[str, Any] | None = None,
    goodput: bool | None = None,
    ops: bool | Mapping[str, Any] | None = None,
    stamp: bool | None = None,
    strict: bool | None = None,
    quiet: bool | None = None,
    **wandb_style: Any,
) -> Run:
    """Start a run in this process, or join the run of its other ranks, and make it the current run.

    Call it on every rank. The run is a directory below `dir`. `trackers` names further destinations ("wandb", ["mlflow",
    "tensorboard"], "all", or GeneralTracker objects), each served by its own process. `fold` selects the keys that are
    sent there as one number over all ranks. `notify` names who is told about alerts and the end of the run
    ("slack://…", ["mailto://…", "cmd:…"]; docs/notifications.md), and `alerts` are rules that raise an alert
    ("loss is nan"). `fork` ("RUN@1200") continues another run: config and curves begin with those of that run up to that step;
    wandb's `fork_from="RUN?_step=1200"` is the same. An argument left out comes from its FANFOLD_* variable, then from
    `settings.toml` in `dir`, then from its default (see docs/settings.md).

    Args:
        project: The project the run belongs to.
        name: The run's name. Default: two words and a number.
        config: A dict, dataclass, argparse.Namespace or similar; secrets in it are masked.
        trackers: Further destinations, as above.
        tracker_kwargs: Arguments for trackers, by tracker name: `{"wandb": {"entity": "team"}}`.
        fold: How ranks become one number for trackers: one word for all keys (`"mean"`) or a dict by key.
        relay: `"process"` serves each tracker in a process of its own, `"thread"` in this one.
        notify: Who is notified, as above.
        alerts: Rules, as above.
        id: The run's id. Processes with the same id join the same run.
        resume: If the run exists: `"allow"` continues it, `"never"` refuses, `"must"` requires it, `"auto"` finds the last
            unfinished one.
        fork: `"RUN@1200"`: continue another run from a step.
        group: A name that several runs share, such as a sweep.
        tags: Words to filter by.
        notes: A sentence about the run.
        dir: Where runs live. Default: the nearest `.fanfold` in this or a parent directory.
        durability: `"process"`: a logged point survives the death of the process; `"power"`: also a power cut.
        console: Capture console output.
        system: Record CPU, memory, disk, network and GPU metrics.
        energy: Record energy and emissions, with CodeCarbon.
        blackbox: Keep evidence of hangs, crashes and memory errors.
        goodput: Time saving, evaluating and waiting for data.
        ops: Profile PyTorch's operators.
        stamp: Write into each model file that is saved which run it comes from.
        strict: Raise errors instead of logging a warning.
        quiet: Print nothing at the start and the end.
        wandb_style: Arguments of `wandb.init` that have no meaning here; each is ignored with a warning.

    Returns:
        The run. With `FANFOLD_MODE=disabled`, a run that records nothing.

    Raises:
        SettingError: An argument, variable or settings file cannot be understood, or an argument is unknown.
        RunError: The run exists and `resume="never"`, does not exist and `resume="must"`, or cannot be joined.
        MissingExtra: A tracker was named whose library is not installed.

    Example:
        ```python
        import fanfold

        with fanfold.init("llm", config={"lr": 3e-4}, tags=["baseline"]) as run:
            for step in range(3):
                run.log({"loss": 1 / (step + 1)}, step=step)
        ```
    """
    fork = fork if fork is not None else wandb_style.pop("fork_from", None)
    given = dict(locals())  # every argument by name
    _warn_foreign(wandb_style)
    mode = wandb_style.get("mode")
    modes = {resolve("mode"), resolve("mode", None if mode is None else str(mode))}
    if "disabled" in modes:
        return _disable(project, name, config)
    root = find_directory(dir, writing=True)
    if resolve("mode", file=read_file(root)) == "disabled":
        return _disable(project, name, config)
    from .options import read_argument, read_options
    from .start import start

    reinit = read_argument("reinit", wandb_style.get("reinit"))
    options = read_options(root, given)
    cell = _cell()
    if cell is not None and reinit != "create_new":
        _finish_earlier(cell)
    run = make_current(start(options))
    if cell is not None:
        _cells[run] = cell
    if run.is_main_process:
        _say_unknown_variables()
    return run


def make_current(run: Any) -> Run:
    """Make a run the one that fanfold.log() and the other functions here act on."""
    global _current  # noqa: PLW0603 - the current run is module state by design
    _current = run
    return _current  # type: ignore[no-any-return]


def _cell() -> int | None:
    """Return the number of the notebook cell being executed; None outside a notebook kernel."""
    shell = sys.modules.get("IPython")
    current = shell.get_ipython() if shell is not None else None
    return None if getattr(current, "kernel", None) is None else int(getattr(current, "execution_count", 0))


def _finish_earlier(cell: int) -> None:
    """Finish runs left open by other cells, or by earlier executions of this cell, as wandb does in a notebook."""
    for run, opened in list(_cells.items()):
        if opened != cell and run.status == "running":
            notices.once(
                f"notebook:{run.id}",
                f"run {run.name} was still running in this notebook and is finished now, because init() was called in a new cell "
                'execution. Pass init(reinit="create_new") to keep several runs open.',
            )
            run.finish()


def _disable(project: str | None, name: str | None, config: Any) -> Run:
    """Make a run that records nothing the current run."""
    from .disabled import DisabledRun

    return make_current(DisabledRun(project, name, config))


def _warn_foreign(given: Mapping[str, Any]) -> None:
    unknown = sorted(set(given) - _FOREIGN)
    if unknown:
        import inspect

        known = [name for name in inspect.signature(init).parameters if name != "wandb_style"]
        raise SettingError(f"init() does not know {', '.join(unknown)}. The run was not started.{suggestion(unknown[0], known)}")
    for name in sorted(set(given) - {"mode"} - ({"reinit"} if given.get("reinit") == "create_new" else set())):
        notices.once(f"foreign:{name}", f"init({name}=…) has no meaning in fanfold and is ignored; the run starts without it.")


def _say_unknown_variables() -> None:
    for name, near in unknown_variables().items():
        advice = f"Did you mean {near}?" if near else "docs/settings.md lists them all."
        notices.once(f"variable:{name}", f"no setting is called {name}. The run starts without it. {advice}")


def needed_run() -> Any:
    """Return the current run, or raise."""
    if _current is None:
        raise RunError("there is no run yet. Nothing was recorded. Call fanfold.init(project=…) first.")
    return _current


def log(values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
    """Record values in the current run; see Run.log.

    Args:
        values: What to record, by key.
        step: The step. Default: the number of this call.
        kwargs: Further arguments of Run.log: `log_kwargs`, `commit`, `time`.

    Raises:
        RunError: There is no run yet.

    Example:
        ```python
        import fanfold

        fanfold.init("llm")
        fanfold.log({"loss": 0.5, "val/acc": 0.9}, step=10)
        ```
    """
    needed_run().log(values, step, **kwargs)


def finish(timeout: float = 30.0, status: str = "finished", *, exit_code: int | None = None, **wandb_style: Any) -> None:
    """End the current run; do nothing if there is none.

    Args:
        timeout: The longest time to wait for trackers, in seconds.
        status: `"finished"`, `"failed"`, `"killed"` or `"preempted"`.
        exit_code: The program's exit code; anything but 0 means failed.
        wandb_style: W&B's `quiet`, which is ignored with a warning.

    Example:
        ```python
        import fanfold

        fanfold.init("llm")
        fanfold.finish()
        ```
    """
    if _current is not None:
        _current.finish(timeout, status, exit_code=exit_code, **wandb_style)


def flush(timeout: float | None = None) -> bool:
    """Wait until all of the current run is on disk; see Run.flush.

    Args:
        timeout: The longest time to wait, in seconds. Default: an hour.

    Returns:
        Whether everything is on disk.

    Raises:
        RunError: There is no run yet.

    Example:
        ```python
        import fanfold

        fanfold.init("llm")
        fanfold.log({"loss": 0.5})
        assert fanfold.flush(timeout=10)
        ```
    """
    return bool(needed_run().flush(timeout))


def alert(title: str, text: str = "", *, level: str = "warning") -> None:
    """Record an alert, something a person should see; see Run.alert.

    Args:
        title: One line.
        text: Details.
        level: `"info"`, `"warning"` or `"error"`.

    Raises:
        RunError: There is no run yet.

    Example:
        ```python
        import fanfold

        fanfold.init("llm")
        fanfold.alert("Loss spike", "The loss is ten times its mean", level="error")
        ```
    """
    needed_run().alert(title, text, level=level)


def artifact(path: str | os.PathLike[str], name: str | None = None, *, kind: str = "file", **metadata: Any) -> None:
    """Store a copy of a file or folder with the current run; see Run.artifact.

    Args:
        path: A file or a folder.
        name: Its name in the run. Default: the name of the file or folder.
        kind: What it is, such as `"model"` or `"dataset"`. The digest of a dataset becomes part of the run's stamps.
        metadata: Facts stored with it.

    Raises:
        RunError: There is no run yet.

    Example:
        ```python
        from pathlib import Path

        import fanfold

        fanfold.init("llm")
        Path("vocab.txt").write_text("a b c")
        fanfold.artifact("vocab.txt", kind="dataset", language="en")
        ```
    """
    needed_run().artifact(path, name, kind=kind, **metadata)


def define_metric(
    key: str, x: str | None = None, *, summary: str | None = None, step_metric: str | None = None, **wandb_style: Any
) -> None:
    """Set a key's x axis and its summary; see Run.define_metric.

    Args:
        key: A key, or a pattern such as `"val/*"`.
        x: The key to use as the x axis.
        summary: `"last"`, `"min"`, `"max"`, `"mean"`, `"sum"`, `"count"`, `"first"` or `"none"`.
        step_metric: W&B's name for `x`.
        wandb_style: W&B's `hidden`, `step_sync`, `goal` and `overwrite`; each is ignored with a warning.

    Raises:
        RunError: There is no run yet.

    Example:
        ```python
        import fanfold

        fanfold.init("llm")
        fanfold.define_metric("val/*", x="epoch", summary="min")
        fanfold.log({"epoch": 1, "val/loss": 0.7})
        ```
    """
    needed_run().define_metric(key, x, summary=summary, step_metric=step_metric, **wandb_style)


def stamp(path: str | os.PathLike[str], **extra: Any) -> dict[str, Any]:
    """Record in a model file, or in every model file of a checkpoint directory, which run it comes from; return the stamp.

    `step=` and `data=` (an identifier of the training data) have their own fields; anything else goes under `extra`.
    Secrets are masked. Weights are not touched, and every loader reads the file as before. A format that cannot hold a stamp
    gets a file beside it. Without a run, the stamp contains only code, command and environment.

    Args:
        path: A model file or a checkpoint directory.
        extra: Facts to add, as above.

    Returns:
        The stamp.

    Raises:
        FanfoldError: There is no such file, or it cannot be stamped. It is unchanged.

    Example:
        ```python
        import torch

        import fanfold

        fanfold.init("llm")
        torch.save({"w": torch.zeros(2)}, "model.pt")
        fanfold.stamp("model.pt", step=100, data="corpus-v2")
        print(fanfold.inspect("model.pt")["stamp"]["run"])
        ```
    """
    from .. import provenance

    return provenance.stamp(path, _current, extra)


def log_api_usage_once(key: str) -> None:
    """Record that an API of yours was used ("my_library.fit"), once per run and process. `fanfold usage` lists them.

    Args:
        key: The name of the API.

    Example:
        ```python
        import fanfold

        fanfold.init("llm")
        fanfold.log_api_usage_once("my_library.fit")
        ```
    """
    from ..probes import api_usage

    run = _current if _current is not None and _current.status == "running" else None
    if api_usage.log_once(key, "" if run is None else run.id) and run is not None:
        run._hand_over_usage()  # noqa: SLF001 - ours


class CurrentMapping(MutableMapping[str, Any]):
    """A placeholder for the current run's config or summary while there is no run; using it before init() raises."""

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def _real(self) -> Any:
        return getattr(needed_run(), self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # help() and notebooks look these up
            raise AttributeError(name)
        return getattr(self._real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._real(), name, value)

    def __getitem__(self, key: str) -> Any:
        return self._real()[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._real()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._real()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._real())

    def __len__(self) -> int:
        return len(self._real())

    def __repr__(self) -> str:
        return f"<fanfold.{self._name}: there is no run yet>" if _current is None else repr(self._real())


def __getattr__(name: str) -> Any:
    if name == "run":
        return _current
    if name in ("config", "summary"):
        return CurrentMapping(name) if _current is None else getattr(_current, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
