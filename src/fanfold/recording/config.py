"""A run's config: a dict that can also be read by attribute, and whose changes are written to the journal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import guard
from ..values import items_of, text_of


def as_mapping(config: Any) -> dict[str, Any]:
    """Return a config as a dict: from a mapping, a namespace, a dataclass, or an object with to_dict()."""
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return dict(items_of(config))
    if hasattr(type(config), "__dataclass_fields__"):
        import dataclasses

        return {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    if callable(getattr(config, "to_dict", None)):
        return dict(config.to_dict())
    if hasattr(config, "__dict__"):
        return {key: value for key, value in vars(config).items() if not key.startswith("_")}
    raise TypeError(
        f"config is a {type(config).__name__}, which has no named values. The run was not started. "
        "Pass a dict, an argparse.Namespace or a dataclass."
    )


def _nobody(_config: Config) -> None:
    """Ignore a change to a copy of a config, which does not belong to a run."""


class Config(dict[str, Any]):
    """The run's config: `config.lr`, `config["lr"]`, `config.update(...)`. Each change is journalled immediately.

    A change that fails is logged as a warning, as everywhere in a run; looking up a missing key raises, as in any dict.
    """

    def __init__(self, values: Mapping[str, Any], changed: Callable[[Config], None] = _nobody, *, strict: bool = False) -> None:
        super().__init__(values)
        object.__setattr__(self, "_changed", changed)
        object.__setattr__(self, "_strict", strict)

    def _change(self, action: Callable[[], Any]) -> Any:
        """Make a change and record it. An interrupted change is undone: its value would otherwise break every later one."""
        before, found, done = dict(self), None, False
        try:
            with guard("change the config", strict=self._strict):
                found = action()
                self._changed(self)
            done = True
        finally:
            if not done:
                super().clear()
                super().update(before)
        return found

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"config has no {name!r}; it has: {', '.join(map(text_of, self)) or 'nothing'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __setitem__(self, key: str, value: Any) -> None:
        self._change(lambda: super(Config, self).__setitem__(key, value))

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        self._change(lambda: None)

    def __ior__(self, other: Any) -> Config:  # type: ignore[override,misc]
        self.update(other)
        return self

    def update(self, *args: Any, allow_val_change: bool | None = None, **kwargs: Any) -> None:
        """Set many values at once. `allow_val_change` is accepted for wandb compatibility; values may always change."""
        del allow_val_change
        self._change(lambda: super(Config, self).update(*(as_mapping(arg) for arg in args), **kwargs))

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self.get(key, default)

    def pop(self, *args: Any) -> Any:
        found = super().pop(*args)
        self._change(lambda: None)
        return found

    def popitem(self) -> tuple[str, Any]:
        found = super().popitem()
        self._change(lambda: None)
        return found

    def clear(self) -> None:
        self._change(lambda: super(Config, self).clear())

    def __reduce__(self) -> tuple[Any, ...]:
        return Config, (dict(self),)  # a copy, pickled or not, does not belong to the run
