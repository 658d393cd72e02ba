"""Strata, tensor specifications and layouts: what a payload holds, known to both sides from the plan."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeAlias

import numpy as np

from fedstrata.errors import PayloadError

NamedTensors: TypeAlias = dict[str, np.ndarray]
"""Tensors by name, in the order of their layout; float32 and C-contiguous unless a docstring says otherwise."""

Stratum: TypeAlias = int | Literal["embeddings", "head"]
"""A transformer block's number, counted from the input, or one of the two named strata."""

Kind: TypeAlias = Literal["lora_A", "lora_B", "lora_R", "adapter_down", "adapter_bias", "adapter_up", "weight"]
"""A factor of a LoRA pair, R between two frozen factors, a part of a bottleneck adapter, or a plain weight."""

_ROWS = frozenset({"lora_A", "adapter_down", "adapter_bias"})
_COLUMNS = frozenset({"lora_B", "adapter_up"})

EMBEDDINGS: Literal["embeddings"] = "embeddings"
HEAD: Literal["head"] = "head"


def stratum_order(stratum: Stratum) -> tuple[int, int]:
    """Sort key: embeddings, then blocks from the input, then the head."""
    if isinstance(stratum, str):
        return (0, 0) if stratum == EMBEDDINGS else (2, 0)
    return (1, stratum)


def stratum_name(stratum: Stratum) -> str:
    """The name a user reads: "block 5", "embeddings" or "head"."""
    return f"block {stratum}" if isinstance(stratum, int) else stratum


def lowest_block(strata: Iterable[Stratum], num_blocks: int) -> int:
    """The lowest of some strata as a block: 0 for the embeddings, `num_blocks` for the head.

    Example:
        >>> lowest_block([5, 4, "head"], 6), lowest_block(["head"], 6), lowest_block(["embeddings", 5], 6)
        (4, 6, 0)
    """
    places = {EMBEDDINGS: 0, HEAD: num_blocks}
    return min((places[s] if isinstance(s, str) else s for s in strata), default=num_blocks)


def parse_stratum(text: str | int) -> Stratum:
    """The stratum that a record's key names: "5", "embeddings" or "head".

    Example:
        >>> parse_stratum("5"), parse_stratum("head")
        (5, 'head')
    """
    if isinstance(text, int):
        return text
    if text == EMBEDDINGS:
        return EMBEDDINGS
    if text == HEAD:
        return HEAD
    return int(text)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layout.

    Attributes:
        name: `<module path>.<kind>`, or a plain weight's own name.
        shape: lora_A `[rank, in_features]`, lora_B `[out_features, rank]`, lora_R `[rank, rank]`, adapter_down
            `[width, features]`, adapter_bias `[width]`, adapter_up `[features, width]`, or the parameter's shape.
        stratum: The stratum it belongs to.
        kind: Its part in the adapter.
    """

    name: str
    shape: tuple[int, ...]
    stratum: Stratum
    kind: Kind = "weight"

    @property
    def num_values(self) -> int:
        """How many numbers the tensor holds."""
        return math.prod(self.shape)

    @property
    def target(self) -> str:
        """The full path of the linear map that a LoRA factor belongs to; for a plain weight, its own name."""
        return self.name if self.kind == "weight" else self.name.rsplit(".", 1)[0]

    @property
    def rank(self) -> int:
        """The rank of a LoRA factor, the width of a bottleneck adapter; 0 for a plain weight."""
        if self.kind == "weight":
            return 0
        return self.shape[1] if self.kind in _COLUMNS else self.shape[0]

    @property
    def has_rank_rows(self) -> bool:
        """Whether rank slices are rows (of lora_A, say) rather than columns."""
        return self.kind in _ROWS

    def with_rank(self, rank: int) -> TensorSpec:
        """The same tensor cut to its first `rank` slices; a plain weight is returned unchanged."""
        if self.kind == "weight":
            return self
        if self.kind == "lora_R":
            return TensorSpec(self.name, (rank, rank), self.stratum, self.kind)
        shape = (rank, *self.shape[1:]) if self.kind in _ROWS else (*self.shape[:-1], rank)
        return TensorSpec(self.name, shape, self.stratum, self.kind)


@dataclass(frozen=True)
class Layout:
    """The ordered tensors of a payload. It follows from the plan and is never inferred from data."""

    specs: tuple[TensorSpec, ...]
    _index: Mapping[str, TensorSpec] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index = {s.name: s for s in self.specs}
        if len(index) != len(self.specs):
            raise PayloadError("A layout names a tensor twice")
        object.__setattr__(self, "_index", index)

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def __getitem__(self, name: str) -> TensorSpec:
        return self._index[name]

    def __contains__(self, name: object) -> bool:
        return name in self._index

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Tensor names in order."""
        return tuple(s.name for s in self.specs)

    @cached_property
    def num_values(self) -> int:
        """How many numbers all tensors hold together."""
        return sum(s.num_values for s in self.specs)

    @cached_property
    def strata(self) -> tuple[Stratum, ...]:
        """The strata that occur, from the input to the head."""
        return tuple(sorted({s.stratum for s in self.specs}, key=stratum_order))

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """The linear maps with a LoRA pair, in order."""
        return tuple(dict.fromkeys(s.target for s in self.specs if s.kind.startswith("lora_")))

    def of(self, stratum: Stratum) -> tuple[TensorSpec, ...]:
        """The tensors of one stratum."""
        return tuple(s for s in self.specs if s.stratum == stratum)

    def restrict(self, strata: Iterable[Stratum]) -> Layout:
        """The same layout with only these strata."""
        keep = set(strata)
        return Layout(tuple(s for s in self.specs if s.stratum in keep))

    def without(self, kinds: Collection[Kind]) -> Layout:
        """The same layout without tensors of these kinds."""
        return Layout(tuple(s for s in self.specs if s.kind not in kinds)) if kinds else self

    def with_ranks(self, ranks: Mapping[Stratum, int]) -> Layout:
        """The layout of a plan: LoRA factors cut to the stratum's rank, left out at rank 0.

        A plain weight stays if its stratum is listed with any rank above 0.
        """
        return Layout(tuple(s.with_rank(ranks[s.stratum]) for s in self.specs if ranks.get(s.stratum, 0) > 0))

    def zeros(self, dtype: type[np.floating] = np.float32) -> NamedTensors:
        """All tensors as zeros."""
        return {s.name: np.zeros(s.shape, dtype) for s in self.specs}

    def check(self, tensors: Mapping[str, np.ndarray], *, where: str = "payload") -> None:
        """Raises `PayloadError` unless names, order, shapes and dtype are exactly the layout's, all finite."""
        self.check_shapes(tensors, where=where)
        for name in self.names:
            if not all_finite(tensors[name]):
                raise PayloadError(
                    f"Tensor {name} holds NaN or infinite values",
                    where=where,
                    do="lower the learning rate, or look at this client's data",
                )

    def check_shapes(self, tensors: Mapping[str, np.ndarray], *, where: str = "payload") -> None:
        """Raises `PayloadError` unless names, order, shapes and dtype are exactly the layout's."""
        if tuple(tensors) != self.names:
            missing = [n for n in self.names if n not in tensors]
            extra = [n for n in tensors if n not in self]
            raise PayloadError(
                "The tensors are not the planned ones",
                where=where,
                expected=f"{len(self.specs)} tensors in the order of the plan",
                got=f"missing {missing[:3]}, not planned {extra[:3]}" if missing or extra else "another order",
            )
        for spec in self.specs:
            tensor = tensors[spec.name]
            if tensor.shape != spec.shape or tensor.dtype != np.float32:
                raise PayloadError(
                    f"Tensor {spec.name} has the wrong shape or type",
                    where=where,
                    expected=f"float32 {list(spec.shape)}",
                    got=f"{tensor.dtype} {list(tensor.shape)}",
                )


def all_finite(tensor: np.ndarray) -> bool:
    """Whether every value is finite, usually in one pass without a temporary array.

    A finite sum proves it; only a sum that is not finite (a NaN, an infinity, or an overflow of finite values)
    needs the exact test: min and max propagate NaN and show infinities.
    """
    if tensor.size == 0:
        return True
    with np.errstate(over="ignore", invalid="ignore"):
        if np.isfinite(tensor.sum()):
            return True
    return bool(np.isfinite(tensor.min()) and np.isfinite(tensor.max()))


def leading_slice(tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The leading corner of a tensor: the first rows of A, the first columns of B.

    Example:
        >>> leading_slice(np.arange(6).reshape(3, 2), (2, 2)).tolist()
        [[0, 1], [2, 3]]
    """
    if tensor.shape == shape:
        return tensor
    return tensor[tuple(slice(n) for n in shape)]


def slice_tensors(tensors: Mapping[str, np.ndarray], layout: Layout) -> NamedTensors:
    """The tensors of `layout` cut out of larger ones, contiguous."""
    return {s.name: np.ascontiguousarray(leading_slice(tensors[s.name], s.shape)) for s in layout}
