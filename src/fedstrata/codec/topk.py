"""The largest entries of every tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedstrata.codec.base import CODECS, Codec
from fedstrata.codec.sections import as_section, check_lengths, flat_input, not_finite
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec, all_finite
from fedstrata.core.wire import Payload
from fedstrata.errors import ConfigError, PayloadError

_INDEX_LIMIT = 1 << 32
_SAMPLE_STEP = 61


@CODECS.register
@dataclass(frozen=True)
class TopK(Codec):
    """Sends the k entries of largest magnitude of each tensor; the others count as zero.

        k = min(n, max(1, ⌊fraction·n + ½⌋))        for a tensor of n > 0 values

    Of equal magnitudes the lower index wins. Side: k indices per tensor (u32, ascending, into the flattened
    tensor); values: the same entries as float32. A sent entry costs 8 bytes, so that it saves bytes below a
    fraction of one half.

    Args:
        fraction: Share of the entries that is sent, in (0, 1].

    Example:
        >>> TopK(0.25).count(10)
        3
    """

    id: ClassVar[str] = "top_k"
    fraction: float = 0.01
    lossless = False
    fixed_length = True
    deltas_only = True
    deterministic = True

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                "The top_k codec sends a share of the entries",
                where="fraction",
                expected="a number above 0 and at most 1",
                got=str(self.fraction),
            )

    def count(self, num_values: int) -> int:
        """How many entries of a tensor with `num_values` values are sent."""
        return min(num_values, max(1, math.floor(self.fraction * num_values + 0.5)))

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`; `residual` and `rng` are not used.

        Raises:
            PayloadError: If a tensor has more values than a u32 can count.
        """
        counts = self._counts(layout)
        side = np.empty(sum(counts), "<u4")
        values = np.empty(sum(counts), "<f4")
        start = 0
        for spec, k in zip(layout, counts, strict=True):
            flat = flat_input(tensors, spec)
            indices = largest_indices(flat, k)
            side[start : start + k] = indices
            values[start : start + k] = flat[indices]
            start += k
        return Payload(as_section(side), as_section(values)), {}

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`; indices must be in range and strictly ascending."""
        check_lengths(self.id, payload, *self.max_bytes(layout))
        side = np.frombuffer(payload.side, "<u4")
        values = np.frombuffer(payload.values, "<f4")
        tensors: NamedTensors = {}
        start = 0
        for spec, k in zip(layout, self._counts(layout), strict=True):
            indices, entries = side[start : start + k], values[start : start + k]
            start += k
            if k and not (int(indices[-1]) < spec.num_values and bool((indices[1:] > indices[:-1]).all())):
                raise PayloadError(
                    "A top_k payload holds wrong indices",
                    where=f"tensor {spec.name}",
                    expected=f"strictly ascending indices below {spec.num_values}",
                )
            if not all_finite(entries):
                raise not_finite(self.id, spec.name)
            flat = np.zeros(spec.num_values, np.float32)
            flat[indices] = entries
            tensors[spec.name] = flat.reshape(spec.shape)
        return tensors

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """4 bytes of side and 4 bytes of values per sent entry."""
        total = 4 * sum(self._counts(layout))
        return total, total

    def _counts(self, layout: Layout) -> list[int]:
        return [self._count_of(spec) for spec in layout]

    def _count_of(self, spec: TensorSpec) -> int:
        if spec.num_values >= _INDEX_LIMIT:
            raise PayloadError(
                f"Tensor {spec.name} is too large for the top_k codec",
                expected="less than 2^32 values",
                got=str(spec.num_values),
            )
        return self.count(spec.num_values)


def largest_indices(flat: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k entries of largest magnitude, ascending; of equal magnitudes the lower index wins.

    Magnitudes are compared as the integer bits of |x|, which order as the numbers do. Entries that are surely
    too small are dropped first (a bound guessed from a sample and then verified by counting), so that the
    selection itself looks at few of them.

    Args:
        flat: float32, shape [n], finite.
        k: How many, 0 … n.

    Example:
        >>> largest_indices(np.array([1, -3, 2, 3, -3], np.float32), 2).tolist()
        [1, 3]
    """
    num = flat.size
    if k == num:
        return np.arange(num)
    bits = np.bitwise_and(flat.view(np.uint32), 0x7FFFFFFF)
    candidates = np.flatnonzero(bits >= _lower_bound(bits, k))
    if candidates.size < k:
        candidates = np.arange(num)
    pool = bits[candidates]
    threshold = np.partition(pool, pool.size - k)[pool.size - k]
    keep = pool > threshold
    ties = np.flatnonzero(pool == threshold)
    keep[ties[: k - int(np.count_nonzero(keep))]] = True
    indices: np.ndarray = candidates[keep]
    return indices


def _lower_bound(bits: np.ndarray, k: int) -> np.uint32:
    """A guess that lies below the k-th largest for most inputs: a quantile of every 61st entry, with a margin."""
    sample = bits[::_SAMPLE_STEP]
    expected = k / bits.size * sample.size
    rank = math.ceil(expected + 6 * math.sqrt(expected) + 6)
    if rank >= sample.size:
        return np.uint32(0)
    return np.uint32(np.partition(sample, sample.size - rank)[sample.size - rank])
