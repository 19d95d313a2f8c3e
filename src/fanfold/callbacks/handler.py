"""CallbackHandler: calls every callback at every event, in order; names one that raises, and lets the others finish."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from ..errors import SettingError, outcome
from .control import TrainerControl
from .events import Event, TrainerCallback, logger
from .failure import CallbackError, blame
from .flow import DefaultFlowCallback
from .state import TrainerState, exportable, states_of

_EVENTS = tuple(event.value for event in Event)
_BASES = ("fanfold.callbacks.events", "transformers.trainer_callback")


class _Turn:
    """One event being passed to the callbacks."""

    __slots__ = ("control", "count", "rest", "told")

    def __init__(self, listeners: list[Any], control: TrainerControl, count: int) -> None:
        self.control = control
        self.count = count  # of callbacks: a different number means that one was added or removed in the meantime
        self.rest = iter(listeners)
        self.told: list[Any] = []


class CallbackHandler(TrainerCallback):
    """Hold the callbacks of a loop and call them in order. `control` is passed from one to the next, and back to the loop.

    A callback that raises stops training with a CallbackError, after the others have received `on_exception` and `on_train_end`.
    With `on_error="disable"` a warning is logged, the callback is not called again, and training continues.
    """

    def __init__(
        self,
        callbacks: Iterable[Any],
        model: Any,
        processing_class: Any,
        optimizer: Any,
        lr_scheduler: Any,
        *,
        on_error: str = "raise",
    ) -> None:
        if on_error not in ("raise", "disable"):
            raise SettingError(f"on_error={on_error!r} is not known. Nothing was started. Known: raise, disable.")
        self.on_error = on_error
        self.callbacks: list[Any] = []
        self.disabled: list[Any] = []
        self._listeners: dict[str, list[Any]] = {}
        self._seen: list[Any] = []
        self._training = False
        for callback in callbacks:
            self.add_callback(callback)
        self.model = model
        self.processing_class = processing_class
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.train_dataloader: Any = None
        self.eval_dataloader: Any = None
        if not any(_is_flow(callback) for callback in self.callbacks):
            logger.warning(
                "there is no DefaultFlowCallback among the callbacks, so nothing decides when to log, evaluate, save or stop. "
                f"Add one: add_callback(DefaultFlowCallback). The callbacks are:\n{self.callback_list}"
            )

    # Adding and removing

    def add_callback(self, callback: Any) -> None:
        """Add a callback at the end: an instance, or a class, which is instantiated without arguments."""
        _check(callback)
        made = callback() if isinstance(callback, type) else callback
        if any(type(other) is type(made) for other in self.callbacks):
            logger.warning(
                f"a second {type(made)} was added to the callbacks; both will be called. "
                f"Remove one if that was not meant. The callbacks are:\n{self.callback_list}"
            )
        self.callbacks.append(made)

    def pop_callback(self, callback: Any) -> Any:
        """Remove and return a callback, or the first one of a class; return None if there is none."""
        found = self._find(callback)
        if found is not None:
            del self.callbacks[next(at for at, other in enumerate(self.callbacks) if other is found)]
        return found

    def remove_callback(self, callback: Any) -> None:
        """Remove a callback, or the first one of a class; raise ValueError for an instance that is not there."""
        if self.pop_callback(callback) is None and not isinstance(callback, type):
            raise ValueError(
                f"{type(callback).__name__} is not among the callbacks. Nothing was removed. "
                f"The callbacks are:\n{self.callback_list}"
            )

    def _find(self, callback: Any) -> Any:
        matches = (lambda other: isinstance(other, callback)) if isinstance(callback, type) else (lambda other: other == callback)
        return next((other for other in self.callbacks if matches(other)), None)

    @property
    def callback_list(self) -> str:
        """The names of the callbacks, one per line."""
        return "\n".join(type(callback).__name__ for callback in self.callbacks)

    # States in checkpoints

    def export_states(self) -> dict[str, Any]:
        """Return the states of the callbacks that have one, by class name; several of a class form a list."""
        return dict(states_of(callback for callback in self.callbacks if exportable(callback)))

    def restore_states(self, states: dict[str, Any]) -> None:
        """Restore stored states into the existing callback objects; warn about states without a callback."""
        lost = []
        for name, kept in states.items():
            here = [callback for callback in self.callbacks if exportable(callback) and type(callback).__name__ == name]
            if not here and name != TrainerControl.__name__:
                lost.append(name)
            # Transformers' checkpoints may hold older states before those of the last save.
            for callback, state in zip(here, kept[-len(here) :] if isinstance(kept, list) else [kept], strict=False):
                _restore(callback, state)
        if lost:
            logger.warning(
                f"the checkpoint has the state of callbacks that this training does not use: {', '.join(lost)}. "
                "Training continues without them. Add them before resuming if they are needed."
            )

    # Calling

    def call_event(self, event: str, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Call the callbacks for an event; return the control left by the last one."""
        listeners = self._listening(event)
        if not listeners:
            return control
        turn = _Turn(listeners, control, len(self.callbacks))
        while (error := outcome(self._tell, turn, event, args, state, kwargs)[1]) is not None:
            self._failed(turn, event, args, state, error)
        return turn.control

    def _shared(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": self.model,
            "processing_class": self.processing_class,
            "optimizer": self.optimizer,
            "lr_scheduler": self.lr_scheduler,
            "train_dataloader": self.train_dataloader,
            "eval_dataloader": self.eval_dataloader,
            **kwargs,
        }

    def _tell(self, turn: _Turn, event: str, args: Any, state: Any, extra: dict[str, Any]) -> None:
        shared = self._shared(extra)
        model, processing_class, optimizer, scheduler, train, evaluation = list(shared.values())[:6]
        for callback in turn.rest:
            turn.told.append(callback)
            method = getattr(callback, event)
            if extra:
                result = method(args, state, turn.control, **shared)
            else:  # the events of every step: written out, the call costs a third less
                result = method(
                    args, state, turn.control, model=model, processing_class=processing_class, optimizer=optimizer,
                    lr_scheduler=scheduler, train_dataloader=train, eval_dataloader=evaluation,
                )  # fmt: skip
            if result is not None:
                turn.control = result
            if len(self.callbacks) != turn.count:
                break
        else:
            return
        told = {id(callback) for callback in turn.told}
        turn.rest = iter([callback for callback in self._listening(event) if id(callback) not in told])
        turn.count = len(self.callbacks)
        self._tell(turn, event, args, state, extra)

    def _listening(self, event: str) -> list[Any]:
        """Return the callbacks that handle an event; most inherit most events from the base, which do nothing."""
        if self._seen != self.callbacks:  # users change the list, too
            self._seen = list(self.callbacks)
            self._listeners.clear()
        found = self._listeners.get(event)
        if found is None:
            found = self._listeners[event] = [
                callback
                for callback in self.callbacks
                if _listens(callback, event) and not any(callback is other for other in self.disabled)
            ]
        return found

    # Failures

    def _failed(self, turn: _Turn, event: str, args: Any, state: Any, error: Exception) -> None:
        callback = turn.told[-1]
        name, step = type(callback).__name__, getattr(state, "global_step", 0)
        if self.on_error == "disable" and not _is_flow(callback):  # without the flow callback, training would never end
            self.disabled.append(callback)
            self._listeners.clear()
            logger.warning(
                f"callback {name} raised in {event}, at step {step}, and is not called any more: {error!r}. "
                "Training continues without it. Fix it, or pass on_error='raise' to stop instead."
            )
            logger.debug("callback %s raised in %s", name, event, exc_info=error)
            return
        raised = error if isinstance(error, CallbackError) else blame(name, event, step, error)
        ended = turn.told if event == "on_train_end" else [callback]
        self._close(args, state, turn.control, raised, [callback], ended)
        if raised is error:
            raise raised
        raise raised from error

    def on_exception(self, args: Any, state: Any, control: Any, exception: BaseException, **kwargs: Any) -> Any:
        """Notify the callbacks of an exception that ends training, then of the end; once per exception.

        A callback that raises here is logged and skipped: the others still finish, and the first exception is the one shown.
        """
        self._close(args, state, control, exception, [], [], **kwargs)
        return control

    def _close(
        self, args: Any, state: Any, control: Any, error: BaseException, told: list[Any], ended: list[Any], **kwargs: Any
    ) -> None:
        by: set[int] = getattr(error, "_fanfold_told", set())
        if id(self) in by:
            return
        with contextlib.suppress(AttributeError):
            error._fanfold_told = by | {id(self)}  # type: ignore[attr-defined]  # noqa: SLF001 - our own marker
        going, self._training = self._training, False
        self._tell_guarded("on_exception", told, (args, state, control), {"exception": error, **kwargs})
        if going:
            self._tell_guarded("on_train_end", ended, (args, state, control), kwargs)

    def _tell_guarded(self, event: str, but: list[Any], known: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        shared = self._shared(kwargs)
        for callback in list(self._listening(event)):
            if any(callback is other for other in but):
                continue
            error = outcome(getattr(callback, event), *known, **shared)[1]
            if error is not None:
                logger.warning(
                    f"callback {type(callback).__name__} raised in {event} while training was ending by an exception: {error!r}. "
                    "The other callbacks are called anyway. Fix the callback."
                )

    # Events with something of their own; the others are added below

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        control.should_training_stop = False
        self._training = True
        self._listeners.clear()  # methods assigned to a callback object count from here on
        return self.call_event("on_train_begin", args, state, control, **kwargs)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        control = self.call_event("on_train_end", args, state, control, **kwargs)
        self._training = False
        return control

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        control.should_epoch_stop = False
        self._listeners.clear()  # as above
        return self.call_event("on_epoch_begin", args, state, control, **kwargs)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        control.should_log = control.should_evaluate = control.should_save = False
        return self.call_event("on_step_begin", args, state, control, **kwargs)

    def on_evaluate(  # type: ignore[override]  # Transformers' signature
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> Any:
        control.should_evaluate = False
        return self.call_event("on_evaluate", args, state, control, metrics=metrics, **kwargs)

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any) -> Any:
        return self.call_event("on_predict", args, state, control, metrics=metrics, **kwargs)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        control.should_save = False
        return self.call_event("on_save", args, state, control, **kwargs)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        control.should_log = False
        return self.call_event("on_log", args, state, control, logs=logs, **kwargs)


def _calling(event: str) -> Any:
    """Return the handler's method for an event that only calls the callbacks."""

    def method(self: CallbackHandler, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> Any:
        return self.call_event(event, args, state, control, **kwargs)

    return method


for _event in _EVENTS:
    if _event not in vars(CallbackHandler):
        setattr(CallbackHandler, _event, _calling(_event))


def _check(callback: Any) -> None:
    if any(callable(getattr(callback, event, None)) for event in _EVENTS):
        return
    kind = f"class {callback.__name__}" if isinstance(callback, type) else f"{callback!r} of type {type(callback).__name__}"
    raise TypeError(
        f"{kind} is not a callback: it is neither a class nor an instance with methods such as on_step_end. "
        "It was not added. Inherit from fanfold.callbacks.TrainerCallback."
    )


def _listens(callback: Any, event: str) -> bool:
    """Return whether a callback handles an event; Transformers' callbacks have no on_exception at all."""
    method = getattr(callback, event, None)
    function = getattr(method, "__func__", method)
    inherited = (
        getattr(function, "__qualname__", "") == f"TrainerCallback.{event}" and getattr(function, "__module__", "") in _BASES
    )
    return method is not None and not inherited


def _is_flow(callback: Any) -> bool:
    return any(base.__name__ == DefaultFlowCallback.__name__ for base in type(callback).__mro__)


def _restore(callback: Any, state: dict[str, Any]) -> None:
    for name, value in state.get("args", {}).items():
        if hasattr(callback, name):  # an argument stored under another name keeps the user's value
            setattr(callback, name, value)
    for name, value in state.get("attributes", {}).items():
        setattr(callback, name, value)
