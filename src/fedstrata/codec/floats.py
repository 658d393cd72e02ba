"""Floating-point codecs: all values one after the other, little-endian, no side section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedstrata.codec.base import CODECS, Codec
from fedstrata.codec.sections import CHUNK, as_section, check_lengths, flat_input, split, too_large
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.core.wire import Payload


@CODECS.register
@dataclass(frozen=True)
class Float32(Codec):
    """The values as they are: 4 bytes each, lossless.

    `decode` returns read-only views of the payload, without a copy.

    Example:
        >>> from fedstrata.core.tensors import TensorSpec
        >>> layout = Layout((TensorSpec("w", (2,), 0),))
        >>> codec = Float32()
        >>> tensors = {"w": np.array([1, -2], np.float32)}
        >>> payload, _ = codec.encode(tensors, layout, {}, np.random.default_rng(0))
        >>> bytes(payload.values).hex()
        '0000803f000000c0'
        >>> codec.decode(payload, layout)["w"].tolist()
        [1.0, -2.0]
    """

    id: ClassVar[str] = "float32"
    lossless = True
    fixed_length = True
    deltas_only = False
    deterministic = True

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`; `residual` and `rng` are not used."""
        out = np.empty(layout.num_values, "<f4")
        start = 0
        for spec in layout:
            out[start : start + spec.num_values] = flat_input(tensors, spec)
            start += spec.num_values
        return Payload(b"", as_section(out)), {}

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`."""
        check_lengths(self.id, payload, *self.max_bytes(layout))
        flat = np.frombuffer(payload.values, "<f4").astype(np.float32, copy=False)
        return split(flat, layout, self.id)

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """No side, 4 bytes per value."""
        return 0, 4 * layout.num_values


@CODECS.register
@dataclass(frozen=True)
class Float16(Codec):
    """IEEE 754 half precision, 2 bytes each, rounded to nearest even.

    The relative error is at most 2⁻¹¹ from 2⁻¹⁴ upwards, the absolute error at most 2⁻²⁵ below. A magnitude
    above 65504 is an error that names the tensor, never infinity.
    """

    id: ClassVar[str] = "float16"
    lossless = False
    fixed_length = True
    deltas_only = False
    deterministic = True

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`; `residual` and `rng` are not used.

        Raises:
            PayloadError: If a magnitude is above 65504.
        """
        return _encode_halves(self.id, tensors, layout, "<f2", 65504.0, _to_float16), {}

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`."""
        check_lengths(self.id, payload, *self.max_bytes(layout))
        return split(np.frombuffer(payload.values, "<f2").astype(np.float32), layout, self.id)

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """No side, 2 bytes per value."""
        return 0, 2 * layout.num_values


@CODECS.register
@dataclass(frozen=True)
class BFloat16(Codec):
    """The upper half of a float32, 2 bytes each, rounded to nearest even: u + 0x7FFF + ((u >> 16) & 1) >> 16.

    The relative error is at most 2⁻⁸ from 2⁻¹²⁶ upwards, the absolute error at most 2⁻¹³⁴ below. A magnitude
    above (2 − 2⁻⁷)·2¹²⁷ ≈ 3.39e38 is an error that names the tensor, never infinity.
    """

    id: ClassVar[str] = "bfloat16"
    lossless = False
    fixed_length = True
    deltas_only = False
    deterministic = True

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`; `residual` and `rng` are not used.

        Raises:
            PayloadError: If a magnitude is above the largest bfloat16.
        """
        return _encode_halves(self.id, tensors, layout, "<u2", (2 - 2.0**-7) * 2.0**127, _to_bfloat16), {}

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`."""
        check_lengths(self.id, payload, *self.max_bytes(layout))
        bits = np.frombuffer(payload.values, "<u2").astype(np.uint32)
        np.left_shift(bits, 16, out=bits)
        return split(bits.view(np.float32), layout, self.id)

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """No side, 2 bytes per value."""
        return 0, 2 * layout.num_values


def _to_float16(part: np.ndarray, out: np.ndarray) -> None:
    out[:] = part


def _to_bfloat16(part: np.ndarray, out: np.ndarray) -> None:
    bits = part.view(np.uint32)
    rounded = np.right_shift(bits, 16)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    np.right_shift(rounded, 16, out=rounded)
    np.copyto(out, rounded, casting="unsafe")


def _encode_halves(
    codec_id: str,
    tensors: Mapping[str, np.ndarray],
    layout: Layout,
    dtype: str,
    largest: float,
    convert: Callable[[np.ndarray, np.ndarray], None],
) -> Payload:
    """Checks the range and converts, one cache-sized chunk at a time."""
    out = np.empty(layout.num_values, dtype)
    start = 0
    for spec in layout:
        flat = flat_input(tensors, spec)
        for first in range(0, flat.size, CHUNK):
            part = flat[first : first + CHUNK]
            magnitude = max(float(part.max()), -float(part.min()))
            if not magnitude <= largest:
                raise too_large(codec_id, spec.name, largest, magnitude)
            convert(part, out[start : start + part.size])
            start += part.size
    return Payload(b"", as_section(out))
