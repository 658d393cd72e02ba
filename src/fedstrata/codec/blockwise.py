"""Integers with one scale per block.

Each tensor is flattened and cut into blocks of `block` values; the last block may be short.

```
scale = absmax / levels          float32, one per block, in the side section; 0 for a block of zeros
q     = round(x / scale)         −levels … levels, in the values section
x̂     = q · scale                in float32
```

Nearest rounding takes the nearest integer (even on a tie): |x̂ − x| ≤ scale/2. Stochastic rounding takes
⌊x/scale + u⌋ with u uniform on (0, 1): |x̂ − x| ≤ scale, and E[x̂] = x up to 2⁻¹⁷·scale, because u has 16 bits.
Two corners: a scale below 2⁻¹²⁶ is rounded up to a multiple of 2⁻¹⁴⁹, so that no value leaves the range, and a
scale is never so large that levels·scale is not a finite float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import numpy as np

from fedstrata.codec.base import CODECS, Codec
from fedstrata.codec.quantize import (
    apply_scales,
    num_blocks,
    num_pairs,
    pack_nibbles,
    quantize,
    read_scales,
    spans,
    unpack_nibbles,
)
from fedstrata.codec.sections import as_section, check_lengths, flat_input
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.core.wire import Payload
from fedstrata.errors import ConfigError, PayloadError, did_you_mean

Rounding: TypeAlias = Literal["nearest", "stochastic"]
MAX_BLOCK = 65536


@CODECS.register
@dataclass(frozen=True)
class Int8(Codec):
    """One signed byte per value, −127 … 127, and a float32 scale per block: 1 + 4/block bytes per value.

    Args:
        block: Values that share a scale, 1 … 65536.
        rounding: `nearest`, or `stochastic` (unbiased, from the stream that `encode` is given).

    Example:
        >>> from fedstrata.core.tensors import TensorSpec
        >>> layout = Layout((TensorSpec("w", (3,), 0),))
        >>> tensors = {"w": np.array([-127, 63.6, 0], np.float32)}
        >>> payload, _ = Int8().encode(tensors, layout, {}, np.random.default_rng(0))
        >>> Int8().decode(payload, layout)["w"].tolist()
        [-127.0, 64.0, 0.0]
    """

    id: ClassVar[str] = "int8"
    block: int = 256
    rounding: Rounding = "nearest"
    lossless = False
    fixed_length = True
    deltas_only = False

    def __post_init__(self) -> None:
        _check_options(self.id, self.block, self.rounding)

    @property
    def deterministic(self) -> bool:
        """Whether values are rounded to the nearest integer."""
        return self.rounding == "nearest"

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`; `residual` is not used, `rng` by stochastic rounding only."""
        side_bytes, values_bytes = self.max_bytes(layout)
        scales = np.empty(side_bytes // 4, "<f4")
        values = np.empty(values_bytes, np.int8)
        noise = rng if self.rounding == "stochastic" else None
        start = first_block = 0
        for spec in layout:
            for first, steps in quantize(flat_input(tensors, spec), self.block, 127, noise, scales[first_block:]):
                np.copyto(values[start + first : start + first + steps.size], steps, casting="unsafe")
            start += spec.num_values
            first_block += num_blocks(spec, self.block)
        return Payload(as_section(scales), as_section(values)), {}

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`; −128 is refused, and a scale that is negative or not finite."""
        check_lengths(self.id, payload, *self.max_bytes(layout))
        scales = read_scales(self.id, payload.side, 127)
        values = np.frombuffer(payload.values, np.int8)
        if values.size and values.min() == -128:
            raise PayloadError("An int8 payload holds the value −128", expected="−127 … 127")
        tensors: NamedTensors = {}
        start = first_block = 0
        for spec in layout:
            out = np.empty(spec.num_values, np.float32)
            for first, last, block in spans(spec.num_values, self.block):
                out[first:last] = values[start + first : start + last]
                apply_scales(out[first:last], self.block, scales[first_block + block :])
            tensors[spec.name] = out.reshape(spec.shape)
            start += spec.num_values
            first_block += num_blocks(spec, self.block)
        return tensors

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """4 bytes of side per block, 1 byte per value."""
        return 4 * sum(num_blocks(s, self.block) for s in layout), layout.num_values


@CODECS.register
@dataclass(frozen=True)
class Int4(Codec):
    """Four bits per value, −7 … 7, and a float32 scale per block: ½ + 4/block bytes per value.

    A byte holds two values as two's complement nibbles, the earlier one in the lower four bits. Each tensor
    starts on a byte; the spare nibble of an odd one is 0.

    Args:
        block: Values that share a scale, 1 … 65536.
        rounding: `nearest`, or `stochastic` (unbiased, from the stream that `encode` is given).

    Example:
        >>> from fedstrata.core.tensors import TensorSpec
        >>> layout = Layout((TensorSpec("w", (3,), 0),))
        >>> tensors = {"w": np.array([-7, 1, 2], np.float32)}
        >>> payload, _ = Int4().encode(tensors, layout, {}, np.random.default_rng(0))
        >>> bytes(payload.values).hex()
        '1902'
    """

    id: ClassVar[str] = "int4"
    block: int = 256
    rounding: Rounding = "nearest"
    lossless = False
    fixed_length = True
    deltas_only = False

    def __post_init__(self) -> None:
        _check_options(self.id, self.block, self.rounding)

    @property
    def deterministic(self) -> bool:
        """Whether values are rounded to the nearest integer."""
        return self.rounding == "nearest"

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`; `residual` is not used, `rng` by stochastic rounding only."""
        side_bytes, values_bytes = self.max_bytes(layout)
        scales = np.empty(side_bytes // 4, "<f4")
        values = np.empty(values_bytes, np.uint8)
        noise = rng if self.rounding == "stochastic" else None
        start = first_block = 0
        for spec in layout:
            for first, steps in quantize(flat_input(tensors, spec), self.block, 7, noise, scales[first_block:]):
                packed = pack_nibbles(steps)
                values[start + first // 2 : start + first // 2 + packed.size] = packed
            start += num_pairs(spec)
            first_block += num_blocks(spec, self.block)
        return Payload(as_section(scales), as_section(values)), {}

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`; nibbles of −8, filled spare nibbles and wrong scales are refused."""
        check_lengths(self.id, payload, *self.max_bytes(layout))
        scales = read_scales(self.id, payload.side, 7)
        values = np.frombuffer(payload.values, np.uint8)
        tensors: NamedTensors = {}
        start = first_block = 0
        for spec in layout:
            num, pairs = spec.num_values, num_pairs(spec)
            packed = values[start : start + pairs]
            if num % 2 and packed[-1] > 15:
                raise PayloadError("The spare nibble of an int4 tensor is not 0", where=f"tensor {spec.name}")
            out = np.empty(2 * pairs, np.float32)
            for first, last, block in spans(num, self.block):
                unpack_nibbles(packed[first // 2 : (last + 1) // 2], out[first : last + last % 2])
                apply_scales(out[first:last], self.block, scales[first_block + block :])
                if np.isnan(out[first:last].min()):
                    raise PayloadError("An int4 payload holds the value −8", where=f"tensor {spec.name}")
            tensors[spec.name] = out[:num].reshape(spec.shape)
            start += pairs
            first_block += num_blocks(spec, self.block)
        return tensors

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """4 bytes of side per block, 1 byte per two values of a tensor."""
        side = 4 * sum(num_blocks(s, self.block) for s in layout)
        return side, sum(num_pairs(s) for s in layout)


def _check_options(codec_id: str, block: int, rounding: str) -> None:
    problems = []
    if not 1 <= block <= MAX_BLOCK:
        problems.append(f"block = {block}: a whole number from 1 to {MAX_BLOCK} is needed")
    if rounding not in get_args(Rounding):
        problems.append(f'rounding = "{rounding}": {did_you_mean(str(rounding), get_args(Rounding))}')
    if problems:
        raise ConfigError(f"The {codec_id} codec has wrong options", problems=problems)
