"""HetLoRA's objective: a penalty on the tail of every pair, and what a client keeps after training."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedstrata.errors import ConfigError
from fedstrata.objective import OBJECTIVES, FinishingObjective, RankDecay
from fedstrata.registry import to_config


def pair(rank: int, scale: float = 1.0, target: str = "q") -> dict[str, np.ndarray]:
    """Row h of A is (h + 1)·scale in 4 entries, column h of B the same in 3 entries."""
    rows = scale * np.arange(1, rank + 1, dtype=np.float32)
    return {f"{target}.lora_A": np.tile(rows[:, None], (1, 4)), f"{target}.lora_B": np.tile(rows, (3, 1))}


def tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {n: torch.tensor(a, requires_grad=True) for n, a in arrays.items()}


def test_the_penalty_is_the_product_of_the_tails_norms() -> None:
    """M = ⌊0.5·4⌋ = 2: ‖B[:, 2:]‖ = √(3·(9 + 16)) = √75, ‖A[2:]‖ = √(4·25) = 10, λ = 0.1: √75."""
    part = RankDecay(0.5, 0.1)
    assert part.penalty(tensors(pair(4)), {}).item() == pytest.approx(math.sqrt(75), rel=1e-6)


def test_the_penalty_adds_over_targets_and_leaves_the_head_alone() -> None:
    """Targets of rank 4 (m = 2) and of rank 1 (m = 0: all of it): √75·10 + √3·2."""
    both = pair(4) | pair(1, target="v") | {"classifier.weight": np.ones((2, 4), np.float32)}
    found = RankDecay(0.5, 1.0).penalty(tensors(both), {}).item()
    assert found == pytest.approx(math.sqrt(75) * 10 + math.sqrt(3) * 2, rel=1e-6)


def test_the_gradient_at_a_tail_of_zero_is_zero_and_not_nan() -> None:
    """B = 0 at the start: the root of a sum of squares has no derivative there."""
    start = tensors(pair(4) | {"q.lora_B": np.zeros((3, 4), np.float32)})
    RankDecay(0.5, 1.0).penalty(start, {}).backward()
    for tensor in start.values():
        assert torch.isfinite(tensor.grad).all()
        assert not tensor.grad.any()


def test_the_gradient_pushes_the_tail_only() -> None:
    """∂/∂A = λ·‖B_tail‖·A_tail/‖A_tail‖, 0 on the first m slices."""
    here = tensors(pair(4))
    RankDecay(0.5, 0.1).penalty(here, {}).backward()
    a, b = here["q.lora_A"], here["q.lora_B"]
    assert not a.grad[:2].any()
    assert not b.grad[:, :2].any()
    expected = 0.1 * math.sqrt(75) * a.detach()[2:] / 10
    torch.testing.assert_close(a.grad[2:], expected)


def test_a_tail_that_shrank_is_dropped_for_good() -> None:
    """M = ⌊0.75·4⌋ = 3."""
    finished = RankDecay(0.75).finish(pair(4, 0.9), pair(4, 1.0))
    assert finished.rank == 3
    assert finished.numbers["kept_rank"] == 3.0
    assert finished.numbers["tail_before"] == pytest.approx(math.sqrt(3 * 16) * math.sqrt(4 * 16))
    assert finished.numbers["tail_after"] == pytest.approx(0.81 * finished.numbers["tail_before"], rel=1e-6)


@pytest.mark.parametrize(
    ("gamma", "min_rank", "rank", "kept"),
    [(0.25, 1, 8, 2), (0.25, 3, 8, 3), (0.25, 7, 8, 7), (0.1, 1, 8, 1), (0.75, 3, 8, 6), (0.75, 3, 4, 3)],
)
def test_no_client_shrinks_below_the_smallest_rank(gamma: float, min_rank: int, rank: int, kept: int) -> None:
    """Kept = max(⌊γ·r⌋, r_min), also where ⌊γ·r⌋ is 0."""
    finished = RankDecay(gamma, min_rank=min_rank).finish(pair(rank, 0.5), pair(rank))
    assert finished.rank == kept
    assert finished.numbers["kept_rank"] == kept


@pytest.mark.parametrize(
    ("part", "trained", "start", "why"),
    [
        (RankDecay(0.75), pair(4, 1.1), pair(4), "the tail grew"),
        (RankDecay(0.75), pair(4), pair(4), "the tail is what it was"),
        (RankDecay(0.75), pair(4, 0.5), pair(4) | {"q.lora_B": np.zeros((3, 4), np.float32)}, "it was 0"),
        (RankDecay(0.75, min_rank=4), pair(4, 0.5), pair(4), "the smallest rank"),
        (RankDecay(0.75), pair(1, 0.5), pair(1), "no slice would be left"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_client_keeps_its_rank(part: RankDecay, trained: Any, start: Any, why: str) -> None:
    finished = part.finish(trained, start)
    assert finished.rank is None
    assert finished.numbers["kept_rank"] == len(trained["q.lora_A"])


def test_all_targets_count_together() -> None:
    """One tail shrank by 2·…, the other grew by less: the sum fell."""
    start = pair(4) | pair(4, target="v")
    trained = pair(4, 0.5) | pair(4, 1.1, target="v")  # 0.25 + 1.21 < 2
    assert RankDecay(0.75).finish(trained, start).rank == 3
    grown = pair(4, 0.9) | pair(4, 1.2, target="v")  # 0.81 + 1.44 > 2
    assert RankDecay(0.75).finish(grown, start).rank is None


def test_a_product_that_is_whole_up_to_rounding_is_whole() -> None:
    """0.57·100 is 56.99999999999999 in float64, and m = 57."""
    assert 0.57 * 100 < 57
    assert RankDecay(0.57).finish(pair(100, 0.5), pair(100)).rank == 57


def test_without_a_pair_there_is_nothing_to_shrink() -> None:
    head = {"classifier.weight": np.ones((2, 4), np.float32)}
    assert RankDecay().finish(head, head).rank is None
    assert RankDecay().finish(head, head).numbers == {}
    half = {"q.lora_B": np.ones((3, 4), np.float32)}
    assert RankDecay().finish(half, half).numbers == {}
    assert float(RankDecay().penalty(tensors(half), {})) == 0.0


def test_finishing_changes_no_tensor() -> None:
    trained, start = pair(4, 0.5), pair(4)
    before = {n: t.copy() for n, t in trained.items()}
    RankDecay(0.75).finish(trained, start)
    assert all(np.array_equal(trained[n], t) for n, t in before.items())


def test_no_weight_leaves_the_penalty_out_but_clients_still_shrink() -> None:
    part = RankDecay(0.75, 0.0)
    assert part.is_plain
    assert not RankDecay().is_plain
    assert part.finish(pair(4, 0.5), pair(4)).rank == 3
    assert isinstance(part, FinishingObjective)


def test_every_wrong_option_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        RankDecay(1.0, -1.0, 0)
    text = str(error.value)
    assert all(name in text for name in ("gamma = 1.0", "weight = -1.0", "min_rank = 0"))
    for gamma in (0.0, float("nan"), 1.5):
        with pytest.raises(ConfigError, match="gamma"):
            RankDecay(gamma)
    with pytest.raises(ConfigError, match="weight"):
        RankDecay(weight=float("inf"))


def test_the_objective_is_rebuilt_from_its_config() -> None:
    part = RankDecay(0.9, 0.01, 2)
    assert OBJECTIVES.build(to_config(part)) == part
