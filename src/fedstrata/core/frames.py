"""Frozen factors with a small square matrix between them: ΔW = s·B·R·A.

B [out, r] has orthonormal columns and A [r, in] orthonormal rows, so that ‖B·R·A‖_F = ‖R‖_F; only R [r, r] is trained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.core.linalg import orthonormal_completion, single_thread, truncated_svd
from fedstrata.core.lora import LoraTerm, stacked
from fedstrata.core.rng import generator
from fedstrata.core.shape import TargetShape
from fedstrata.core.tensors import NamedTensors, Stratum
from fedstrata.errors import AggregationError, ModelError, PayloadError, PlanError

TOLERANCE = 1e-4
"""Largest entry of BᵀB − I or A·Aᵀ − I: float32 rounding is far below, anything else far above."""


@dataclass(frozen=True, eq=False)
class Frames:
    """The frozen factors of every target, at the largest rank; a smaller rank has the leading slices.

    Attributes:
        factors: B [out, r] and A [r, in] by target, float32.
    """

    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def __contains__(self, target: object) -> bool:
        return target in self.factors

    def rank(self, target: str) -> int:
        """The largest rank of a target; 0 without a frame."""
        return len(self.factors[target][1]) if target in self.factors else 0

    def of(self, target: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """B [out, rank] and A [rank, in], views.

        Raises:
            PlanError: If the target has no frame of this rank.
        """
        if not 1 <= rank <= self.rank(target):
            raise PlanError(
                f"{target} has no frozen factors of rank {rank}", expected=f"1 to {self.rank(target)}", where="frames"
            )
        left, right = self.factors[target]
        return left[:, :rank], right[:rank]

    def to_tensors(self) -> NamedTensors:
        """A and B by name (`<target>.lora_A`, `<target>.lora_B`), for a payload or a checkpoint."""
        named: NamedTensors = {}
        for target, (left, right) in self.factors.items():
            named[f"{target}.lora_A"], named[f"{target}.lora_B"] = right, left
        return named

    @staticmethod
    def from_tensors(named: Mapping[str, np.ndarray]) -> Frames:
        """What `to_tensors` gave.

        Raises:
            PayloadError: If a factor is missing.
        """
        targets = dict.fromkeys(name.rpartition(".")[0] for name in named)
        missing = [n for t in targets for n in (f"{t}.lora_A", f"{t}.lora_B") if n not in named]
        if missing or len(named) != 2 * len(targets):
            raise PayloadError(
                "The frozen factors are not complete", expected="A and B of each target", got=str(missing)
            )
        return Frames({t: (named[f"{t}.lora_B"], named[f"{t}.lora_A"]) for t in targets})

    def check(self, targets: Iterable[TargetShape]) -> None:
        """Looks at every factor.

        Raises:
            ModelError: If there is no such target.
            PayloadError: If a factor is not a finite float32 matrix of its map's size with orthonormal slices.
        """
        sizes = {t.name: (t.out_features, t.in_features) for t in targets}
        for target, (left, right) in self.factors.items():
            if target not in sizes:
                raise ModelError(f"{target} is no map that carries an adapter", where="frames")
            n_out, n_in = sizes[target]
            rank = len(right)
            fits = left.shape == (n_out, rank) and right.shape == (rank, n_in) and 1 <= rank <= min(n_out, n_in)
            if not fits or left.dtype != np.float32 or right.dtype != np.float32 or not _is_orthonormal(left.T, right):
                raise PayloadError(
                    f"The frozen factors of {target} do not fit",
                    where="frames",
                    expected=f"float32 B [{n_out}, r] and A [r, {n_in}] with orthonormal columns and rows",
                    got=f"{left.dtype} {list(left.shape)} and {right.dtype} {list(right.shape)}",
                )


def drawn_frames(seed: int, targets: Sequence[TargetShape], ranks: Mapping[Stratum, int]) -> Frames:
    """Frames that every side draws for itself, so that none is sent.

    Row i of a normal [r, in + out] matrix from generator(seed, "frame", target) holds the i-th direction of A and of B;
    each half is made orthonormal by QR with a positive diagonal of R. Directions are drawn in order: the frame of a
    smaller rank has, up to rounding, the leading slices of this one.

    Args:
        seed: The run's seed.
        targets: The maps.
        ranks: Largest rank per stratum; a target whose stratum has none gets no frame.

    Raises:
        PlanError: If a rank exceeds a side of its map.
    """
    factors = {}
    for t in targets:
        rank = ranks.get(t.block, 0)
        if rank > min(t.out_features, t.in_features):
            raise PlanError(
                f"{t.name} cannot carry frozen orthonormal factors of rank {rank}",
                expected=f"at most {min(t.out_features, t.in_features)}",
                do="lower adapter.max_rank",
            )
        if rank > 0:
            drawn = generator(seed, "frame", t.name).standard_normal((rank, t.in_features + t.out_features))
            right, left = _orthonormal(drawn[:, : t.in_features].T), _orthonormal(drawn[:, t.in_features :].T)
            factors[t.name] = (left, np.ascontiguousarray(right.T))
    return Frames(factors)


def frames_from_gradients(terms: Mapping[str, Sequence[LoraTerm]], ranks: Mapping[str, int]) -> Frames:
    """Frames along a mean gradient: B = U_r and A = V_rᵀ of G = Σ_k q_k·G_k, without forming [out, in].

    Where G has fewer than r directions the rest is an orthonormal completion: R can still learn there.

    Args:
        terms: Per target the clients' truncated gradients G_k = left·right as LoRA terms (`lora_B` left [out, r],
            `lora_A` right [r, in], scaling 1), with q_k as weight.
        ranks: r per target.

    Raises:
        AggregationError: If a target has no terms, or a rank exceeds a side of its map.

    References:
        Fed-SB (initialization from the update of the first steps, as in LoRA-SB). Differs in: the mean gradient of the
        clients' examples stands for that update, and R starts at 0.
    """
    factors = {}
    for target, rank in ranks.items():
        mine = terms.get(target, ())
        if not mine:
            raise AggregationError(f"No client sent a gradient of {target}", where="frames")
        matrix = stacked(mine)
        n_out, n_in = matrix.left.shape[0], matrix.right.shape[1]
        if not 1 <= rank <= min(n_out, n_in):
            raise AggregationError(
                f"{target} cannot carry frozen orthonormal factors of rank {rank}",
                expected=f"1 to {min(n_out, n_in)}",
                do="lower adapter.max_rank",
            )
        svd = truncated_svd(matrix, rank)
        left, right = _completed(svd.u.T, rank).T, _completed(svd.vt, rank)
        factors[target] = (np.ascontiguousarray(left, np.float32), np.ascontiguousarray(right, np.float32))
    return Frames(factors)


def _orthonormal(columns: np.ndarray) -> np.ndarray:
    """Q [n, r] of columns = Q·R with a positive diagonal of R, float32."""
    with single_thread():
        q, r = np.linalg.qr(columns)
    return np.ascontiguousarray(q * np.where(np.diag(r) < 0, -1.0, 1.0), np.float32)


def _completed(rows: np.ndarray, count: int) -> np.ndarray:
    """Orthonormal rows, filled up to `count`."""
    return np.concatenate([rows, orthonormal_completion(rows, np.zeros((count - len(rows), rows.shape[1])))])


def _is_orthonormal(*matrices: np.ndarray) -> bool:
    """Whether the rows of each matrix are; NaN is not."""
    with single_thread():
        return all(
            bool(np.abs(m.astype(np.float64) @ m.T.astype(np.float64) - np.eye(len(m))).max() <= TOLERANCE)
            for m in matrices
        )
