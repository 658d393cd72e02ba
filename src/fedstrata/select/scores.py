"""How far and how consistently a block moved: the numbers by which the server ranks blocks. All in float64.

Everything about one tensor is in `DeltaStats`: the mean, the standard deviation (ddof 0) and the root mean square of
Δ = W̄ − W(t), by two passes over cache-sized chunks. For a LoRA product the same numbers come from the factors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedstrata.core.linalg import combination_norms, single_thread

CONSTANT_RATIO = 1e-12
"""A tensor with std ≤ 1e-12·rms moved by one and the same number: its score is infinite, and flagged."""
_CHUNK = 1 << 15


@dataclass(frozen=True)
class DeltaStats:
    """One tensor's Δ in three numbers.

    Attributes:
        name: The tensor, or the linear map of a LoRA product.
        size: n, its number of entries.
        mean: Of the entries.
        std: Of the entries, ddof 0.
    """

    name: str
    size: int
    mean: float
    std: float

    @property
    def rms(self) -> float:
        """√(Σ Δ²/n) = √(mean² + std²); 0 exactly where Δ = 0."""
        return math.hypot(self.mean, self.std)

    @property
    def is_constant(self) -> bool:
        """Whether Δ ≠ 0 has no spread that could be told from rounding."""
        return self.rms > 0 and self.std <= CONSTANT_RATIO * self.rms

    @property
    def excess(self) -> float:
        """Score − 1, without cancellation; 0 for Δ = 0, infinite for a constant Δ.

        With x = |mean|/std the score ‖Δ‖₂/(√n·std) is √(1 + x²), and √(1 + x²) − 1 = x²/(1 + √(1 + x²)).

        Example:
            >>> round(DeltaStats("w", 4, 0.75, 1.0).excess, 12)
            0.25
        """
        if self.rms == 0:
            return 0.0
        if self.is_constant:
            return math.inf
        x = abs(self.mean) / self.std
        return x * x / (1 + math.sqrt(1 + x * x))


@dataclass(frozen=True)
class BlockScore:
    """The score of one block.

    Attributes:
        key: What blocks are ranked by.
        reported: The score as the paper defines it.
        moved: Whether any tensor of the block has Δ ≠ 0.
        flagged: Tensors with a constant Δ.
    """

    key: float
    reported: float
    moved: bool
    flagged: tuple[str, ...] = ()


def delta_stats(name: str, new: np.ndarray, old: np.ndarray) -> DeltaStats:
    """Mean and standard deviation of Δ = new − old.

    Args:
        name: The tensor.
        new: W̄.
        old: W(t), of the same shape.
    """
    size = new.size
    if size == 0:
        return DeltaStats(name, 0, 0.0, 0.0)
    mean = math.fsum(float(d.sum()) for d in _deltas(new, old)) / size
    rest, squares = [], []
    for d in _deltas(new, old):
        d -= mean
        rest.append(float(d.sum()))
        squares.append(float((d * d).sum()))
    left = math.fsum(rest)  # what the rounding of the mean leaves: Σ(d − mean)² − left²/n is the corrected sum
    return DeltaStats(name, size, mean, math.sqrt(max(math.fsum(squares) - left * left / size, 0.0) / size))


def product_stats(name: str, new: tuple[np.ndarray, np.ndarray], old: tuple[np.ndarray, np.ndarray]) -> DeltaStats:
    """Mean and standard deviation of Δ = B̄Ā − BA, exactly from the factors; [out, in] is never formed.

    Written as a sum of terms that are small where the factors moved little,

        Δ = (B̄ − B)·Ā + B·(Ā − A) = L·R          L [out, 2r], R [2r, in]
        mean = (1ᵀL)(R1)/n                        n = out·in
        n·std² = ‖L·R − mean·1·1ᵀ‖_F²             one more column and row, thin QRs (`combination_norms`)

    The scaling s of the pair multiplies mean and std alike; a score that is a ratio of the two does not see it.

    Args:
        name: The linear map.
        new: Ā [r, in] and B̄ [out, r].
        old: A and B.
    """
    new_a, new_b = (m.astype(np.float64) for m in new)
    old_a, old_b = (m.astype(np.float64) for m in old)
    (rank, num_in), num_out = new_a.shape, new_b.shape[0]
    size = num_out * num_in
    left, right = np.zeros((num_out, 2 * rank + 1)), np.zeros((2 * rank + 1, num_in))
    for i, (b, a) in enumerate(((new_b - old_b, new_a), (old_b, new_a - old_a))):
        norm_b, norm_a = float(np.linalg.norm(b)), float(np.linalg.norm(a))
        if norm_a > 0 and norm_b > 0:  # factors of equal norm: the noise floor is then that of the larger term
            ratio = math.sqrt(norm_a / norm_b)
            left[:, i * rank : (i + 1) * rank] = b * ratio
            right[i * rank : (i + 1) * rank] = a / ratio
    with single_thread():
        mean = float(left.sum(axis=0) @ right.sum(axis=1)) / size
    spread = math.sqrt(abs(mean) * math.sqrt(size))
    left[:, -1] = spread / math.sqrt(num_out)
    right[-1] = -math.copysign(spread / math.sqrt(num_in), mean)
    weights = np.ones((2, 2 * rank + 1))
    weights[0, -1] = 0
    norm, centered = (float(n) for n in combination_norms(left, right, weights))
    return DeltaStats(name, size, mean, centered / math.sqrt(size)) if norm > 0 else DeltaStats(name, size, 0.0, 0.0)


def consistency(stats: Sequence[DeltaStats]) -> BlockScore:
    """FedTLU's score: Σ_i ‖Δ_i‖₂/(√n_i·std(Δ_i)) over the block's tensors.

    The key is Σ_i (√(1 + x_i²) − 1), the same order without cancellation; the reported score is the key plus the
    number of tensors with Δ ≠ 0. Tensors with fewer than two entries are left out.
    """
    used = [s for s in stats if s.size >= 2]
    key = math.fsum(s.excess for s in used)
    return BlockScore(
        key, key + sum(s.rms > 0 for s in used), _moved(stats), tuple(s.name for s in used if s.is_constant)
    )


def magnitude(stats: Sequence[DeltaStats]) -> BlockScore:
    """√(Σ_i ‖Δ_i‖² / Σ_i n_i): the root mean square of everything in the block."""
    total = sum(s.size for s in stats)
    key = math.sqrt(math.fsum(s.size * s.rms**2 for s in stats) / total) if total else 0.0
    return BlockScore(key, key, _moved(stats))


def zico_clients(moments: Iterable[tuple[np.ndarray, np.ndarray]], num_holders: int) -> BlockScore:
    """Σ_tensors log Σ_ω |mean_k Δ_kω| / std_k Δ_kω over the K holders' own differences, unweighted.

    An entry whose std is 0 is skipped; so is a tensor in which no entry is left. Sums leave rounding noise, so that a
    variance counts as 0 up to 1e-12 of the mean square.

    Args:
        moments: Per tensor of the block, Σ_k Δ_k and Σ_k Δ_k², float64.
        num_holders: K.
    """
    logs, moved = [], False
    for total, squares in moments:
        sums = []
        for first in range(0, total.size, _CHUNK):
            mean = total.reshape(-1)[first : first + _CHUNK] / num_holders
            square = squares.reshape(-1)[first : first + _CHUNK] / num_holders
            moved = moved or bool(square.any())
            variance = square - mean * mean
            used = variance > CONSTANT_RATIO * square
            sums.append(float((np.abs(mean[used]) / np.sqrt(variance[used])).sum()))
        ratio = math.fsum(sums)
        if ratio > 0:
            logs.append(math.log(ratio))
    key = math.fsum(logs)
    return BlockScore(key, key, moved)


def rank_blocks(scores: Mapping[int, BlockScore]) -> list[int]:
    """Blocks from the best to the worst: by key, of equal keys the lower id, blocks that did not move last."""
    return sorted(scores, key=lambda b: (not scores[b].moved, -scores[b].key, b))


def _moved(stats: Iterable[DeltaStats]) -> bool:
    return any(s.rms > 0 for s in stats)


def _deltas(new: np.ndarray, old: np.ndarray) -> Iterator[np.ndarray]:
    """Δ in float64, chunk by chunk."""
    after, before = np.ascontiguousarray(new).reshape(-1), np.ascontiguousarray(old).reshape(-1)
    for first in range(0, after.size, _CHUNK):
        part = slice(first, first + _CHUNK)
        yield np.subtract(after[part], before[part], dtype=np.float64)
