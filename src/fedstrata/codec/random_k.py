"""Random entries of every tensor, whose places both sides derive from a seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedstrata.codec.base import CODECS, Codec
from fedstrata.codec.sections import as_section, check_lengths, flat_input, not_finite, too_large
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec, all_finite
from fedstrata.core.wire import Bytes, Payload
from fedstrata.errors import ConfigError, PayloadError

SEED_BYTES = 16
_SIZE_LIMIT = 1 << 32
_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@CODECS.register
@dataclass(frozen=True)
class RandomK(Codec):
    """Sends k entries of each tensor, drawn uniformly without replacement; the others count as zero.

        k = min(n, max(1, ⌊fraction·n + ½⌋))        for a tensor of n > 0 values

    Side: one seed of 16 bytes, drawn from the stream that `encode` is given, new for every client and round; the
    receiver derives the places from it (`drawn_indices`). Values: the entries in ascending place, as float32. A sent
    entry costs 4 bytes, half of what `top_k` pays.

    Args:
        fraction: Share of the entries that is sent, in (0, 1].
        scale: Whether entries are sent as x·n/k, so that E[x̂] = x. Not under error feedback: there what is left
            unsent comes later, and larger entries make the residual grow.

    Example:
        >>> from fedstrata.core.tensors import TensorSpec
        >>> layout = Layout((TensorSpec("w", (8,), 0),))
        >>> tensors = {"w": np.ones(8, np.float32)}
        >>> codec = RandomK(0.25, scale=True)
        >>> payload, _ = codec.encode(tensors, layout, {}, np.random.default_rng(0))
        >>> sorted(codec.decode(payload, layout)["w"].tolist())
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 4.0, 4.0]

    References:
        Konečný et al., Federated Learning: Strategies for Improving Communication Efficiency, 2016, Section 3 (random
        mask); Stich et al., Sparsified SGD with Memory, NeurIPS 2018 (rand-k). Differs in: a seed per payload, a
        fixed k per tensor.
    """

    id: ClassVar[str] = "random_k"
    fraction: float = 0.01
    scale: bool = False
    lossless = False
    fixed_length = True
    deltas_only = True
    deterministic = False

    def __post_init__(self) -> None:
        if not 0 < self.fraction <= 1:
            raise ConfigError(
                "The random_k codec sends a share of the entries",
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
        """See `Codec.encode`; `residual` is not used, `rng` gives the seed.

        Raises:
            PayloadError: If a tensor has 2^32 values or more, or a scaled entry is too large for float32.
        """
        side_bytes, values_bytes = self.max_bytes(layout)
        seed = rng.bytes(SEED_BYTES) if side_bytes else b""
        values = np.empty(values_bytes // 4, "<f4")
        start = 0
        for spec in layout:
            k = self.count(spec.num_values)
            entries = flat_input(tensors, spec)[drawn_indices(seed, spec.name, spec.num_values, k)]
            values[start : start + k] = self._scaled(spec, entries, k)
            start += k
        return Payload(seed, as_section(values)), {}

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`; every seed is valid."""
        check_lengths(self.id, payload, *self.max_bytes(layout))
        values = np.frombuffer(payload.values, "<f4")
        tensors: NamedTensors = {}
        start = 0
        for spec in layout:
            k = self.count(spec.num_values)
            entries = values[start : start + k]
            start += k
            if not all_finite(entries):
                raise not_finite(self.id, spec.name)
            flat = np.zeros(spec.num_values, np.float32)
            flat[drawn_indices(payload.side, spec.name, spec.num_values, k)] = entries
            tensors[spec.name] = flat.reshape(spec.shape)
        return tensors

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """16 bytes of side where there is a value at all, 4 bytes per sent entry."""
        for spec in layout:
            if spec.num_values >= _SIZE_LIMIT:
                raise PayloadError(
                    f"Tensor {spec.name} is too large for the random_k codec",
                    expected="less than 2^32 values",
                    got=str(spec.num_values),
                )
        total = sum(self.count(s.num_values) for s in layout)
        return SEED_BYTES if total else 0, 4 * total

    def _scaled(self, spec: TensorSpec, entries: np.ndarray, k: int) -> np.ndarray:
        """The entries as they are sent."""
        if not self.scale or k in (0, spec.num_values):
            return entries
        ratio = np.float32(spec.num_values / k)
        with np.errstate(over="ignore"):
            scaled: np.ndarray = entries * ratio
        if not all_finite(scaled):
            largest = float(np.finfo(np.float32).max / ratio)
            raise too_large(self.id, spec.name, largest, float(np.abs(entries).max()))
        return scaled


def drawn_indices(seed: Bytes, name: str, num_values: int, k: int) -> np.ndarray:
    """The k places of one tensor, ascending: a function of the seed and the tensor's name alone.

    A stream of places c_0, c_1, … in 0 … n − 1 is read until d different ones have come, d = min(k, n − k). These are
    the places that are sent, or those that are not where 2k > n. With all arithmetic on u64,

        s   = first 8 bytes (little-endian) of SHA-256(seed ‖ name in UTF-8)
        z   = s + (j + 1)·0x9E3779B97F4A7C15
        z   = (z xor z >> 30)·0xBF58476D1CE4E5B9,  z = (z xor z >> 27)·0x94D049BB133111EB,  z = z xor z >> 31
        c_j = ⌊z·n / 2⁶⁴⌋

    (SplitMix64), so that no random number generator of a library has to stay as it is.

    Args:
        seed: 16 bytes.
        name: The tensor's.
        num_values: n < 2³².
        k: 0 … n.

    Example:
        >>> drawn_indices(bytes(16), "w", 10, 3).tolist()
        [0, 4, 7]
    """
    inverted = 2 * k > num_values
    wanted = num_values - k if inverted else k
    key = np.uint64(int.from_bytes(hashlib.sha256(bytes(seed) + name.encode()).digest()[:8], "little"))
    drawn = np.zeros(num_values, np.bool_)
    position, found = 1, 0
    while found < wanted:  # a batch of exactly what is missing can never bring too many
        batch = wanted - found
        drawn[_places(key, position, batch, num_values)] = True
        position += batch
        found = int(np.count_nonzero(drawn))
    return np.flatnonzero(drawn != inverted)


def _places(key: np.uint64, position: int, count: int, num_values: int) -> np.ndarray:
    """c_j for `count` values of j + 1 from `position`."""
    with np.errstate(over="ignore"):
        z = np.arange(position, position + count, dtype=np.uint64)
        z *= np.uint64(0x9E3779B97F4A7C15)
        z += key
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    n = np.uint64(num_values)
    places: np.ndarray = ((z >> _HALF) * n + (((z & _LOW) * n) >> _HALF)) >> _HALF
    return places
