"""Four bits per value on the levels of NormalFloat, with one scale per block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from fedstrata.codec.base import CODECS, Codec
from fedstrata.codec.blockwise import MAX_BLOCK
from fedstrata.codec.quantize import apply_scales, num_blocks, num_pairs, read_scales, spans
from fedstrata.codec.sections import as_section, check_lengths, flat_input
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.core.wire import Payload
from fedstrata.errors import ConfigError, PayloadError

LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""The 16 levels of NF4: quantiles of a normal distribution, scaled to −1 … 1, with an exact 0 (level 7)."""
LEVELS.flags.writeable = False

MIDPOINTS = (LEVELS[:-1] + LEVELS[1:]) / np.float32(2)
"""Where the nearest level changes: float32, (l_i + l_{i+1})/2."""
MIDPOINTS.flags.writeable = False


@CODECS.register
@dataclass(frozen=True)
class Nf4(Codec):
    """A 4-bit NormalFloat level per value and a float32 scale per block: ½ + 4/block bytes per value.

        scale = absmax of the block
        code  = number of midpoints below x/scale        0 … 15; 7, the level 0, in a block of zeros
        x̂     = LEVELS[code] · scale                     in float32

    The nearest level is taken, of two equally near ones the lower. The levels are denser around 0, so that normally
    distributed values lose less than with evenly spaced steps; |x̂ − x| ≤ 0.152·scale, at most 0.046·scale for
    |x| ≤ 0.1·scale. A byte holds two codes, the earlier one in the lower four bits; each tensor starts on a byte and
    the spare four bits of an odd one are 0.

    Args:
        block: Values that share a scale, 1 … 65536.

    Example:
        >>> from fedstrata.core.tensors import TensorSpec
        >>> layout = Layout((TensorSpec("w", (3,), 0),))
        >>> payload, _ = Nf4().encode({"w": np.array([-2, 0, 1.1], np.float32)}, layout, {}, np.random.default_rng(0))
        >>> bytes(payload.values).hex()
        '700d'
        >>> Nf4().decode(payload, layout)["w"].tolist()
        [-2.0, 0.0, 1.1252340078353882]

    References:
        Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs, NeurIPS 2023, Section 3 and Appendix E (the
        levels). Differs in: scales are not quantized a second time.
    """

    id: ClassVar[str] = "nf4"
    block: int = 64
    lossless = False
    fixed_length = True
    deltas_only = False
    deterministic = True

    def __post_init__(self) -> None:
        if not 1 <= self.block <= MAX_BLOCK:
            problem = f"block = {self.block}: a whole number from 1 to {MAX_BLOCK} is needed"
            raise ConfigError("The nf4 codec has wrong options", problems=[problem])

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`; `residual` and `rng` are not used."""
        side_bytes, values_bytes = self.max_bytes(layout)
        scales = np.empty(side_bytes // 4, "<f4")
        values = np.empty(values_bytes, np.uint8)
        start = first_block = 0
        for spec in layout:
            for first, codes in nearest_levels(flat_input(tensors, spec), self.block, scales[first_block:]):
                packed = _pack(codes)
                values[start + first // 2 : start + first // 2 + packed.size] = packed
            start += num_pairs(spec)
            first_block += num_blocks(spec, self.block)
        return Payload(as_section(scales), as_section(values)), {}

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`; filled spare bits and wrong scales are refused."""
        check_lengths(self.id, payload, *self.max_bytes(layout))
        scales = read_scales(self.id, payload.side, 1)
        values = np.frombuffer(payload.values, np.uint8)
        tensors: NamedTensors = {}
        start = first_block = 0
        for spec in layout:
            num, pairs = spec.num_values, num_pairs(spec)
            packed = values[start : start + pairs]
            if num % 2 and packed[-1] > 15:
                raise PayloadError("The spare bits of an nf4 tensor are not 0", where=f"tensor {spec.name}")
            out = np.empty(2 * pairs, np.float32)
            pair_values = out.view(np.uint64)
            for first, last, block in spans(num, self.block):  # level and scale while the chunk is in the cache
                pair = slice(first // 2, (last + 1) // 2)
                np.take(_pair_table(), packed[pair], out=pair_values[pair], mode="clip")
                apply_scales(out[first:last], self.block, scales[first_block + block :])
            tensors[spec.name] = out[:num].reshape(spec.shape)
            start += pairs
            first_block += num_blocks(spec, self.block)
        return tensors

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """4 bytes of side per block, 1 byte per two values of a tensor."""
        side = 4 * sum(num_blocks(s, self.block) for s in layout)
        return side, sum(num_pairs(s) for s in layout)


def nearest_levels(flat: np.ndarray, block: int, scales: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """The codes of one tensor, a chunk at a time.

    Args:
        flat: float32, shape [n], finite.
        block: Values that share a scale.
        scales: Filled with one scale per block, shape [at least the number of blocks].

    Yields:
        The first value's index of a chunk, and its codes, uint8. The array is used again for the next chunk.
    """
    for first, last, first_block in spans(flat.size, block):
        rows = -(-(last - first) // block)
        part = flat[first:last]
        if part.size < rows * block:
            part = np.concatenate((part, np.zeros(rows * block - part.size, np.float32)))
        part = part.reshape(rows, block)
        scale = np.abs(np.maximum(part.max(axis=1), -part.min(axis=1)))  # abs: no −0
        scales[first_block : first_block + rows] = scale
        ratio = (part / np.where(scale > 0, scale, np.float32(1))[:, None]).reshape(-1)
        codes = np.zeros(ratio.size, np.uint8)
        above = np.empty(ratio.size, np.bool_)
        for midpoint in MIDPOINTS:
            np.greater(ratio, midpoint, out=above)
            np.add(codes, above.view(np.uint8), out=codes)
        yield first, codes[: last - first]


def _pack(codes: np.ndarray) -> np.ndarray:
    """Two codes per byte, the earlier one in the lower four bits; the spare bits are 0."""
    if codes.size % 2:
        codes = np.append(codes, np.uint8(0))
    pairs = codes.view("<u2")
    packed: np.ndarray = ((pairs & 0x000F) | (pairs >> 4)).astype(np.uint8)
    return packed


@cache
def _pair_table() -> np.ndarray:
    """For every byte its two levels as float32, seen as one u64, shape [256]."""
    byte = np.arange(256)
    table = np.stack((LEVELS[byte & 15], LEVELS[byte >> 4]), axis=1).view(np.uint64).reshape(256)
    table.flags.writeable = False
    return table
