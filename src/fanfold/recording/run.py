"""Run: the methods and attributes a user sees. The work is done by its parts: recorder, delivery, ending, summary."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..errors import SettingError, clean_text, guard, notices, outcome, shown, verb
from ..facts.mask import mask
from ..journal import Kind, blobs
from ..plain import plain
from ..probes import spans
from ..settings import MAX_NAMES
from ..values import text_of
from . import lifecycle
from .config import Config
from .options import RunOptions
from .parts import RunParts
from .summary import RunSummary, SummaryView
from .tallies import MetricRule

if TYPE_CHECKING:
    from .control import Control, Knob

STATUSES = ("finished", "failed", "killed", "preempted")
LEVELS = ("info", "warning", "error")


def _unknown_knob() -> Knob:
    from .control import Knob

    return Knob("", 0.0)


class Run:
    """One experiment, as seen from one of its processes. Created by fanfold.init().

    Methods never raise into training code: a value that cannot be recorded is counted, and logged as a warning once.
    With strict=True the error is raised instead.

    Attributes:
        id: The run's id.
        project: Its project.
        path: Its directory.
        rank: The rank of this process.
        world_size: How many processes the run has.
        attempt: Which life of the run this is, from 1.
        config: The config: a dict that records changes.
        control: What was asked of the job (`fanfold tell`).
        strict: Whether errors are raised.

    Example:
        ```python
        import fanfold

        with fanfold.init("llm", config={"lr": 1e-3}) as run:
            run.config["layers"] = 12
            run.log({"loss": 0.5})
            run.summary["best"] = 0.5
        ```
    """

    def __init__(self, parts: RunParts, options: RunOptions) -> None:
        member, known = parts.member, parts.known
        self.id = member.run_id
        self.project = member.project
        self.path = member.path
        self.rank = member.me.rank
        self.world_size = member.me.world_size
        self.attempt = member.ordinal
        self.fork = member.fork  # the run that this one continues, and from which step
        self.strict = options.strict
        self._member = member
        self._writer = parts.writer
        self._recorder = parts.recorder
        self._delivery = parts.delivery
        self._ending = parts.ending
        self._group: str | None = options.group or known.get("group")
        self._notes: str | None = options.notes or known.get("notes")
        self._tags: tuple[str, ...] = tuple(options.tags or known.get("tags") or ())
        self._datasets: dict[str, str] = {}  # name and digest of each artifact of kind "dataset"
        self._summary = RunSummary(parts.writer, parts.recorder, parts.history, known)
        self.config = Config({**(known.get("config") or {}), **options.config}, self._config_changed, strict=self.strict)
        self._recorder.info(self._first_facts(options))
        self.log = self._recorder.log  # type: ignore[method-assign]  # without a call in between

    @property
    def control(self) -> Control:
        """What was asked of the job from outside (`fanfold tell`), and its knobs."""
        found: Control | None = vars(self).get("_control")
        if found is None:
            from .control import Control

            found = vars(self).setdefault("_control", Control(self, self._recorder))  # threads may ask at the same time
        return found

    if not TYPE_CHECKING:  # a misspelt name stays an error for type checkers

        def __getattr__(self, name: str) -> Any:
            """Return what wandb's runs have under this name, for scripts written for wandb; called only for names a run lacks."""
            from . import wandb

            return wandb.of_run(self, name)

    def _first_facts(self, options: RunOptions) -> dict[str, Any]:
        """Return the facts known at the start; a resumed run writes only those passed to init()."""
        facts: dict[str, Any] = {"group": self._group, "tags": [text_of(tag) for tag in self._tags], "notes": self._notes}
        facts |= {"config": mask(plain(self.config)), "name": self.name}
        if self._member.resumed:
            return {name: fact for name, fact in facts.items() if getattr(options, name)}
        return facts

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        *,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
        commit: bool | None = None,
        time: float | datetime | None = None,
    ) -> None:
        """Record values at a step (default: the number of this call). On return they survive kill -9.

        Numbers on a device are copied without a sync and recorded when they land. `log_kwargs` is passed to trackers by
        name. Any step is accepted: it may be late, repeated or out of order. `time` is when the values were measured, if that
        was not now: seconds since 1970, or a datetime (local time unless it has a time zone).

        Args:
            values: What to record, by key: numbers, tensors, texts, media, or dicts of these (keys are joined by `/`).
            step: The step.
            log_kwargs: Arguments for the log call of trackers, by tracker name.
            commit: Ignored with a warning: every call is recorded at once.
            time: When the values were measured.

        Raises:
            ValueRefused: A value cannot be logged; only with `strict=True`.

        Example:
            ```python
            import fanfold

            run = fanfold.init("llm")
            run.log({"loss": 0.5, "val": {"acc": 0.9}, "sample": "Once upon a time"}, step=3)
            run.finish()
            ```
        """
        self._recorder.log(values, step, log_kwargs=log_kwargs, commit=commit, time=time)

    # Facts about the run

    def _config_changed(self, config: Config) -> None:
        self._recorder.info({"config": mask(plain(config))})

    @property
    def name(self) -> str:
        """The run's name; assign to it to rename the run."""
        return self._member.name

    @name.setter
    @verb("set the run's name")
    def name(self, name: str) -> None:
        self._member.name = text_of(name)
        self._recorder.info({"name": self.name})

    @property
    def notes(self) -> str | None:
        """A sentence about the run; can be assigned."""
        return self._notes

    @notes.setter
    @verb("set the run's notes")
    def notes(self, notes: str | None) -> None:
        self._notes = None if notes is None else text_of(notes)
        self._recorder.info({"notes": self._notes})

    @property
    def group(self) -> str | None:
        """The name that several runs share; can be assigned."""
        return self._group

    @group.setter
    @verb("set the run's group")
    def group(self, group: str | None) -> None:
        self._group = None if group is None else text_of(group)
        self._recorder.info({"group": self._group})

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags; assign a list to replace them."""
        return self._tags

    @tags.setter
    @verb("set the run's tags")
    def tags(self, tags: Sequence[str]) -> None:
        self._tags = tuple(text_of(tag) for tag in ([tags] if isinstance(tags, str) else itertools.islice(tags, MAX_NAMES)))
        self._recorder.info({"tags": list(self._tags)})

    @property
    def status(self) -> str:
        """The status of this process: running, finished, failed, killed or preempted."""
        return self._ending.status

    @property
    def summary(self) -> SummaryView:
        """Return the summary of each key logged by this process; assign to it to add entries of your own."""
        return SummaryView(self._summary)

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._member.me.main

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself on the main process, and a function that does nothing on other ranks.

        Args:
            function: A function.

        Returns:
            That function, or one that does nothing.
        """
        return function if self.is_main_process else lambda *_args, **_kwargs: None

    @verb("define a metric")
    def define_metric(
        self, key: str, x: str | None = None, *, summary: str | None = None, step_metric: str | None = None, **wandb_style: Any
    ) -> None:
        """Set the x axis of a key (or of `val/*`) and its summary statistic: last, min, max, mean, sum, count, first, none.

        A second call for the same key changes only what it names. A key with a definition of its own ignores patterns, as in W&B.

        Args:
            key: A key or a pattern.
            x: The key to use as the x axis.
            summary: The summary statistic.
            step_metric: W&B's name for `x`.
            wandb_style: W&B's `hidden`, `step_sync`, `goal` and `overwrite`; each is ignored with a warning.

        Example:
            ```python
            import fanfold

            run = fanfold.init("llm")
            run.define_metric("val/*", x="epoch", summary="min")
            ```
        """
        _ignore("define_metric", wandb_style, ("hidden", "step_sync", "goal", "overwrite"))
        self._summary.define(MetricRule.check(key, x or step_metric, summary))

    @verb("record an alert")
    def alert(self, title: str, text: str = "", *, level: str = "warning") -> None:
        """Record an alert: something a person should see.

        Args:
            title: One line.
            text: Details.
            level: `"info"`, `"warning"` or `"error"`.

        Example:
            ```python
            import fanfold

            run = fanfold.init("llm")
            run.alert("Loss spike", level="error")
            ```
        """
        if level not in LEVELS:
            raise ValueError(f"alert(level={shown(level)}) is not known. Nothing was recorded. Known: {', '.join(LEVELS)}.")
        self._recorder.event(
            "alert", {"title": text_of(title), "text": text_of(text), "level": level, "s": int(self._recorder.high)}
        )

    @verb("time a span", contextlib.nullcontext)
    def span(self, kind: str) -> AbstractContextManager[Any]:
        """Time what is done inside, for `fanfold goodput`: checkpoint, evaluation, data, ranks (waiting for others), startup.

        Args:
            kind: One of the words above.

        Returns:
            A context manager.

        Example:
            ```python
            import fanfold

            run = fanfold.init("llm")
            with run.span("checkpoint"):
                pass  # save here
            ```
        """
        if kind not in spans.KINDS:
            raise ValueError(f"span({shown(kind)}) is not known. It is not timed. Known: {', '.join(spans.KINDS)}.")
        return spans.Span(kind)

    @verb("store an artifact")
    def artifact(self, path: str | os.PathLike[str], name: str | None = None, *, kind: str = "file", **metadata: Any) -> None:
        """Keep a copy of a file, or of every file in a folder, with the run. The same content is stored once.

        Args:
            path: A file or a folder.
            name: Its name in the run. Default: the name of the file or folder.
            kind: What it is, such as `"model"` or `"dataset"`.
            metadata: Facts stored with it.

        Example:
            ```python
            from pathlib import Path

            import fanfold

            run = fanfold.init("llm")
            Path("vocab.txt").write_text("a b c")
            run.artifact("vocab.txt", kind="dataset")
            ```
        """
        source = Path(path)
        if not source.exists() or not os.fspath(path):  # an empty path would be the current directory
            raise FileNotFoundError(f"artifact({os.fspath(path)!r}) does not exist. Nothing was stored.")
        if not source.is_file() and not source.is_dir():
            raise ValueError(f"artifact({os.fspath(path)!r}) is neither a file nor a folder. Nothing was stored.")
        files = sorted(item for item in source.rglob("*") if item.is_file()) if source.is_dir() else [source]
        entries = []
        for item in files:
            blob, size = blobs.put_file(self.path, item)
            inner = item.relative_to(source).as_posix() if source.is_dir() else item.name
            entries.append({"path": clean_text(inner), "blob": blob, "size": size})
        named = text_of(name or source.name)
        self._recorder.event("artifact", {"name": named, "kind": text_of(kind), "files": entries,
                                 "metadata": mask(plain(metadata)), "s": int(self._recorder.high)})  # fmt: skip
        if kind == "dataset":  # the run's stamps list its datasets: see provenance/record.py
            self._datasets[named] = blobs.digest_of([(str(entry["path"]), str(entry["blob"])) for entry in entries])

    @verb("make a value adjustable", _unknown_knob)
    def knob(self, name: str, value: Any, min: float | None = None, max: float | None = None) -> Knob:
        """Make a value adjustable while the program runs (`fanfold tell RUN set NAME=VALUE`); read it with `.value`.

        Call it on every rank. A new value takes effect on all of them after the same step; see `run.control`.

        Args:
            name: The name to set it by.
            value: The value to begin with.
            min: The lowest value accepted.
            max: The highest value accepted.

        Returns:
            The knob.

        Example:
            ```python
            import fanfold

            run = fanfold.init("llm")
            temperature = run.knob("temperature", 0.7, min=0, max=2)
            print(temperature.value)
            ```
        """
        from .control import Knob

        found: Knob | None = None
        with guard("make a value adjustable", strict=self.strict):
            found = self.control.knob(name, value, min, max)
        return found if found is not None else Knob(text_of(name), value)

    # Trackers

    @property
    def trackers(self) -> list[str]:
        """Return the names of the trackers this run is sent to."""
        return self._delivery.trackers

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by name, or the library's own object with `unwrap` (under relay="thread").

        On other ranks this is an object of the same class whose methods all do nothing.

        Args:
            name: The tracker's name.
            unwrap: Return the library's own object.

        Returns:
            The tracker.

        Raises:
            ValueError: The run has no such tracker.
            SettingError: The library's object is in another process.
        """
        return self._delivery.get(name, unwrap=unwrap)

    # Probe results

    @verb("read the operator profile", list)
    def ops(self) -> list[dict[str, Any]]:
        """Return the current operator profile of all processes of the run; see StoredRun.ops.

        Returns:
            One dict per row.
        """
        from ..probes import ops
        from ..store import open_run

        ops.refresh()
        return open_run(self.path).ops()

    def _hand_over_usage(self) -> None:
        """Write which APIs were used, immediately: without an operator profile nothing else collects them."""
        from ..probes import api_usage

        for record in api_usage.take():
            self._writer.append((Kind.EVENT, {"event": "usage", **record}), keep=True)

    # The end

    @verb("flush the run", bool)
    def flush(self, timeout: float | None = None) -> bool:
        """Wait until device values and media have landed and all is on disk; return whether that is so within `timeout`.

        Args:
            timeout: The longest time to wait, in seconds. Default: an hour.

        Returns:
            Whether everything is on disk.
        """
        done = self._recorder.flush(3600.0 if timeout is None else timeout)
        self._writer.sync()
        for chore in self._member.chores:
            with guard("copy the journal to its directory"):
                chore()
        return done

    @verb("finish the run")
    def finish(
        self, timeout: float = 30.0, status: str = "finished", *, exit_code: int | None = None, **wandb_style: Any
    ) -> None:
        """End the run in this process. Always returns within `timeout`.

        Args:
            timeout: The longest time to wait for trackers, in seconds.
            status: `"finished"`, `"failed"`, `"killed"` or `"preempted"`.
            exit_code: The program's exit code; anything but 0 means failed.
            wandb_style: W&B's `quiet`, which is ignored with a warning.
        """
        with guard("read the arguments of finish()", strict=self.strict):
            _ignore("finish", wandb_style, ("quiet",))
        status = "failed" if outcome(bool, exit_code)[0] else self._known_status(status)
        seconds, _ = outcome(float, timeout)
        code, _ = outcome(lambda: None if exit_code is None else max(min(int(exit_code), 1 << 31), -(1 << 31)))
        self._ending.finish(30.0 if seconds is None else seconds, status, exit_code=code)

    def _known_status(self, status: str) -> str:
        known = "finished"
        with guard("end the run with that status", strict=self.strict):
            if status not in STATUSES:
                raise SettingError(
                    f"finish(status={shown(status)}) is not known, and the run counts as finished. Known: {', '.join(STATUSES)}."
                )
            known = status
        return known  # noqa: RET504 - the guard may have caught the error

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.finish()
            return
        status, text = lifecycle.judge(error)
        self._ending.finish(30.0, status, text, None if status == "finished" else 1)

    def __repr__(self) -> str:
        return f"<fanfold run {self.name} ({self.id}) of {self.project}: {self.status}, {self.path}>"

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from ..store import open_run

        return {**open_run(self.path)._repr_mimebundle_(), "text/plain": repr(self)}


def _ignore(call: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Warn about arguments that only wandb's call of that name has; raise for any other."""
    for name in given:
        if name not in known:
            raise TypeError(f"{call}() has no argument {name!r}")
        notices.once(f"foreign:{call}:{name}", f"{call}({name}=…) has no meaning in fanfold and is ignored.")
