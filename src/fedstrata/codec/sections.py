"""What every codec does with its two sections: exact lengths first, flat float32 in, views and checks out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec, all_finite
from fedstrata.core.wire import Bytes, Payload
from fedstrata.errors import PayloadError

CHUNK = 1 << 16
"""Values that are worked on at once: 256 KiB of float32 stay in a core's second-level cache."""


def check_lengths(codec_id: str, payload: Payload, side_bytes: int, values_bytes: int) -> None:
    """Raises `PayloadError` unless both sections are exactly as long as the layout demands."""
    if (len(payload.side), len(payload.values)) != (side_bytes, values_bytes):
        raise PayloadError(
            f"A {codec_id} payload has the wrong length for its layout",
            expected=f"{side_bytes} bytes of side and {values_bytes} bytes of values",
            got=f"{len(payload.side)} and {len(payload.values)}",
        )


def flat_input(tensors: Mapping[str, np.ndarray], spec: TensorSpec) -> np.ndarray:
    """One tensor as a contiguous row of float32, shape [num_values]; a view where it is contiguous already.

    Raises:
        PayloadError: If it is missing or not float32 of the layout's shape.
    """
    tensor = tensors.get(spec.name)
    if tensor is None or tensor.shape != spec.shape or tensor.dtype != np.float32:
        raise PayloadError(
            f"Tensor {spec.name} cannot be encoded",
            expected=f"float32 {list(spec.shape)}",
            got="no such tensor" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}",
        )
    return np.ascontiguousarray(tensor).reshape(-1)


def as_section(array: np.ndarray) -> Bytes:
    """The bytes of a contiguous array that nobody else holds, as a read-only view without a copy."""
    array.flags.writeable = False
    return array.view(np.uint8).data


def split(flat: np.ndarray, layout: Layout, codec_id: str) -> NamedTensors:
    """Cuts decoded values into the layout's tensors, as views.

    Args:
        flat: float32, shape [num_values of the layout].
        layout: Names and shapes.
        codec_id: Named in the error.

    Raises:
        PayloadError: If a value is NaN or infinite; names the tensor.
    """
    tensors: NamedTensors = {}
    start = 0
    for spec in layout:
        tensors[spec.name] = flat[start : start + spec.num_values].reshape(spec.shape)
        start += spec.num_values
    if not all_finite(flat):
        name = next(n for n, tensor in tensors.items() if not all_finite(tensor))
        raise not_finite(codec_id, name)
    return tensors


def not_finite(codec_id: str, name: str) -> PayloadError:
    """The error for a decoded tensor with NaN or infinite values."""
    return PayloadError(f"A {codec_id} payload holds NaN or infinite values", where=f"tensor {name}")


def too_large(codec_id: str, name: str, largest: float, got: float) -> PayloadError:
    """The error for a value that the codec cannot represent."""
    return PayloadError(
        f"Tensor {name} holds a value that {codec_id} cannot represent",
        expected=f"magnitudes up to {largest:.6g}",
        got=f"{got:.6g}",
        do="lower the learning rate, or use the float32 codec",
    )
