"""PyTorch Ignite: a logger for its engines, attached as Ignite's own loggers are, that writes on every rank."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any

from ..errors import needed
from ._session import TrainingSession

with needed("pytorch-ignite", "ignite", "fanfold.frameworks.ignite"):
    from ignite.engine import Engine, Events
    from ignite.handlers.base_logger import BaseLogger, BaseOptimizerParamsHandler, BaseOutputHandler

__all__ = ["FanfoldLogger"]


class FanfoldLogger(BaseLogger):  # type: ignore[misc]  # ignite may be installed without types
    """Record what engines compute in a run. Arguments are those of fanfold.init(), or `run`, your own run.

    `attach_output_handler` and `attach_opt_params_handler` take the arguments of Ignite's own loggers. Tensors that
    `output_transform` returns stay on their device. Call `close()` at the end, or use the logger as a context.
    """

    def __init__(self, project: str | None = None, *, run: Any = None, **options: Any) -> None:
        super().__init__()
        self._session = TrainingSession(project, run, **options)
        self._session.begin()

    @property
    def run(self) -> Any:
        """The run."""
        return self._session.run

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._session.fail(kind, error, trace)
        self.close()

    def close(self) -> None:
        """End the run, unless it is yours."""
        self._session.end()
        if self._session.ours and self.run.status == "running":
            self.run.finish()

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> Callable[..., None]:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> Callable[..., None]:
        return OptimizerParamsHandler(*args, **kwargs)


class OutputHandler(BaseOutputHandler):  # type: ignore[misc]
    """Log an engine's metrics, the output of a batch, and attributes of its state, under `tag/`."""

    def __call__(self, engine: Engine, logger: FanfoldLogger, event_name: str | Events) -> None:
        """Log the values of this event."""
        values: dict[str, Any] = {}
        if self.metric_names is not None:
            names = engine.state.metrics if self.metric_names == "all" else self.metric_names
            values.update({name: engine.state.metrics[name] for name in names if name in engine.state.metrics})
        if self.output_transform is not None:
            output = self.output_transform(engine.state.output)
            values.update(output if isinstance(output, dict) else {"output": output})
        for name in self.state_attributes or ():
            values[name] = getattr(engine.state, name, None)
        logger.run.log({f"{self.tag}/{name}": value for name, value in values.items()},
                       step=int(self.global_step_transform(engine, event_name)))  # fmt: skip


class OptimizerParamsHandler(BaseOptimizerParamsHandler):  # type: ignore[misc]
    """Log a parameter of each group of an optimizer, such as `lr/group_0`."""

    def __call__(self, engine: Engine, logger: FanfoldLogger, event_name: str | Events) -> None:
        """Log the values of this event."""
        tag = f"{self.tag}/" if self.tag else ""
        groups = self.optimizer.param_groups
        values = {f"{tag}{self.param_name}/group_{place}": float(group[self.param_name]) for place, group in enumerate(groups)}
        logger.run.log(values, step=int(engine.state.get_event_attrib_value(event_name)))
