"""LoRA algebra: ΔW = s · B · A with A [rank, in_features] and B [out_features, rank], in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from fedstrata.core.linalg import (
    LowRank,
    TruncatedSvd,
    combination_norms,
    orthonormal_completion,
    recompress,
    single_thread,
    truncated_svd,
)
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors, leading_slice
from fedstrata.errors import AggregationError

ScalingRule: TypeAlias = Literal["alpha_over_r", "alpha_over_sqrt_r"]
Form: TypeAlias = Literal["balanced", "orthonormal_a"]
SPARE_RATIO = 1e-6
"""A direction with σ ≤ 1e-6·σ_1 is spare: its B column is 0, so that it adds nothing and can still learn."""


def lora_scaling(alpha: float, rank: int, rule: ScalingRule = "alpha_over_r") -> float:
    """The scaling s: alpha / rank, or alpha / √rank.

    Example:
        >>> lora_scaling(16, 4), lora_scaling(16, 4, "alpha_over_sqrt_r")
        (4.0, 8.0)
    """
    return alpha / (rank if rule == "alpha_over_r" else math.sqrt(rank))


def client_scalings(
    server_scaling: Mapping[str, float], server_layout: Layout, layout: Layout, power: float
) -> dict[str, float]:
    """s_k = s·(r/r_k)^p per target: a client's scaling at its rank r_k, from the server's s and r.

    With s = alpha/r, p = 1 gives alpha/r_k; with s = alpha/√r, p = ½ gives alpha/√r_k; p = 0 gives s.
    Bottleneck adapters have no scaling.

    Args:
        server_scaling: s per target.
        server_layout: Where r stands.
        layout: The client's: r_k.
        power: p.
    """
    pairs = [s for s in layout if s.kind.startswith("lora_")]
    ranks = {s.target: (server_layout[s.name].rank, s.rank) for s in pairs}
    return {t: server_scaling[t] * (whole / mine) ** power for t, (whole, mine) in ranks.items()}


def init_lora(seed: int, layout: Layout, *, server_round: int = 0) -> NamedTensors:
    """First values of everything that is added to a model: LoRA pairs, R between frozen factors, bottleneck adapters.

        pair          A ~ U(−1/√in, 1/√in) from generator(seed, "lora_init", target),  B = 0
        square        R = 0
        bottleneck    D ~ U(−1/√h, 1/√h) from generator(seed, "lora_init", block's path),  b = 0,  U = 0

    The model starts as its base. Rows of A and D are drawn in order, so that a smaller rank has exactly the first rows
    of a larger one.

    Args:
        seed: The run's seed.
        layout: Its plain weights are skipped.
        server_round: For pairs that are drawn anew in every round: the stream is (seed, "lora_init", round, target).

    Returns:
        float32, by name, in the layout's order.
    """
    path = (server_round,) if server_round else ()
    tensors: NamedTensors = {}
    for spec in layout:
        if spec.kind in ("lora_A", "adapter_down"):
            bound = 1 / math.sqrt(spec.shape[1])
            rng = generator(seed, "lora_init", *path, spec.target)
            tensors[spec.name] = rng.uniform(-bound, bound, spec.shape).astype(np.float32)
        elif spec.kind != "weight":
            tensors[spec.name] = np.zeros(spec.shape, np.float32)
    return tensors


def orthonormal_rows(lora_A: np.ndarray) -> np.ndarray:
    """Orthonormal rows that span what the rows of A span, in float32; needs rank ≤ in."""
    empty = np.zeros((0, lora_A.shape[1]))
    return orthonormal_completion(empty, lora_A.astype(np.float64)).astype(np.float32)


def rank_slice(lora_A: np.ndarray, lora_B: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """The first `rank` rows of A and columns of B, as views."""
    return leading_slice(lora_A, (rank, lora_A.shape[1])), leading_slice(lora_B, (lora_B.shape[0], rank))


@dataclass(frozen=True, eq=False)
class LoraTerm:
    """weight · scaling · B · A: one client's product with its weight in a sum.

    Attributes:
        lora_A: Shape [rank, in].
        lora_B: Shape [out, rank].
        scaling: s.
        weight: q.
    """

    lora_A: np.ndarray
    lora_B: np.ndarray
    scaling: float = 1.0
    weight: float = 1.0

    @property
    def rank(self) -> int:
        """Number of rank slices."""
        return int(self.lora_A.shape[0])

    @property
    def coefficient(self) -> float:
        """The number q · s that multiplies B · A."""
        return self.weight * self.scaling


def product(term: LoraTerm) -> np.ndarray:
    """The product q · s · B · A as a dense [out, in] matrix in float64."""
    with single_thread():
        dense = term.lora_B.astype(np.float64) @ term.lora_A.astype(np.float64)
    return np.asarray(term.coefficient * dense)


def effective_weight(weight: np.ndarray, term: LoraTerm, *, fan_in_fan_out: bool = False) -> np.ndarray:
    """The weight that a map with a LoRA pair really applies, in float64.

    Args:
        weight: The base weight as stored: [out, in] (nn.Linear), or [in, out] with `fan_in_fan_out` (Conv1D).
        term: The pair.
        fan_in_fan_out: How `weight` is stored.

    Returns:
        W + s·B·A, or W + (s·B·A)ᵀ, in the orientation of `weight`.

    Raises:
        AggregationError: If the shapes do not fit.
    """
    update = product(term)
    update = update.T if fan_in_fan_out else update
    if update.shape != weight.shape:
        raise AggregationError(
            "The LoRA pair does not fit the base weight",
            expected=f"a weight of shape {list(update.shape)}",
            got=str(list(weight.shape)),
            do="fan_in_fan_out says whether the weight is stored as [in, out]",
        )
    return np.asarray(weight.astype(np.float64) + update)


def stacked(terms: Sequence[LoraTerm]) -> LowRank:
    """Σ q_k·s_k·B_k·A_k as one product of rank Σ r_k: left = [B_1 B_2 …], right = [q_1·s_1·A_1; q_2·s_2·A_2; …].

    Weight and scaling stand on one factor only.

    Raises:
        AggregationError: Without a term, or if the maps differ in size.
    """
    left, right = _side_by_side(terms)
    return LowRank(left, right * _coefficients(terms)[:, None])


def truncated_svd_of_stack(terms: Sequence[LoraTerm], rank: int) -> TruncatedSvd:
    """The `rank` largest singular triplets of Σ q_k·s_k·B_k·A_k, without forming [out, in]."""
    return truncated_svd(stacked(terms), rank)


def recompressed_stack(terms: Sequence[LoraTerm]) -> LowRank:
    """Σ q_k·s_k·B_k·A_k with at most min(out, in) directions; lossless up to rounding."""
    return recompress(stacked(terms))


def refactor(svd: TruncatedSvd, fresh_A: np.ndarray, *, scaling: float, form: Form = "balanced") -> LoraTerm:
    """A LoRA pair of a given rank whose product scaling·B·A is the truncated matrix.

    With U, S, Vᵀ cut to the rank of `fresh_A`:

        balanced         B = U·√(S/s),  A = √(S/s)·Vᵀ
        orthonormal_a    B = U·S/s,     A = Vᵀ

    Spare directions (σ ≤ 1e-6·σ_1, or more slices than the matrix has directions) get a zero column in B, so that
    the product does not change, and a row in A that is not zero, so that they can learn: the fresh initial row of
    that index, or with `orthonormal_a` an orthonormal completion that starts from it.

    Args:
        svd: Of the merged product, at this rank or a larger one.
        fresh_A: Initial A of the target, shape [rank, in]; its rank is the result's.
        scaling: s, divided out of the factors.
        form: How S is spread over the factors.

    Returns:
        The pair in float64, with weight 1.

    Raises:
        AggregationError: If an orthonormal A would need more rows than it has columns, if the decomposition was cut
            to a smaller rank, or if scaling is not positive.
    """
    rank, num_features = fresh_A.shape
    too_many = form == "orthonormal_a" and rank > num_features
    if not scaling > 0 or too_many or len(svd.s) < min(rank, len(svd.spectrum)):
        raise AggregationError(
            "This product cannot be factored again",
            expected=f"a scaling above 0, a decomposition of rank {rank} or more, and rank ≤ in for orthonormal rows",
            got=f"scaling {scaling}, a decomposition of rank {len(svd.s)}, in = {num_features}",
        )
    keep = min(rank, int(np.count_nonzero(svd.s > SPARE_RATIO * svd.spectrum[0])))
    u, s, vt = svd.u[:, :keep], svd.s[:keep] / scaling, svd.vt[:keep]
    lora_A = fresh_A.astype(np.float64)
    lora_B = np.zeros((svd.u.shape[0], rank))
    if form == "balanced":
        root = np.sqrt(s)
        lora_B[:, :keep], lora_A[:keep] = u * root, vt * root[:, None]
    else:
        spare = lora_A[keep:].copy()
        lora_B[:, :keep], lora_A[:keep] = u * s, vt
        lora_A[keep:] = orthonormal_completion(vt, spare)
    return LoraTerm(lora_A, lora_B, scaling)


@dataclass(frozen=True)
class Exactness:
    """How far the server's product is from the weighted mean of the clients' products.

    Attributes:
        error: E = ‖D_s − Σ q_k·D_k‖_F.
        product_norm: ‖Σ q_k·D_k‖_F.
        update_norm: ‖Σ q_k·(D_k − D_k,start)‖_F.
    """

    error: float
    product_norm: float
    update_norm: float

    @property
    def relative(self) -> float:
        """E / ‖Σ q_k·D_k‖_F; 0/0 = 0, infinite where only the denominator is 0."""
        return _ratio(self.error, self.product_norm)

    @property
    def relative_to_update(self) -> float:
        """E / ‖Σ q_k·(D_k − D_k,start)‖_F; 0/0 = 0, infinite where only the denominator is 0."""
        return _ratio(self.error, self.update_norm)


def exactness_error(server: LoraTerm, clients: Sequence[LoraTerm], starts: Sequence[LoraTerm]) -> Exactness:
    """Compares the server's product with the weighted mean of the clients', from thin QRs of the stacked factors.

    Norms that are mere rounding count as 0.

    Args:
        server: D_s, with weight 1.
        clients: D_k with its q_k as weight; Σ q_k = 1.
        starts: D_k,start with q_k; equal starts may be given once with their summed weight.
    """
    terms = [server, *clients, *starts]
    left, right = _side_by_side(terms)
    which = np.repeat([0] + [1] * len(clients) + [2] * len(starts), [t.rank for t in terms])
    #                          server  clients  starts
    signs = np.array([[1.0, -1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, -1.0]])
    norms = combination_norms(left, right, signs[:, which] * _coefficients(terms))
    return Exactness(*(float(n) for n in norms))


def combine_exactness(parts: Sequence[Exactness]) -> Exactness:
    """The exactness over several targets: norms of the matrices side by side, √Σ x²."""
    return Exactness(
        math.hypot(*(p.error for p in parts)),
        math.hypot(*(p.product_norm for p in parts)),
        math.hypot(*(p.update_norm for p in parts)),
    )


def _ratio(error: float, norm: float) -> float:
    if error == 0:
        return 0.0
    return error / norm if norm > 0 else math.inf


def _coefficients(terms: Sequence[LoraTerm]) -> np.ndarray:
    return np.repeat([t.coefficient for t in terms], [t.rank for t in terms])


def _side_by_side(terms: Sequence[LoraTerm]) -> tuple[np.ndarray, np.ndarray]:
    """[B_1 B_2 …] of shape [out, R] and [A_1; A_2; …] of shape [R, in], R = Σ r_k, in float64."""
    sizes = {(t.lora_B.shape[0], t.lora_A.shape[1]) for t in terms}
    if len(sizes) != 1 or any(t.lora_A.shape[0] != t.lora_B.shape[1] for t in terms):
        raise AggregationError(
            "These LoRA pairs cannot be put side by side",
            expected="at least one pair, all of one map, with as many rows in A as columns in B",
            got=f"maps of sizes {sorted(sizes)}",
        )
    left = np.concatenate([t.lora_B for t in terms], axis=1, dtype=np.float64)
    right = np.concatenate([t.lora_A for t in terms], axis=0, dtype=np.float64)
    return left, right
