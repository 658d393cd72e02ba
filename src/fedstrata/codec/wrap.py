"""Codecs around other codecs: compressed sections, and memory for what was not sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import zstandard

from fedstrata.codec.base import CODECS, Codec
from fedstrata.codec.sections import flat_input
from fedstrata.core.tensors import Layout, NamedTensors, all_finite, leading_slice
from fedstrata.core.wire import Bytes, Payload
from fedstrata.errors import ConfigError, PayloadError


@CODECS.register
@dataclass(frozen=True)
class Zstd(Codec):
    """Compresses both sections of another codec, each into one Zstandard frame that states its content size.

    An empty section stays empty. The stated size is compared with what the layout allows before anything is
    decompressed, and no more than that is ever written, wherever the size lies.

    Args:
        inner: The codec whose sections are compressed.
        level: Zstandard's level, 1 (fast) … 22 (small).
    """

    id: ClassVar[str] = "zstd"
    inner: Codec = field(metadata={"part": True})
    level: int = 3
    fixed_length = False

    def __post_init__(self) -> None:
        _check_inner(self, self.inner)
        if not 1 <= self.level <= zstandard.MAX_COMPRESSION_LEVEL:
            raise ConfigError(
                "The zstd codec has a wrong level",
                where="level",
                expected=f"1 to {zstandard.MAX_COMPRESSION_LEVEL}",
                got=str(self.level),
            )

    @property
    def lossless(self) -> bool:
        """As the inner codec."""
        return self.inner.lossless

    @property
    def deltas_only(self) -> bool:
        """As the inner codec."""
        return self.inner.deltas_only

    @property
    def deterministic(self) -> bool:
        """As the inner codec."""
        return self.inner.deterministic

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`; residual and stream are the inner codec's."""
        payload, new_residual = self.inner.encode(tensors, layout, residual, rng)
        return Payload(_compress(payload.side, self.level), _compress(payload.values, self.level)), new_residual

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`; sizes are checked before anything is decompressed."""
        side_bytes, values_bytes = self.inner.max_bytes(layout)
        exact = self.inner.fixed_length
        side = _decompress(payload.side, side_bytes, exact, "side")
        values = _decompress(payload.values, values_bytes, exact, "values")
        return self.inner.decode(Payload(side, values), layout)

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """Zstandard's own bound for incompressible input of the inner codec's size."""
        side, values = self.inner.max_bytes(layout)
        return _compress_bound(side), _compress_bound(values)


@CODECS.register
@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Adds what earlier rounds left unsent before encoding, and keeps what is left unsent now.

        c  = x + e            encoded
        e' = c − decode(encode(c))

    so that over rounds Σ decoded + e_last = Σ x, up to float32. For differences only: the residual of weights
    would be added to weights.

    The residual is kept per tensor name at the largest shape seen. A smaller rank uses and updates the leading
    corner; the rest, and tensors that are not in this round's layout, stay as they are.

    Args:
        inner: The codec that encodes c.

    References:
        Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback
        Fixes SignSGD, ICML 2019. Differs in: the residual survives plans of changing strata and ranks.
    """

    id: ClassVar[str] = "error_feedback"
    inner: Codec = field(metadata={"part": True})
    lossless = False
    deltas_only = True

    def __post_init__(self) -> None:
        _check_inner(self, self.inner)

    @property
    def fixed_length(self) -> bool:
        """As the inner codec."""
        return self.inner.fixed_length

    @property
    def deterministic(self) -> bool:
        """As the inner codec."""
        return self.inner.deterministic

    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """See `Codec.encode`.

        Raises:
            PayloadError: If x + e is too large for float32, or a residual belongs to another model.
        """
        corrected: NamedTensors = {}
        for spec in layout:
            tensor = flat_input(tensors, spec).reshape(spec.shape)
            corrected[spec.name] = _add_residual(spec.name, tensor, residual.get(spec.name))
        payload, _ = self.inner.encode(corrected, layout, {}, rng)
        decoded = self.inner.decode(payload, layout)
        new_residual = dict(residual)
        for name, tensor in corrected.items():
            np.subtract(tensor, decoded[name], out=tensor)
            new_residual[name] = _merge_residual(residual.get(name), tensor)
        return payload, new_residual

    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """See `Codec.decode`; the payload is the inner codec's."""
        return self.inner.decode(payload, layout)

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """As the inner codec."""
        return self.inner.max_bytes(layout)


def _check_inner(outer: Codec, inner: Codec) -> None:
    """Raises `ConfigError` if `inner` is no codec or holds, at any depth, a wrapper like `outer`."""
    if not isinstance(inner, Codec):
        raise ConfigError(f"The {outer.id} codec wraps another codec", where="inner", got=type(inner).__name__)
    nested: list[Codec] = [inner]
    while nested:
        codec = nested.pop()
        if codec.id == outer.id:
            raise ConfigError(f"The {outer.id} codec cannot wrap itself", where="inner", do=f"leave one {outer.id} out")
        if dataclasses.is_dataclass(codec):
            nested.extend(getattr(codec, f.name) for f in dataclasses.fields(codec) if f.metadata.get("part"))


def _add_residual(name: str, tensor: np.ndarray, residual: np.ndarray | None) -> np.ndarray:
    """A new array: x + e on the corner that both have, x elsewhere."""
    corrected = tensor.copy()
    if residual is None:
        return corrected
    if residual.ndim != tensor.ndim:
        raise PayloadError(
            f"The stored residual of tensor {name} belongs to another model",
            expected=f"{tensor.ndim} dimensions",
            got=f"{residual.ndim}",
            do="start this client's state afresh",
        )
    common = tuple(min(a, b) for a, b in zip(tensor.shape, residual.shape, strict=True))
    corner = leading_slice(corrected, common)
    with np.errstate(over="ignore"):
        np.add(corner, leading_slice(residual, common), out=corner)
    if not all_finite(corrected):
        raise PayloadError(
            f"Tensor {name} plus what earlier rounds left unsent is too large for float32",
            do="lower the learning rate, or start this client's state afresh",
        )
    return corrected


def _merge_residual(old: np.ndarray | None, new: np.ndarray) -> np.ndarray:
    """`new` in the leading corner of the largest shape seen so far, `old` around it."""
    if old is None or all(a <= b for a, b in zip(old.shape, new.shape, strict=True)):
        return new
    merged = np.zeros(tuple(max(a, b) for a, b in zip(old.shape, new.shape, strict=True)), np.float32)
    leading_slice(merged, old.shape)[...] = old
    leading_slice(merged, new.shape)[...] = new
    return merged


def _compress_bound(num_bytes: int) -> int:
    """ZSTD_compressBound: n + n/256, and a margin that shrinks to 0 at 128 KiB; 0 stays 0."""
    if num_bytes == 0:
        return 0
    return num_bytes + (num_bytes >> 8) + (max(0, (128 << 10) - num_bytes) >> 11)


def _compress(section: Bytes, level: int) -> Bytes:
    if len(section) == 0:
        return b""
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False).compress(section)


def _decompress(section: Bytes, limit: int, exact: bool, name: str) -> Bytes:
    """The content of one compressed section.

    Args:
        section: What arrived.
        limit: Size of the content: exactly, or at most.
        exact: Which of the two.
        name: The section, named in the error.

    Raises:
        PayloadError: Before anything is decompressed if a size is wrong; after it if the frame is damaged.
    """
    if len(section) > _compress_bound(limit):
        raise PayloadError(
            f"The compressed {name} section is too long for its layout",
            expected=f"at most {_compress_bound(limit)} bytes",
            got=str(len(section)),
        )
    if len(section) == 0:
        return b""
    try:
        size = zstandard.frame_content_size(section)
        if not 0 < size <= limit or (exact and size != limit):
            raise PayloadError(
                f"The compressed {name} section states a wrong size",
                expected=f"{'' if exact else 'at most '}{limit} bytes",
                got=str(size) if size >= 0 else "no size",
            )
        content = zstandard.ZstdDecompressor().decompress(section, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise PayloadError(f"The compressed {name} section is damaged", got=str(error)) from error
    if len(content) != size:
        raise PayloadError(
            f"The compressed {name} section lies about its size", expected=str(size), got=str(len(content))
        )
    return content
