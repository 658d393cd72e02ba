"""The largest singular triplets of a big matrix without its whole decomposition."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from fedstrata.core.rng import generator

Triplets: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]

SMALLEST = 512
"""Below this many rows or columns a whole decomposition is as fast."""
TOLERANCE = 1e-13
_MAX_STEPS = 24
_NOISE = float(np.finfo(np.float64).eps)


def leading_triplets(matrix: np.ndarray, rank: int) -> Triplets | None:
    """U [m, rank], σ [rank] and Vᵀ [rank, n] of a dense matrix by block power steps, or None where they do not settle.

    From a fixed random block of rank + 32 columns, steps of

        Q ← orth(M·Mᵀ·Q),    QᵀM = U'·S·Vᵀ,    U = Q·U'

    shrink the error by (σ_{rank+33}/σ_rank)² each. They end when ‖M·v_i − σ_i·u_i‖ ≤ 1e-13·σ_1 for all i; where the
    rate shows that this is out of reach (no gap behind the block), the caller must decompose the whole matrix. The
    result depends on the matrix and the rank alone.

    Args:
        matrix: float64, shape [m, n].
        rank: How many triplets.

    Returns:
        None also where the block would not be small beside the matrix.
    """
    width = rank + 32
    if min(matrix.shape) < max(SMALLEST, 4 * width):
        return None
    block = generator(0, "leading_triplets", *matrix.shape, rank).standard_normal((matrix.shape[1], width))
    basis = np.linalg.qr(matrix @ block)[0]
    previous = np.inf
    for step in range(_MAX_STEPS):
        u, s, vt = np.linalg.svd(basis.T @ matrix, full_matrices=False)
        if not s[0] > 0:
            return None
        left = basis @ u
        image = matrix @ vt.T
        residual = float(np.max(np.linalg.norm(image[:, :rank] - left[:, :rank] * s[:rank], axis=0))) / float(s[0])
        if residual <= TOLERANCE:
            return left[:, :rank], s[:rank], vt[:rank]
        if step >= 2 and not _will_settle(residual, previous, _MAX_STEPS - step):
            return None
        previous = residual
        basis = np.linalg.qr(image)[0]
    return None


def range_basis(matrix: np.ndarray) -> np.ndarray | None:
    """Orthonormal columns that span all of a matrix of low numerical rank; None where the rank is not low.

    A quarter as many random combinations of the columns as the matrix has: where they are dependent, they span the
    range, and ‖M − Q·QᵀM‖_F is rounding, which is checked.

    Args:
        matrix: float64, shape [m, n].

    Returns:
        Q, shape [m, k] with k ≤ min(m, n)/4.
    """
    width = min(matrix.shape) // 4
    block = generator(0, "range_basis", *matrix.shape).standard_normal((matrix.shape[1], width))
    basis = np.linalg.qr(matrix @ block)[0]
    rest = matrix - basis @ (basis.T @ matrix)
    lost, whole = float(np.linalg.norm(rest)), float(np.linalg.norm(matrix))
    return basis if lost <= max(matrix.shape) * _NOISE * whole else None


def _will_settle(residual: float, previous: float, steps_left: int) -> bool:
    """Whether at the present rate the residual falls below the tolerance in the steps that are left."""
    rate = residual / previous
    return rate < 1 and residual * rate ** (steps_left - 1) <= TOLERANCE
