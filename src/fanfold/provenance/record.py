"""The content of a stamp: the run, code, command, data and environment a model file comes from. Never a secret.

Modules needed only for writing are imported where they are used, to keep `fanfold inspect` fast.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Mapping
from typing import Any

from .._version import __version__
from ..errors import FanfoldError

NAME = "producer_info.json"  # the name PyTorch's documentation uses for such a file inside a model
FORMAT = 1
MAX_BYTES = 1 << 20
MAX_DATA = 1000  # characters of a dataset's name in the config, and number of names
_DATA_KEYS = ("data", "dataset", "datasets", "dataset_name", "train_dataset", "train_data", "data_path", "dataset_path")
MAX_DEPTH = 100  # levels of nesting; ours has a few, and printing much deeper ones overflows the stack

_PACKAGES = frozenset(
    "torch numpy safetensors transformers accelerate peft diffusers tokenizers datasets lightning pytorch-lightning keras jax "
    "scikit-learn skops h5py gguf flax onnx onnxruntime onnxscript torchvision torchaudio timm deepspeed bitsandbytes "
    "triton".split()
)


def make(run: Any, extra: Mapping[str, Any], *, parent: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the stamp for a file saved now; `run` is the current run, or None. `step` and `data` in `extra` get their own keys.

    `parent` is the stamp of the file this one was made from, if it has one.
    """
    from ..facts.mask import mask
    from ..plain import plain

    given: dict[str, Any] = dict(mask(plain(dict(extra))))  # type: ignore[call-overload]
    step = given.pop("step", None)
    stamp = {
        "stamp": FORMAT,
        "producer": f"fanfold {__version__}",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "run": _of_run(run, step),
        "data": given.pop("data", None) or _data_of(run),
        "parent": _origin(parent),
        **of_process(),
        "extra": given or None,
    }
    return {name: value for name, value in stamp.items() if value is not None}


def encode(stamp: Mapping[str, Any]) -> bytes:
    """Return a stamp as bytes to write into a file; raise if it is longer than readers accept."""
    try:
        text = json.dumps(stamp, ensure_ascii=True, sort_keys=True, default=str, allow_nan=False)
    except ValueError:  # JSON parsers of other languages reject NaN, and with it the whole stamp
        text = json.dumps(_finite(stamp), ensure_ascii=True, sort_keys=True, default=str)
    if len(text) > MAX_BYTES:
        raise FanfoldError(
            f"the stamp would have {len(text):,} bytes, and {MAX_BYTES:,} are read back. Nothing was stamped. "
            "Give it less to say: an identifier or a digest in the place of the thing itself."
        )
    return text.encode()


def _finite(value: Any) -> Any:
    """Return a copy of plain data, with NaN and infinities as strings."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(data: bytes) -> dict[str, Any] | None:
    """Parse a stamp; return None if the bytes are not one (other programs use the same name)."""
    try:
        return parse(data)
    except ValueError:
        return None


def parse(data: bytes) -> dict[str, Any]:
    """Parse a stamp; raise ValueError with the reason if it cannot be read."""
    if (length := len(data.rstrip())) > MAX_BYTES:
        raise ValueError(f"it has {length:,} bytes, and {MAX_BYTES:,} are read")
    try:
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError("it is not JSON") from error
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004 - one error type for everything wrong with it
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH):
        inner = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in inner if isinstance(item, (dict, list))]
    if level:
        raise ValueError("it is nested too deeply")
    return found


def _of_run(run: Any, step: Any) -> dict[str, Any] | None:
    if run is None or run.status == "disabled":
        return None if step is None else {"step": step}
    from ..plain import plain

    return {
        "id": run.id,
        "project": run.project,
        "name": run.name,
        "attempt": getattr(run, "attempt", 1),
        "rank": getattr(run, "rank", 0),
        "step": step_of(run) if step is None else step,
        "config": _digest(json.dumps(plain(run.config), sort_keys=True, default=str)),
    }


def _data_of(run: Any) -> Any:
    """Return the data a run trains on: its artifacts of type "dataset", else the datasets named in its config."""
    if run is None or run.status == "disabled":
        return None
    if datasets := getattr(run, "_datasets", None):
        return [{"name": name, "digest": digest} for name, digest in tuple(datasets.items())]
    from ..facts.mask import mask

    config = run.config
    for name in _DATA_KEYS:
        value = config.get(name)
        texts = value if isinstance(value, (list, tuple)) else [value]
        if value and len(texts) <= MAX_DATA and all(isinstance(text, str) and len(text) <= MAX_DATA for text in texts):
            return mask(list(texts) if isinstance(value, (list, tuple)) else value)
    return None


def step_of(run: Any) -> int | None:
    """Return the last step a run has logged."""
    recorder = getattr(run, "_recorder", None)
    return recorder.high if recorder is not None and recorder.high >= 0 else None


@functools.lru_cache(4)  # masking is the expensive part of a stamp, and configs rarely change between checkpoints
def _digest(config: str) -> str:
    """Return the digest of a config without its secrets: a short password could be found by brute force."""
    import hashlib

    from ..facts.mask import mask

    text = json.dumps(mask(json.loads(config)), sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _origin(parent: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the part of a parent's stamp that identifies its run."""
    run = (parent or {}).get("run")
    if not isinstance(run, Mapping):
        return None
    return {name: run.get(name) for name in ("id", "project", "name", "step")} | {"time": (parent or {}).get("time")}


@functools.cache
def of_process() -> dict[str, Any]:
    """Return the facts that do not change during a process; cached, since every checkpoint needs them."""
    from ..facts import collect

    found: dict[str, Any] = collect.environment()
    node, packages = found.get("node") or {}, found.get("packages") or {}
    return {
        "git": _code(found.get("git")),
        "command": found.get("command"),
        "packages": {
            "python": (found.get("python") or {}).get("version"),
            **{name: version for name, version in packages.items() if name in _PACKAGES},
        },
        "node": {
            **{name: node.get(name) for name in ("machine", "cpu", "os")},
            "gpus": [gpu["name"] for gpu in found.get("gpus") or []],
        },
    }


def _code(found: Any) -> dict[str, Any] | None:
    if not isinstance(found, Mapping):
        return None
    return {name: found.get(name) for name in ("commit", "branch", "remote", "dirty")}
