"""Arrays of any library, held without waiting for a device and without importing a library the user has not imported."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

from fanfold.media.base import Media, refused

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def is_a(value: object, module: str, *names: str) -> bool:
    """Return whether `value` is an instance of a named class, if its library is already imported."""
    home = sys.modules.get(module)
    classes = (getattr(home, name, None) for name in names) if home is not None else ()
    return any(isinstance(known, type) and isinstance(value, known) for known in classes)


def is_tensor(value: object) -> bool:
    """Return whether a value is a torch tensor."""
    return is_a(value, "torch", "Tensor")


def is_jax(value: object) -> bool:
    """Return whether a value is a JAX array."""
    return is_a(value, "jax", "Array")


def is_array(value: object) -> bool:
    """Return whether a value is an array of numpy, torch or JAX."""
    return is_a(value, "numpy", "ndarray") or is_tensor(value) or is_jax(value)


def on_device(value: Any) -> bool:
    """Return whether a value is a torch tensor outside of host memory: reading it would wait for the device."""
    return is_tensor(value) and value.device.type != "cpu"


def dtype_kind(value: Any) -> str:
    """Return numpy's letter for the element type: b, i, u, f, or another if it is not a real number."""
    name = str(value.dtype).removeprefix("torch.")
    for prefix, kind in (("bool", "b"), ("int", "i"), ("uint", "u"), ("float", "f"), ("bfloat", "f")):
        if name.startswith(prefix):
            return kind
    return getattr(value.dtype, "kind", "O")  # big-endian and structured types of numpy, complex ones of torch


def is_numeric(value: Any) -> bool:
    """Return whether an array holds bools, integers or real floats."""
    return dtype_kind(value) in "biuf"


def host_copy(value: Any, what: str) -> Any:
    """Copy an array in host memory; a JAX array is copied on its device, without waiting."""
    if is_tensor(value):
        return value.detach().clone()
    if is_jax(value):
        return _jax_copy(value, what)
    import numpy as np

    return np.array(value, copy=True)


def _jax_copy(value: Any, what: str) -> Any:
    if is_a(value, "jax.core", "Tracer"):
        raise refused(
            TypeError,
            f"{what} got a value that is being traced by jax.jit",
            "Return it from the function and log it outside",
        )
    # A copy, because donate_argnums would delete the caller's buffer before the encoding thread reads it.
    copy = value.copy()
    copy.copy_to_host_async()
    return copy


def to_numpy(value: Any) -> Array:
    """Return a numpy array of a type native to numpy: bfloat16 and 8-bit floats become float32."""
    import numpy as np

    if is_tensor(value):
        return _tensor_to_numpy(value)
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" and dtype_kind(array) in "biuf" else array


def _tensor_to_numpy(tensor: Any) -> Array:
    try:
        array: Array = tensor.numpy()
    except TypeError:  # bfloat16 and 8-bit floats have no numpy type
        array = tensor.float().numpy()
    return array


class ArrayMedia(Media):
    """Media made from an array, which may still be on a device."""

    _array: Any = None

    def _hold(self, value: Any) -> None:
        """Keep a device tensor as `pending`, and a copy of anything else."""
        what = type(self).__name__
        if hasattr(value, "full_tensor"):
            raise refused(TypeError, f"{what} got a DTensor, which no single rank holds", "Log value.to_local() or full_tensor()")
        if on_device(value):
            self.pending = value.detach()
        else:
            self._array = host_copy(value, what)

    def resolve(self, array: Any) -> None:
        if self.pending is None:  # logged under two keys: the first copy stays
            return
        shape, dtype = tuple(self.pending.shape), self.pending.dtype
        self._array = _landed(array, dtype).reshape(shape).copy()
        self.pending = None

    def _host(self) -> Array:
        """Return the numpy array; raise an error while it is still on the device."""
        if self.pending is not None:
            raise RuntimeError(
                f"{type(self).__name__} is still on {self.pending.device}. It cannot be encoded yet. "
                "Call resolve() with its host copy first."
            )
        return to_numpy(self._array)


def _landed(array: Any, dtype: Any) -> Array:
    """Return a host copy as numbers; it may consist of the raw bits of a type numpy does not have."""
    host = to_numpy(array)
    if "float" in str(dtype) and host.dtype.kind in "iu" and host.dtype.itemsize == dtype.itemsize:
        torch = sys.modules["torch"]
        return to_numpy(torch.from_numpy(host.copy()).view(dtype))
    return host


class Landing(ArrayMedia):
    """One number, or one column of a table, that is still being copied from a device."""

    def __init__(self, value: Any) -> None:
        if not is_numeric(value):
            raise refused(TypeError, f"A table got an array of {value.dtype}", "Give it as real numbers")
        self.shape = tuple(value.shape)
        self._hold(value)

    def value(self) -> Array:
        """Return the array that arrived."""
        return self._host()
