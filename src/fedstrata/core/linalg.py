"""Linear algebra on matrices that are kept as thin products, in float64 and on one thread.

A server's matrix is `left @ right` with `left` [out, R] and `right` [R, in]. [out, in] is formed by `LowRank.dense`
only, and where so many clients are stacked that it is the smaller of the two: R ≥ min(out, in) (`_core`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from fedstrata.core.leading import SMALLEST, leading_triplets, range_basis

_NOISE = 16 * float(np.finfo(np.float64).eps)


@cache
def _thread_pools() -> Any:
    """The thread pools of the libraries behind numpy, found once."""
    return ThreadpoolController()


@contextmanager
def single_thread() -> Iterator[None]:
    """Runs numpy's linear algebra on one thread: its results depend on the number of threads."""
    with _thread_pools().limit(limits=1):
        yield


@dataclass(frozen=True, eq=False)
class LowRank:
    """A matrix M = left @ right of rank at most R.

    Attributes:
        left: float64, shape [out, R].
        right: float64, shape [R, in].
    """

    left: np.ndarray
    right: np.ndarray

    @property
    def rank(self) -> int:
        """R, the number of directions that are kept; the numerical rank may be smaller."""
        return int(self.left.shape[1])

    def dense(self) -> np.ndarray:
        """M itself, shape [out, in]: for exports and tests, never on the server's path."""
        with single_thread():
            return np.asarray(self.left @ self.right)

    def norm(self) -> float:
        """‖M‖_F from thin QRs, 0.0 where it cannot be told from rounding (see `combination_norms`)."""
        return float(combination_norms(self.left, self.right, np.ones((1, self.rank)))[0])


@dataclass(frozen=True, eq=False)
class TruncatedSvd:
    """The largest singular triplets of a matrix, with fixed signs.

    Attributes:
        u: Left vectors, shape [out, r]; the entry of largest magnitude of each is positive.
        s: Singular values, descending, shape [r].
        vt: Right vectors, shape [r, in].
        spectrum: All singular values that are known, descending: all that the matrix can have, min(R, out, in), or
            those of `s` where a big matrix was not decomposed as a whole.
        rest: ‖M‖_F² without the squares of `spectrum`; 0.0 where that is all of them.
    """

    u: np.ndarray
    s: np.ndarray
    vt: np.ndarray
    spectrum: np.ndarray
    rest: float = 0.0

    @property
    def tail_ratio(self) -> float:
        """Share of ‖M‖_F² that the truncation leaves out; 0 for M = 0."""
        energy = self.spectrum**2
        total = float(energy.sum()) + self.rest
        return (float(energy[len(self.s) :].sum()) + self.rest) / total if total > 0 else 0.0


def combination_norms(left: np.ndarray, right: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Norms of several combinations of the same rank-one terms.

    Row c of `coefficients` stands for M_c = left · diag(c) · right. With thin QRs left = Q₁R₁ and rightᵀ = Q₂R₂,

        ‖M_c‖_F = ‖R₁ · diag(c) · R₂ᵀ‖_F

    which keeps its digits where the terms cancel; traces of Gram matrices lose half of them. A norm below
    16·ε·‖left·diag(c)‖_F·‖right‖_F is rounding and returned as 0.

    Args:
        left: Shape [out, R].
        right: Shape [R, in].
        coefficients: Shape [n, R].

    Returns:
        Shape [n].
    """
    with single_thread():
        r1: np.ndarray = np.linalg.qr(left, mode="r")  # type: ignore[assignment]
        r2: np.ndarray = np.linalg.qr(right.T, mode="r")  # type: ignore[assignment]
        scaled = r1[None] * coefficients[:, None, :]
        norms = np.linalg.norm(scaled @ r2.T, axis=(1, 2))
        floor = _NOISE * np.linalg.norm(scaled, axis=(1, 2)) * np.linalg.norm(r2)
    return np.where(norms <= floor, 0.0, norms)


def truncated_svd(matrix: LowRank, rank: int) -> TruncatedSvd:
    """The `rank` largest singular triplets of `matrix`, or all that it can have if those are fewer.

    Thin QRs left = Q₁R₁, rightᵀ = Q₂R₂ reduce the work to the SVD of the small R₁R₂ᵀ = U'SV'ᵀ:
    U = Q₁U', Vᵀ = V'ᵀQ₂ᵀ. Where R₁R₂ᵀ is big itself and its leading triplets stand out, only those are computed.
    """
    with single_thread():
        q1, core, q2 = _core(matrix)
        found = leading_triplets(core, rank)
        if found is None:
            u, spectrum, vt = np.linalg.svd(core, full_matrices=False)
            rest = 0.0
        else:
            u, spectrum, vt = found
            rest = max(0.0, float(np.sum(np.square(core))) - float(np.sum(spectrum**2)))
        u, vt = u[:, :rank], vt[:rank]
        u, vt = fix_signs(u if q1 is None else q1 @ u, vt if q2 is None else vt @ q2.T)
    return TruncatedSvd(u, spectrum[:rank], vt, spectrum, rest)


def _core(matrix: LowRank) -> tuple[np.ndarray | None, np.ndarray, np.ndarray | None]:
    """Q₁, C, Q₂ with M = Q₁·C·Q₂ᵀ and C as small as it can be; None stands for the identity.

    Where the stack has at least as many directions as the map, M itself is smaller than its factors and is C.
    """
    if matrix.rank >= max(SMALLEST, min(matrix.left.shape[0], matrix.right.shape[1])):
        return None, matrix.left @ matrix.right, None
    q1, r1 = np.linalg.qr(matrix.left)
    q2, r2 = np.linalg.qr(matrix.right.T)
    return q1, r1 @ r2.T, q2


def fix_signs(u: np.ndarray, vt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Flips pairs of singular vectors so that the entry of largest magnitude of each left one is positive.

    Example:
        >>> u, vt = fix_signs(np.array([[0.6], [-0.8]]), np.array([[1.0, 0.0]]))
        >>> u.ravel().tolist(), vt.ravel().tolist()
        ([-0.6, 0.8], [-1.0, -0.0])
    """
    largest = np.take_along_axis(u, np.argmax(np.abs(u), axis=0)[None], axis=0)[0]
    signs = np.where(largest < 0, -1.0, 1.0)
    return u * signs, vt * signs[:, None]


def recompress(matrix: LowRank) -> LowRank:
    """The same matrix with as few directions as it needs, at most min(out, in): M = (U·S) · Vᵀ.

    Lossless up to rounding: only directions with σ ≤ max(out, in)·ε·σ_1, which is noise, are dropped. A zero
    matrix keeps one direction of zeros. A big matrix that has far more than a quarter of all directions is not
    decomposed, for there is nothing to win: its factors are then M and the identity.
    """
    num_out, num_in = matrix.left.shape[0], matrix.right.shape[1]
    with single_thread():
        q1, core, q2 = _core(matrix)
        if q1 is None:
            basis = range_basis(core)
            if basis is None:
                return LowRank(core, np.eye(num_in)) if num_in <= num_out else LowRank(np.eye(num_out), core)
            q1, core = basis, basis.T @ core
        u, s, vt = np.linalg.svd(core, full_matrices=False)
        keep = max(1, int(np.count_nonzero(s > max(num_out, num_in) * float(np.finfo(np.float64).eps) * s[0])))
        u, vt = fix_signs(q1 @ u[:, :keep], vt[:keep] if q2 is None else vt[:keep] @ q2.T)
    return LowRank(u * s[:keep], vt)


def orthonormal_completion(rows: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """As many further orthonormal rows as there are candidates.

    Each candidate loses its part along the rows found so far (twice, against rounding) and is normalized; one that
    lies in their span is replaced by the first unit vector that does not.

    Args:
        rows: Orthonormal, shape [k, in].
        candidates: Where to start from, shape [m, in] with k + m ≤ in.

    Returns:
        Shape [m, in]; together with `rows` orthonormal.
    """
    num_features = candidates.shape[1]
    found = np.zeros((len(rows) + len(candidates), num_features))
    found[: len(rows)] = rows
    with single_thread():
        for i, candidate in enumerate(candidates, start=len(rows)):
            row = _outside(candidate, found[:i])
            axis = 0
            while row is None:
                row = _outside(np.eye(1, num_features, axis)[0], found[:i])
                axis += 1
            found[i] = row
    return found[len(rows) :]


def _outside(vector: np.ndarray, rows: np.ndarray) -> np.ndarray | None:
    """The unit vector of what `rows` do not span, None if hardly anything is left."""
    rest = vector
    for _ in range(2):
        rest = rest - rows.T @ (rows @ rest)
    left = float(np.linalg.norm(rest))
    return rest / left if left > 1e-6 * max(float(np.linalg.norm(vector)), 1e-300) else None
