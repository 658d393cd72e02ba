"""Big matrices: leading triplets equal the whole decomposition, and nothing is guessed where they do not settle."""

import numpy as np
import pytest

from fedstrata.core import linalg
from fedstrata.core.leading import leading_triplets, range_basis
from fedstrata.core.linalg import LowRank, recompress, truncated_svd

SIZE, RANK = 640, 8


def with_spectrum(values: np.ndarray, rows: int = SIZE, columns: int = SIZE + 50) -> np.ndarray:
    rng = np.random.default_rng(3)
    u = np.linalg.qr(rng.standard_normal((rows, len(values))))[0]
    v = np.linalg.qr(rng.standard_normal((columns, len(values))))[0]
    return u * values @ v.T


def strong_and_noise() -> np.ndarray:
    return np.concatenate((np.linspace(9, 5, RANK), np.full(SIZE - RANK, 0.05)))


@pytest.mark.parametrize("turned", [False, True])
def test_leading_triplets_equal_the_whole_decomposition(turned):
    matrix = with_spectrum(strong_and_noise())
    matrix = matrix.T.copy() if turned else matrix
    found = leading_triplets(matrix, RANK)
    assert found is not None
    u, s, vt = found
    U, S, VT = np.linalg.svd(matrix, full_matrices=False)
    assert np.allclose(s, S[:RANK], rtol=1e-12)
    best = U[:, :RANK] * S[:RANK] @ VT[:RANK]
    assert np.linalg.norm(u * s @ vt - best) <= 1e-11 * np.linalg.norm(best)
    again = leading_triplets(matrix.copy(), RANK)
    assert again is not None
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


def test_no_triplets_without_a_gap():
    assert leading_triplets(with_spectrum(np.linspace(1, 0.9, SIZE)), RANK) is None
    assert leading_triplets(np.zeros((SIZE, SIZE)), RANK) is None


def test_no_triplets_of_small_matrices():
    assert leading_triplets(with_spectrum(np.ones(100), 100, 100), RANK) is None
    assert leading_triplets(with_spectrum(strong_and_noise()), SIZE // 4) is None


@pytest.mark.parametrize("values", [strong_and_noise(), np.linspace(1, 0.9, SIZE)], ids=["gap", "flat"])
@pytest.mark.parametrize("num_terms", [300, 700])
def test_truncated_svd_of_many_clients(values, num_terms):
    """More directions than the map has: the product is formed; fewer: thin QRs. Both with and without a gap."""
    rng = np.random.default_rng(0)
    whole = with_spectrum(values)
    left = np.linalg.qr(rng.standard_normal((SIZE, min(num_terms, SIZE))))[0]
    spread = rng.standard_normal((left.shape[1], num_terms)) / np.sqrt(num_terms)
    matrix = LowRank(left @ spread, np.linalg.pinv(spread) @ (left.T @ whole))
    dense = matrix.dense()
    U, S, VT = np.linalg.svd(dense, full_matrices=False)
    svd = truncated_svd(matrix, RANK)
    best = U[:, :RANK] * S[:RANK] @ VT[:RANK]
    assert np.linalg.norm(svd.u * svd.s @ svd.vt - best) <= 1e-9 * np.linalg.norm(best)
    assert svd.tail_ratio == pytest.approx(1 - np.sum(S[:RANK] ** 2) / np.sum(S**2), abs=1e-11)
    assert (np.take_along_axis(svd.u, np.abs(svd.u).argmax(axis=0)[None], 0) > 0).all()


def test_a_big_stack_of_full_rank_is_kept_as_a_product():
    rng = np.random.default_rng(0)
    matrix = LowRank(rng.standard_normal((520, 900)), rng.standard_normal((900, 560)))
    short = recompress(matrix)
    assert short.rank == 520
    assert np.allclose(short.dense(), matrix.dense(), rtol=1e-12, atol=1e-10)


def test_a_big_stack_of_low_rank_is_cut_to_its_rank():
    rng = np.random.default_rng(0)
    few = rng.standard_normal((20, 900))
    matrix = LowRank(rng.standard_normal((520, 20)) @ few, np.linalg.pinv(few) @ rng.standard_normal((20, 560)))
    short = recompress(matrix)
    assert short.rank == 20
    assert np.allclose(short.dense(), matrix.dense(), rtol=1e-10, atol=1e-10)
    assert range_basis(matrix.dense()) is not None


def test_the_product_is_formed_only_where_it_is_smaller(monkeypatch):
    """A stack of fewer directions than the map never becomes [out, in]."""
    seen = []
    real = linalg.leading_triplets
    monkeypatch.setattr(linalg, "leading_triplets", lambda core, rank: seen.append(core.shape) or real(core, rank))
    rng = np.random.default_rng(0)
    for num_terms in (512, 600):
        truncated_svd(LowRank(rng.standard_normal((600, num_terms)), rng.standard_normal((num_terms, 700))), 4)
    assert seen == [(512, 512), (600, 700)]
