"""Histograms: any array reduced to counts and edges, small enough to be stored in the frame itself."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from numbers import Real
from sys import float_info
from typing import TYPE_CHECKING, Any, ClassVar

from fanfold.media.arrays import ArrayMedia, is_array, is_numeric
from fanfold.media.base import Encoded, broken, number_fact, refused

if TYPE_CHECKING:
    from fanfold.media.arrays import Array

MAX_BINS = 4096
NEAR_MAX = float_info.max / 4  # larger spans overflow when multiplied and added
CHUNK = 1 << 18  # elements at a time: a large tensor is never copied to float64 as a whole


@dataclass(frozen=True)
class Summary:
    """The content of a histogram; min, max, mean and std are None if no value is finite, or none are known."""

    counts: list[float]
    edges: list[float]
    count: float
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    std: float | None = None
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0


class Histogram(ArrayMedia):
    """A distribution: an array, tensor or list of numbers, or ready `np_histogram=(counts, edges)`.

    NaN and infinities are left out of the bins and counted separately. Counting happens in `encode()`, not in the constructor.

    Args:
        data: The numbers.
        bins: How many bins.
        np_histogram: Counts and edges that you computed yourself.

    Raises:
        ValueError: Neither or both of `data` and `np_histogram` are given, or they do not fit.

    Example:
        ```python
        import numpy as np

        import fanfold

        run = fanfold.init("weights")
        run.log({"layer1": fanfold.Histogram(np.random.randn(1000))})
        ```
    """

    kind: ClassVar[str] = "histogram"
    _summary: Summary | None = None

    def __init__(self, data: Any = None, *, bins: int = 64, np_histogram: Any = None) -> None:
        if (data is None) == (np_histogram is None):
            raise refused(ValueError, "Histogram needs values or np_histogram=, one of the two", "Pass exactly one of them")
        if isinstance(bins, bool) or not hasattr(bins, "__index__") or not 1 <= int(bins) <= MAX_BINS:
            raise refused(ValueError, f"Histogram got bins={bins!r}", f"Pass a whole number from 1 to {MAX_BINS}")
        self.bins = int(bins)
        if np_histogram is not None:
            self._summary = _ready(np_histogram)
        else:
            self._take(data)

    def _take(self, data: Any) -> None:
        if isinstance(data, (list, tuple, range)):
            self._array = numbers(data)
            return
        if not is_array(data) and hasattr(data, "__array__"):
            import numpy as np

            data = np.asarray(data)
        if not is_array(data):
            raise refused(
                TypeError, f"Histogram got a value of type {type(data).__name__}", "Pass an array, a tensor or a list of numbers"
            )
        if not is_numeric(data):
            raise refused(TypeError, f"Histogram got an array of {data.dtype}", "Pass real numbers")
        self._hold(data)

    def encode(self) -> Encoded:
        facts = {name: value for name, value in asdict(self.summary).items() if value is not None}
        return Encoded(b"", "", facts)

    @property
    def summary(self) -> Summary:
        """The content of the histogram, computed on first use."""
        if self._summary is None:
            self._summary = summarise(self._host().reshape(-1), self.bins)
        return self._summary

    def restore(self, meta: Mapping[str, Any], data: bytes) -> None:
        try:
            counts, edges = _checked(meta.get("counts"), meta.get("edges"))
        except (TypeError, ValueError, OverflowError) as error:
            raise broken("histogram", error) from error
        low, top, mean, std = (number_fact(meta, name) for name in ("min", "max", "mean", "std"))
        odd = {name: int(_finite(number_fact(meta, name))) for name in ("nan", "pos_inf", "neg_inf")}
        self.bins = len(counts)
        self._summary = Summary(counts, edges, sum(counts), low, top, mean, std, **odd)

    @property
    def counts(self) -> Array:
        """The number of values in each bin."""
        import numpy as np

        return np.array(self.summary.counts)

    @property
    def edges(self) -> Array:
        """The edges of the bins, one more than there are bins."""
        import numpy as np

        return np.array(self.summary.edges, np.float64)

    @property
    def count(self) -> float:
        """The number of finite values."""
        return self.summary.count

    @property
    def min(self) -> float | None:
        """The smallest finite value."""
        return self.summary.min

    @property
    def max(self) -> float | None:
        """The largest finite value."""
        return self.summary.max

    @property
    def mean(self) -> float | None:
        """The mean of the finite values."""
        return self.summary.mean

    @property
    def std(self) -> float | None:
        """The standard deviation of the finite values."""
        return self.summary.std

    @property
    def nan(self) -> int:
        """The number of NaN values."""
        return self.summary.nan

    @property
    def pos_inf(self) -> int:
        """The number of +infinity values."""
        return self.summary.pos_inf

    @property
    def neg_inf(self) -> int:
        """The number of -infinity values."""
        return self.summary.neg_inf


def all_numbers(values: list[Any] | tuple[Any, ...] | range) -> bool:
    """Return whether a list holds only plain numbers, checking each distinct type once."""
    return all(issubclass(kind, Real) for kind in set(map(type, values)))


def numbers(values: list[Any] | tuple[Any, ...] | range) -> Any:
    """Copy a list of numbers; a nested list goes through numpy."""
    if all_numbers(values):
        try:
            return array("d", values)
        except OverflowError as error:
            raise refused(ValueError, "Histogram got a whole number that no float can hold", "Pass smaller numbers") from error
    import numpy as np

    try:
        nested = np.array(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise refused(TypeError, f"Histogram got a list it cannot read: {error}", "Pass numbers of one type and shape") from error
    if nested.dtype.kind not in "biuf":
        raise refused(TypeError, "Histogram got a list of something else than numbers", "Pass real numbers")
    return nested


def _ready(pair: Any) -> Summary:
    try:
        counts, edges = pair
        counts, edges = (part.tolist() if hasattr(part, "tolist") else list(part) for part in (counts, edges))
        counts, edges = _checked(counts, edges)
    except (TypeError, ValueError, OverflowError) as error:
        raise refused(
            ValueError, f"np_histogram= is not a (counts, edges) pair: {error}", "Pass what numpy.histogram returns"
        ) from error
    return Summary(counts, edges, sum(counts))


def _checked(counts: Any, edges: Any) -> tuple[list[float], list[float]]:
    """Check counts and edges, given by a user or read from disk."""
    for part in (counts, edges):
        if not isinstance(part, list) or not all(type(value) in (int, float) and math.isfinite(value) for value in part):
            raise ValueError("counts and edges must be lists of finite numbers")
    if not 1 <= len(counts) <= MAX_BINS or len(edges) != len(counts) + 1:
        raise ValueError(f"{len(counts)} counts and {len(edges)} edges do not fit, or are more than {MAX_BINS}")
    if min(counts) < 0 or any(before > after for before, after in pairwise(edges)):
        raise ValueError("counts must not be negative, and edges must rise")
    return counts, [float(edge) for edge in edges]


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0


def summarise(values: Array, bins: int) -> Summary:
    """Count `values` in `bins` equal bins between the smallest and the largest finite value."""
    import numpy as np

    size, total, low, top = 0, 0.0, math.inf, -math.inf
    odd = {"nan": 0, "pos_inf": 0, "neg_inf": 0}
    with np.errstate(over="ignore"):
        for finite in _finite_chunks(values, odd):
            size, total = size + finite.size, total + float(finite.sum())
            low, top = min(low, float(finite.min())), max(top, float(finite.max()))
    if size == 0:
        return Summary([0] * bins, [float(edge) for edge in np.linspace(0, 1, bins + 1)], 0, **odd)
    mean = total / size if math.isfinite(total) else _mean_of_huge(values, size)
    mean = min(max(mean, low), top)
    edges = _edges(low, top, bins)
    counts, squares = np.zeros(len(edges) - 1, np.int64), 0.0
    with np.errstate(over="ignore"):
        for finite in _finite_chunks(values, {}):
            counts += _count(finite, edges)
            squares += float(np.square(finite - mean).sum())
    std = math.sqrt(squares / size) if math.isfinite(squares) else math.inf
    return Summary(counts.tolist(), edges.tolist(), size, low, top, mean, std, **odd)


def _finite_chunks(values: Array, odd: dict[str, int]) -> Iterator[Array]:
    """Yield the finite values as float64 in chunks, and count the others in `odd` unless it is empty."""
    import numpy as np

    for start in range(0, values.size, CHUNK):
        part = values[start : start + CHUNK].astype(np.float64)
        keep = np.isfinite(part)
        if not keep.all():
            if odd:
                odd["nan"] += int(np.isnan(part).sum())
                odd["pos_inf"] += int(np.isposinf(part).sum())
                odd["neg_inf"] += int(np.isneginf(part).sum())
            part = part[keep]
        if part.size:
            yield part


def _mean_of_huge(values: Array, size: int) -> float:
    """Divide before adding, because the sum would overflow."""
    import numpy as np

    with np.errstate(over="ignore"):
        return sum(float((part / size).sum()) for part in _finite_chunks(values, {}))


def _edges(low: float, top: float, bins: int) -> Array:
    """Return strictly increasing edges; fewer bins if floats are too far apart for this many."""
    import numpy as np

    if low == top:
        pad = max(0.5, abs(low) * 1e-9)
        low, top = max(low - pad, -float_info.max), min(top + pad, float_info.max)
    if top - low < NEAR_MAX:
        return np.unique(np.linspace(low, top, bins + 1))
    weight = np.linspace(0, 1, bins + 1)
    return np.unique(low * (1 - weight) + top * weight)


def _count(values: Array, edges: Array) -> Array:
    """Count like numpy.histogram, but several times faster if the bins are wide enough to divide by."""
    import numpy as np

    bins, low, top = len(edges) - 1, float(edges[0]), float(edges[-1])
    width = top / bins - low / bins
    if not top - low < NEAR_MAX or width < 64 * np.spacing(max(abs(low), abs(top))):
        return np.histogram(values, edges)[0]
    index = ((values - low) / width).astype(np.int64)
    np.clip(index, 0, bins - 1, out=index)
    # The division rounds; comparing with the edges on both sides makes the counts exact.
    index -= values < edges[index]
    index += (values >= edges[index + 1]) & (index < bins - 1)
    return np.bincount(index, minlength=bins)
