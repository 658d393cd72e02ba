"""Everything that a run adds to linear maps, as one standard LoRA pair per map: what other libraries can load."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedstrata.core.frames import Frames
from fedstrata.core.linalg import LowRank, fix_signs, recompress, single_thread
from fedstrata.core.lora import LoraTerm, product, stacked
from fedstrata.core.shape import TargetShape
from fedstrata.core.tensors import Kind, Layout, NamedTensors, TensorSpec
from fedstrata.errors import ModelError, PayloadError, PlanError

BaseUpdate: TypeAlias = LowRank | np.ndarray
"""What was merged into one map's weight: factors, or [out, in] float32."""

_ROUNDING = 2.0**-23
"""Twice the largest relative error of one rounding to float32."""


@dataclass(frozen=True, eq=False)
class Pairs:
    """Adapters as pairs.

    Attributes:
        layout: A pair per target in module order, each at its own rank, then plain weights.
        tensors: Their values, float32.
        scaling: The factor of B·A per target.
    """

    layout: Layout
    tensors: NamedTensors
    scaling: Mapping[str, float]


def as_pairs(
    targets: Sequence[TargetShape],
    layout: Layout,
    tensors: Mapping[str, np.ndarray],
    scaling: Mapping[str, float],
    *,
    base: Mapping[str, BaseUpdate],
    frames: Frames | None = None,
) -> Pairs:
    """Turns adapters, and what was merged into the base, into pairs.

    A pair of a target whose base never moved stays as it is, bit for bit. An R becomes A and B·R at its scaling. Where
    the base moved by D, the pair becomes D + s·B·A with as few directions as that needs and scaling 1.

    Args:
        targets: All maps that may carry a pair.
        layout: What `tensors` are: pairs, or an R per target, and plain weights.
        tensors: The values, float32.
        scaling: s per target of the layout.
        base: D by target.
        frames: The frozen factors around every R.

    Raises:
        ModelError: If the base moved at a map that carries no pair.
        PayloadError: If an update of the base does not fit its map, or is not finite.
        PlanError: If an R has no frozen factors.
    """
    plain = tuple(s for s in layout if s.kind == "weight")
    unknown = sorted(base.keys() - {t.name for t in targets})
    if unknown:
        raise ModelError(f"{unknown[0]} carries no LoRA pair, so nothing is merged into it")
    specs: list[TensorSpec] = []
    values: NamedTensors = {}
    factors: dict[str, float] = {}
    for t in targets:
        term = _term_of(t.name, layout, tensors, scaling, frames)
        if t.name in base:
            term = _with_base(t, base[t.name], term)
        if term is not None:
            pair: dict[Kind, np.ndarray] = {"lora_A": term.lora_A, "lora_B": term.lora_B}
            specs += (TensorSpec(f"{t.name}.{k}", v.shape, t.block, k) for k, v in pair.items())
            values |= {f"{t.name}.{k}": np.ascontiguousarray(v, np.float32) for k, v in pair.items()}
            factors[t.name] = term.scaling
    values |= {s.name: tensors[s.name] for s in plain}
    return Pairs(Layout((*specs, *plain)), values, factors)


def _term_of(
    target: str,
    layout: Layout,
    tensors: Mapping[str, np.ndarray],
    scaling: Mapping[str, float],
    frames: Frames | None,
) -> LoraTerm | None:
    """The pair of one target; None without an adapter."""
    square = tensors[f"{target}.lora_R"] if f"{target}.lora_R" in layout else None
    if square is None:
        names = (f"{target}.lora_A", f"{target}.lora_B")
        return LoraTerm(tensors[names[0]], tensors[names[1]], scaling[target]) if names[0] in layout else None
    if frames is None:
        raise PlanError("The frozen factors around every R are not known yet", do="call set_frames first")
    left, right = frames.of(target, len(square))
    with single_thread():
        moved = left.astype(np.float64) @ square.astype(np.float64)
    return LoraTerm(right, moved, scaling[target])


def _with_base(target: TargetShape, update: BaseUpdate, term: LoraTerm | None) -> LoraTerm:
    """D + s·B·A as one pair of scaling 1."""
    n_out, n_in = target.out_features, target.in_features
    is_dense = isinstance(update, np.ndarray)
    parts = (update,) if isinstance(update, np.ndarray) else (update.left, update.right)
    shapes = [p.shape for p in parts]
    fits = shapes == [(n_out, n_in)] if is_dense else shapes[0] == (n_out, shapes[1][0]) and shapes[1][1:] == (n_in,)
    if not fits or not all(np.isfinite(p).all() for p in parts):
        raise PayloadError(
            f"The update of {target.name} does not fit",
            where="the merged base",
            expected=f"finite [{n_out}, {n_in}], or factors of it",
            got=" and ".join(str(list(s)) for s in shapes),
        )
    own = [] if term is None else [term]
    if isinstance(update, np.ndarray):
        matrix = _factored(update.astype(np.float64) + sum(product(t) for t in own))
    else:
        matrix = recompress(stacked([LoraTerm(update.right, update.left), *own]))
    return LoraTerm(matrix.right, matrix.left)


def _factored(dense: np.ndarray) -> LowRank:
    """A matrix that is known to float32, as (U·S)·Vᵀ without the directions that are rounding.

    Rounding every entry to float32 once adds a matrix of norm at most about 2⁻²⁴·max|D|·(√out + √in)/√3. A direction
    below σ = 2⁻²³·max|D|·(√out + √in) is dropped: it cannot be told from the rounding of some ten merges, and is as
    small. A zero matrix keeps one direction of zeros.
    """
    with single_thread():
        u, s, vt = np.linalg.svd(dense, full_matrices=False)
    noise = _ROUNDING * float(np.abs(dense).max()) * (math.sqrt(dense.shape[0]) + math.sqrt(dense.shape[1]))
    keep = max(1, int(np.count_nonzero(s > noise)))
    left, right = fix_signs(u[:, :keep], vt[:keep])
    return LowRank(left * s[:keep], right)
