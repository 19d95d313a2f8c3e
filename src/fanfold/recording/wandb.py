"""The verbs of wandb that plain scripts call besides log(), for `import fanfold as wandb`.

They are reached as fanfold.login, fanfold.watch and so on, and as attributes of a run; they are not listed among fanfold's own
names.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ..errors import guard, notices
from ..media import Figure, Histogram, Table
from . import api

# Verbs without a counterpart, and what to use: these do nothing, and warn once.
NOTHING = {
    "log_code": "the code of a run that no commit has is kept by itself",
    "mark_preempting": 'call run.finish(status="preempted"), or use PreemptionCallback',
    "restore": "open the file in the run: fanfold.open(id).artifact_file(…)",
    "setup": "init() is enough",
    "teardown": "finish() is enough",
    "use_artifact": "read the file by its path, and name it in config to keep track of it",
    "use_model": "read the file by its path",
    "link_model": "log it as an artifact",
    "link_artifact": "log it as an artifact",
    "require": "nothing is needed",
    "display": "`fanfold ui` shows it",
    "termlog": "use print() or logging",
    "termwarn": "use print() or logging",
    "termerror": "use print() or logging",
}
# Names that scripts cannot do without: using one raises.
MISSING = {
    "Api": "fanfold.runs() lists runs, fanfold.open(id) reads one",
    "sweep": "start one run for each setting, with group=",
    "agent": "start one run for each setting, with group=",
    "controller": "start one run for each setting, with group=",
    "Object3D": "log the file with fanfold.artifact()",
    "Molecule": "log the file with fanfold.artifact()",
    "Graph": "log a text or a figure",
    "JoinedTable": "log a fanfold.Table",
    "PartitionedTable": "log a fanfold.Table",
}


# What wandb's runs have and ours do not: scripts print these, or pass them on.
FACTS = {"entity": "", "job_type": None, "offline": True, "disabled": False, "resumed": False, "sweep_id": None, "url": None}

Plotly = Figure


class AlertLevel:
    """The levels of wandb.alert(), by our names."""

    INFO, WARN, ERROR = "info", "warning", "error"


def of_run(run: Any, name: str) -> Any:
    """Return what scripts expect of wandb's run under a name that ours does not have; raise AttributeError for any other."""
    if name in ("watch", "save", "log_artifact", "log_model"):
        return partial(globals()[name], run=run)
    if name == "dir":
        return _folder(run)
    if name == "step":
        return max(run._recorder.high, 0)  # noqa: SLF001 - the step of the run so far
    if name == "project_name":
        return lambda: run.project
    if name in ("get_url", "get_project_url"):
        return lambda: None
    if name in FACTS:
        return FACTS[name]
    if name in NOTHING or name == "unwatch":
        return globals().get(name) or __getattr__(name)
    raise AttributeError(f"{type(run).__name__!r} object has no attribute {name!r}")


def _folder(run: Any) -> str:
    """Return a folder for files of the script, as wandb.run.dir is one."""
    notices.once(
        "wandb:dir", "run.dir is wandb's. Files there stay in the run's folder and are not sent to trackers: use run.artifact()."
    )
    folder = Path(run.path) / "files"
    with guard("make a folder for files"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return str(folder)


def login(*_args: Any, **_kwargs: Any) -> bool:
    """Return True: there is nothing to log in to."""
    notices.once("wandb:login", "login() is wandb's. fanfold needs no account; runs are written to disk.")
    return True


class Settings(SimpleNamespace):
    """Settings of wandb, accepted and ignored."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)


# Gradients and parameters

_hooks: list[Any] = []


def watch(
    models: Any, criterion: Any = None, log: str | None = "gradients", log_freq: int = 1000, idx: int | None = None,
    log_graph: bool = False, *, run: Any = None,
) -> None:  # fmt: skip
    """Log histograms of gradients and parameters on every `log_freq`-th backward pass."""
    del criterion, idx, log_graph
    for n, model in enumerate(models if isinstance(models, (list, tuple)) else [models]):
        prefix = f"graph_{n}/" if isinstance(models, (list, tuple)) and len(models) > 1 else ""
        with guard("watch the model"):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    hook = _hook(f"{prefix}{name}", parameter, log, max(1, int(log_freq)), run)
                    _hooks.append(parameter.register_hook(hook))


def _hook(name: str, parameter: Any, log: str | None, every: int, own: Any) -> Any:
    passes = 0

    def logged(gradient: Any) -> None:
        nonlocal passes
        passes += 1
        run = own or api.run
        if passes % every or run is None or run.status != "running":
            return
        values = {}
        if log in ("gradients", "all"):
            values[f"gradients/{name}"] = Histogram(gradient.detach())
        if log in ("parameters", "all"):
            values[f"parameters/{name}"] = Histogram(parameter.detach())
        if values:
            run.log(values, max(run._recorder.high, 0))  # noqa: SLF001 - the step of the run so far

    def safely(gradient: Any) -> None:
        with guard("log a gradient"):
            logged(gradient)

    return safely


def unwatch(_models: Any = None) -> None:
    """Stop logging gradients and parameters."""
    while _hooks:
        _hooks.pop().remove()


# Files


def save(
    glob_str: str | os.PathLike[str] | None = None, base_path: Any = None, policy: str = "now", *, run: Any = None
) -> list[str]:
    """Keep the files that match a pattern with the run, as they are now."""
    if glob_str is None:
        return []
    if policy in ("live", "end"):
        notices.once("wandb:save", f"save(policy={policy!r}): fanfold copies the file now. Call save() again after changes.")
    found = sorted(path for path in glob.glob(os.fspath(glob_str), recursive=True) if Path(path).is_file())  # noqa: PTH207
    for path in found:
        name = os.path.relpath(path, base_path) if base_path else Path(path).name
        (run or api.needed_run()).artifact(path, name)
    return found


class Artifact:
    """Files to log together: Artifact("data", type="dataset"), add_file(…), then log_artifact()."""

    def __init__(
        self, name: str, type: str, description: str | None = None, metadata: Mapping[str, Any] | None = None, **_options: Any
    ) -> None:
        self.name, self.type, self.description, self.metadata = name, type, description, dict(metadata or {})
        self._files: list[tuple[str, Path]] = []
        self._made: tempfile.TemporaryDirectory[str] | None = None

    def add_file(self, local_path: str | os.PathLike[str], name: str | None = None, **_options: Any) -> None:
        path = Path(local_path)
        if not path.is_file():
            raise ValueError(f"add_file({os.fspath(local_path)!r}) is not a file. Nothing was added.")
        self._files.append((name or path.name, path))

    def add_dir(self, local_path: str | os.PathLike[str], name: str | None = None, **_options: Any) -> None:
        folder = Path(local_path)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                inner = path.relative_to(folder).as_posix()
                self._files.append((f"{name}/{inner}" if name else inner, path))

    @contextlib.contextmanager
    def new_file(self, name: str, mode: str = "w", encoding: str | None = None) -> Iterator[Any]:
        """Open a file to write, which belongs to the artifact."""
        self._made = self._made or tempfile.TemporaryDirectory(prefix="fanfold-artifact-")
        path = Path(self._made.name) / str(len(self._files))
        with path.open(mode, encoding=encoding) as file:
            yield file
        self._files.append((name, path))

    def add(self, obj: Any, name: str, **_options: Any) -> None:
        """Log a table or image under the artifact's name: artifacts hold files."""
        api.log({f"{self.name}/{name}": obj})

    def add_reference(self, uri: str, *_args: Any, **_options: Any) -> None:
        """Keep the address only; fanfold does not look behind it."""
        self.metadata.setdefault("references", []).append(str(uri))

    def wait(self, *_args: Any, **_options: Any) -> Artifact:
        return self

    def _store(self, run: Any) -> None:
        facts = {**self.metadata, **({"description": self.description} if self.description else {})}
        with tempfile.TemporaryDirectory(prefix="fanfold-artifact-") as folder:
            for name, path in self._files:
                target = Path(folder, *[part for part in Path(name).parts if part not in ("..", "/")])
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path.resolve(), target)
                except OSError:  # another filesystem
                    shutil.copyfile(path, target)
            run.artifact(folder, self.name, kind=self.type, **{name: fact for name, fact in facts.items() if name != "path"})


def log_artifact(
    artifact_or_path: Any, name: str | None = None, type: str | None = None, aliases: Sequence[str] | None = None, *,
    run: Any = None, **_options: Any,
) -> Any:  # fmt: skip
    """Keep an artifact, a file or a folder with the run."""
    run = run or api.needed_run()
    if isinstance(artifact_or_path, Artifact):
        if aliases:
            artifact_or_path.metadata["aliases"] = list(aliases)
        with guard("store an artifact", strict=run.strict):
            artifact_or_path._store(run)  # noqa: SLF001 - same module
        return artifact_or_path
    run.artifact(artifact_or_path, name, kind=type or "file", **({"aliases": list(aliases)} if aliases else {}))
    return None


def log_model(
    path: str | os.PathLike[str], name: str | None = None, aliases: Sequence[str] | None = None, *, run: Any = None
) -> None:
    """Keep a model file or folder with the run."""
    log_artifact(path, name, "model", aliases, run=run)


# Plots: each becomes a table of its points, or a histogram


class plot:  # noqa: N801 - wandb.plot is a module of functions
    """wandb.plot: each plot becomes a table of its points, or a histogram."""

    @staticmethod
    def line(table: Any, x: str, y: str, stroke: str | None = None, title: str | None = None, **_options: Any) -> Table:
        del title
        return _chosen(table, [x, y, *([stroke] if stroke else [])])

    @staticmethod
    def scatter(table: Any, x: str, y: str, title: str | None = None, **_options: Any) -> Table:
        del title
        return _chosen(table, [x, y])

    @staticmethod
    def bar(table: Any, label: str, value: str, title: str | None = None, **_options: Any) -> Table:
        del title
        return _chosen(table, [label, value])

    @staticmethod
    def histogram(table: Any, value: str, title: str | None = None, **_options: Any) -> Histogram:
        del title
        at = list(table.columns).index(value)
        return Histogram([row[at] for row in table.rows])

    @staticmethod
    def line_series(
        xs: Sequence[Any], ys: Sequence[Sequence[Any]], keys: Sequence[str] | None = None, title: str | None = None,
        xname: str = "x", **_options: Any,
    ) -> Table:  # fmt: skip
        del title
        names = list(keys) if keys else [f"line_{n}" for n in range(len(ys))]
        nested = len(xs) > 0 and isinstance(xs[0], (list, tuple))
        rows = [
            [name, x, y] for n, (name, some) in enumerate(zip(names, ys, strict=False))
            for x, y in zip(xs[n] if nested else xs, some, strict=False)
        ]  # fmt: skip
        return Table(["key", xname, "y"], rows)

    @staticmethod
    def confusion_matrix(
        probs: Any = None, y_true: Any = None, preds: Any = None, class_names: Sequence[str] | None = None,
        title: str | None = None, **_options: Any,
    ) -> Table:  # fmt: skip
        """Return a table with the number of samples of each actual and predicted class."""
        import numpy as np

        del title
        if preds is None and probs is None:
            raise ValueError("confusion_matrix() needs preds or probs. Nothing was plotted.")
        guessed = np.asarray(preds) if preds is not None else np.asarray(probs).argmax(axis=1)
        actual = np.asarray(y_true)
        count = max(int(max(actual.max(initial=0), guessed.max(initial=0))) + 1, len(class_names or ()))
        names = list(class_names) if class_names else [str(n) for n in range(count)]
        cells = np.zeros((count, count), int)
        np.add.at(cells, (actual.astype(int), guessed.astype(int)), 1)
        rows = [[names[a], names[b], int(cells[a, b])] for a in range(count) for b in range(count)]
        return Table(["actual", "predicted", "count"], rows)

    @staticmethod
    def roc_curve(y_true: Any = None, y_probas: Any = None, labels: Any = None, **_options: Any) -> Table:
        """Return a table with the false and true positive rates of each class."""
        return Table(["class", "fpr", "tpr"], list(_curves(y_true, y_probas, labels, roc=True)))

    @staticmethod
    def pr_curve(y_true: Any = None, y_probas: Any = None, labels: Any = None, **_options: Any) -> Table:
        """Return a table with recall and precision of each class."""
        return Table(["class", "recall", "precision"], list(_curves(y_true, y_probas, labels, roc=False)))


def _chosen(table: Any, columns: list[str]) -> Table:
    """Return a table with some of its columns."""
    places = [list(table.columns).index(name) for name in columns]
    return Table(columns, [[row[at] for at in places] for row in table.rows])


def _curves(y_true: Any, y_probas: Any, labels: Any, *, roc: bool) -> Iterator[list[Any]]:
    import numpy as np

    actual, scores = np.asarray(y_true), np.asarray(y_probas, float)
    for n in range(scores.shape[1]):
        order = np.argsort(-scores[:, n], kind="stable")
        hits, ranked = (actual == n)[order], scores[order, n]
        last = np.append(np.nonzero(np.diff(ranked))[0], len(ranked) - 1)  # equal scores are one point
        right, taken = np.cumsum(hits)[last], last + 1
        recall = right / max(hits.sum(), 1)
        other = (taken - right) / max((~hits).sum(), 1) if roc else recall
        name = str(labels[n]) if labels is not None else str(n)
        if roc:
            yield [name, 0.0, 0.0]
        yield from ([name, float(x), float(y)] for x, y in zip(other, recall if roc else right / taken, strict=True))


def __getattr__(name: str) -> Any:
    if name in NOTHING:

        def nothing(*_args: Any, **_kwargs: Any) -> None:
            notices.once(f"wandb:{name}", f"{name}() is wandb's and does nothing here: {NOTHING[name]}.")

        return nothing
    if name in MISSING:
        raise AttributeError(f"fanfold has no {name}: {MISSING[name]}.")  # so that hasattr() says False
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
