"""The numbers of the block-wise codecs: scales, rounding and nibbles, one cache-sized chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np

from fedstrata.codec.sections import CHUNK
from fedstrata.core.tensors import TensorSpec
from fedstrata.core.wire import Bytes
from fedstrata.errors import PayloadError

_FLOAT32 = np.finfo(np.float32)


def num_blocks(spec: TensorSpec, block: int) -> int:
    """How many blocks a tensor is cut into; the last one may be short."""
    return -(-spec.num_values // block)


def num_pairs(spec: TensorSpec) -> int:
    """How many bytes the nibbles of a tensor take."""
    return (spec.num_values + 1) // 2


def spans(num: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Chunks of whole blocks: first value, value after the last, first block.

    All but the last hold a multiple of four blocks, hence an even number of values.

    Example:
        >>> list(spans(10, 65536))
        [(0, 10, 0)]
    """
    rows = max(4, CHUNK // block // 4 * 4)
    for first_block in range(0, -(-num // block), rows):
        first = first_block * block
        yield first, min(num, first + rows * block), first_block


def quantize(
    flat: np.ndarray, block: int, levels: int, rng: np.random.Generator | None, scales: np.ndarray
) -> Iterator[tuple[int, np.ndarray]]:
    """Rounds one tensor to whole steps.

    Args:
        flat: float32, shape [n], finite.
        block: Values that share a scale.
        levels: Largest step, 127 or 7.
        rng: For stochastic rounding; None rounds to nearest even.
        scales: Filled with one scale per block, shape [at least the number of blocks].

    Yields:
        The first value's index of a chunk, and its steps: whole numbers as float32, −levels … levels. The
        array is used again for the next chunk.
    """
    buffer = None
    for first, last, first_block in spans(flat.size, block):
        rows = -(-(last - first) // block)
        part = flat[first:last]
        if part.size < rows * block:
            part = np.concatenate((part, np.zeros(rows * block - part.size, np.float32)))
        part = part.reshape(rows, block)
        buffer = np.empty((rows, block), np.float32) if buffer is None else buffer[:rows]
        np.abs(part, out=buffer)
        scale = _block_scales(buffer.max(axis=1), levels)
        scales[first_block : first_block + rows] = scale
        np.divide(part, np.where(scale > 0, scale, np.float32(1))[:, None], out=buffer)
        if rng is None:
            np.rint(buffer, out=buffer)
        else:
            buffer += _noise(rng, rows, block)
            np.floor(buffer, out=buffer)
            np.clip(buffer, -levels, levels, out=buffer)
        yield first, buffer.reshape(-1)[: last - first]


def read_scales(codec_id: str, side: Bytes, levels: int) -> np.ndarray:
    """The scales of a payload; each must be finite, ≥ 0, and levels·scale a finite float32.

    Raises:
        PayloadError: If one is not.
    """
    scales = np.frombuffer(side, "<f4")
    if not bool(((scales >= 0) & (scales <= largest_scale(levels))).all()):
        raise PayloadError(
            f"An {codec_id} payload holds a wrong scale",
            expected=f"0 … {float(largest_scale(levels)):.6g}",
            got="a scale that is negative, too large, infinite or NaN",
        )
    return scales


def apply_scales(steps: np.ndarray, block: int, scales: np.ndarray) -> None:
    """Turns the steps of whole blocks (the last may be short) into values, in place: x̂ = q·scale."""
    full = steps.size // block
    whole = steps[: full * block].reshape(full, block)
    np.multiply(whole, scales[:full, None], out=whole)
    if steps.size > full * block:
        steps[full * block :] *= scales[full]


def pack_nibbles(steps: np.ndarray) -> np.ndarray:
    """Two steps per byte, the earlier one in the lower four bits; a spare nibble is 0.

    Example:
        >>> pack_nibbles(np.array([-7, 1, 2], np.float32)).tobytes().hex()
        '1902'
    """
    nibbles = np.zeros(steps.size + steps.size % 2, np.int8)
    np.copyto(nibbles[: steps.size], steps, casting="unsafe")
    pairs = nibbles.view("<u2")
    return ((pairs & 0x000F) | ((pairs >> 4) & 0x00F0)).astype(np.uint8)


def unpack_nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Writes two steps per byte to `out`, float32, shape [2·bytes]; a nibble of −8 becomes NaN."""
    np.take(_nibble_table(), packed, out=out.view(np.uint64), mode="clip")


@cache
def largest_scale(levels: int) -> np.float32:
    """The largest float32 s with levels·s ≤ the largest float32."""
    scale = np.float32(float(_FLOAT32.max) / levels)
    if float(scale) * levels > float(_FLOAT32.max):
        scale = np.nextafter(scale, np.float32(0))
    return scale


@cache
def _nibble_table() -> np.ndarray:
    """For every byte its two steps as float32, seen as one u64, shape [256]."""
    step = np.array([0, 1, 2, 3, 4, 5, 6, 7, np.nan, -7, -6, -5, -4, -3, -2, -1], np.float32)
    byte = np.arange(256)
    table = np.stack((step[byte & 15], step[byte >> 4]), axis=1).view(np.uint64).reshape(256)
    table.flags.writeable = False
    return table


def _block_scales(absmax: np.ndarray, levels: int) -> np.ndarray:
    scale = absmax / np.float32(levels)
    small = scale < _FLOAT32.tiny
    if small.any():
        exact = absmax[small].astype(np.float64) / levels
        scale[small] = np.ceil(exact * 2.0**149) * 2.0**-149
    return np.minimum(scale, largest_scale(levels))


def _noise(rng: np.random.Generator, rows: int, block: int) -> np.ndarray:
    """(k + ½)/2¹⁶ with k uniform on 0 … 65535, float32, shape [rows, block].

    Sixteen bits keep x/scale + noise exact where x/scale is a whole number, so that those are never moved.
    """
    num = rows * block
    words = rng.integers(0, 1 << 64, size=-(-num // 4), dtype=np.uint64).astype("<u8", copy=False)
    noise = words.view("<u2")[:num].astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(2.0**-16)
    return noise.reshape(rows, block)
