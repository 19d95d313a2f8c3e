"""What a stamp says: which run, code, command, data and environment a model file comes from. Never a secret.

What only writing needs is imported where it is used: `fanfold inspect` reads, and answers at once.
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

NAME = "producer_info.json"  # the name PyTorch's own guide gives to such a file inside a model
FORMAT = 1
MAX_BYTES = 1 << 20
MAX_DATA = 1000  # letters of a name that the config gives the data, and names
_DATA_KEYS = ("data", "dataset", "datasets", "dataset_name", "train_dataset", "train_data", "data_path", "dataset_path")
MAX_DEPTH = 100  # tables within tables; ours have a few, and whoever prints deeper ones runs out of stack

_PACKAGES = frozenset(
    "torch numpy safetensors transformers accelerate peft diffusers tokenizers datasets lightning pytorch-lightning keras jax "
    "scikit-learn skops h5py gguf flax onnx onnxruntime onnxscript torchvision torchaudio timm deepspeed bitsandbytes "
    "triton".split()
)


def make(run: Any, extra: Mapping[str, Any], *, parent: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Make the stamp of a file saved now; `run` is the current run, or None. `step` and `data` have places of their own.

    `parent` is the stamp of the file that this one was made from, where it carries one.
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
    """Return a stamp as the bytes that go into a file; refuse one that is longer than any reader takes."""
    try:
        text = json.dumps(stamp, ensure_ascii=True, sort_keys=True, default=str, allow_nan=False)
    except ValueError:  # other languages' readers know no NaN, and would find no stamp at all
        text = json.dumps(_finite(stamp), ensure_ascii=True, sort_keys=True, default=str)
    if len(text) > MAX_BYTES:
        raise FanfoldError(
            f"the stamp would have {len(text):,} bytes, and {MAX_BYTES:,} are read back. Nothing was stamped. "
            "Give it less to say: an identifier or a digest in the place of the thing itself."
        )
    return text.encode()


def _finite(value: Any) -> Any:
    """Copy plain data, with NaN and infinities as texts."""
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def decode(data: bytes) -> dict[str, Any] | None:
    """Read a stamp back; None if these bytes are none (a file of that name may be anybody's)."""
    try:
        return parse(data)
    except ValueError:
        return None


def parse(data: bytes) -> dict[str, Any]:
    """Read a stamp back; a ValueError says why one cannot be read."""
    if (length := len(data.rstrip())) > MAX_BYTES:
        raise ValueError(f"it has {length:,} bytes, and {MAX_BYTES:,} are read")
    try:
        found = json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except ValueError as error:
        raise ValueError("it is no JSON") from error
    if not isinstance(found, dict):
        raise ValueError("it is no table of JSON")  # noqa: TRY004 - one kind of error for whatever is wrong with it
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
    """Return what a run knows of the data it trains on: artifacts of the kind "dataset", else what its config names."""
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
    high = getattr(run, "_high", -1)
    return int(high) if high >= 0 else None


@functools.lru_cache(4)  # masking is the dear part of a stamp, and a config hardly changes between two checkpoints
def _digest(config: str) -> str:
    """Return the digest of a config without its secrets: one of a short password could be found by trying."""
    import hashlib

    from ..facts.mask import mask

    text = json.dumps(mask(json.loads(config)), sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _origin(parent: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Keep of a parent's stamp what finds its run again."""
    run = (parent or {}).get("run")
    if not isinstance(run, Mapping):
        return None
    return {name: run.get(name) for name in ("id", "project", "name", "step")} | {"time": (parent or {}).get("time")}


@functools.cache
def of_process() -> dict[str, Any]:
    """Return what does not change while a process lives; read once, since every checkpoint asks for it."""
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
