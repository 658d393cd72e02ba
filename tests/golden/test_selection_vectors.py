"""FedTLU's scores and selection against values of an independent implementation (`vectors.json`)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import Proposal
from fedstrata.core.tensors import Layout, TensorSpec
from fedstrata.select import SelectContext, TopBlocks
from fedstrata.select.groups import num_accepted
from fedstrata.select.scores import BlockScore, consistency, delta_stats, rank_blocks

CASES: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())["cases"]


def scores_of(blocks: dict[int, dict[str, Any]]) -> dict[int, BlockScore]:
    """In float64, as the reference."""
    return {
        block: consistency([delta_stats(n, np.array(d), np.zeros_like(np.array(d))) for n, d in tensors.items()])
        for block, tensors in blocks.items()
    }


def selected(blocks: dict[int, dict[str, Any]], portion: float) -> tuple[Proposal, dict[str, Any]]:
    """Through the selector, in float32."""
    tensors = {f"b{b}.{n}": np.array(d, np.float32) for b, ts in blocks.items() for n, d in ts.items()}
    layout = Layout(tuple(TensorSpec(n, t.shape, int(n[1 : n.index(".")])) for n, t in tensors.items()))
    proposal = Proposal(tensors, dict.fromkeys(blocks, 2), layout=layout)
    accepted, _, why = TopBlocks(portion).select({}, proposal, SelectContext(layout, layout.zeros(), 1, 0))
    return accepted, why


def fedtlu_blocks() -> dict[int, dict[str, Any]]:
    return {int(name.removeprefix("block")): deltas for name, deltas in CASES["fedtlu"]["deltas"].items()}


def key_blocks() -> dict[int, dict[str, Any]]:
    return {int(b): {f"t{i}": d for i, d in enumerate(deltas)} for b, deltas in CASES["fedtlu_key"]["deltas"].items()}


def test_tensor_and_block_scores_are_the_papers():
    case = CASES["fedtlu"]
    for block, tensors in fedtlu_blocks().items():
        for name, delta in tensors.items():
            score = 1 + delta_stats(name, np.array(delta), np.zeros_like(np.array(delta))).excess
            assert score == pytest.approx(case["expected_tensor_scores"][f"block{block}"][name], rel=1e-9)
    for block, score in scores_of(fedtlu_blocks()).items():
        assert score.reported == pytest.approx(case["expected_block_scores"][f"block{block}"], rel=1e-9)


def test_the_two_best_of_four_blocks_are_accepted():
    accepted, why = selected(fedtlu_blocks(), 0.5)
    assert [f"block{b}" for b in why["accepted"]] == CASES["fedtlu"]["expected_selected_S2"]
    assert sorted(accepted.tensors) == ["b2.b", "b2.w", "b3.b", "b3.w"]
    for block, expected in CASES["fedtlu"]["expected_block_scores"].items():
        assert why["scores"][block.removeprefix("block")] == pytest.approx(expected, rel=1e-6)


def test_keys_have_no_cancellation_and_a_constant_move_is_infinite():
    for block, score in scores_of(key_blocks()).items():
        expected = float(CASES["fedtlu_key"]["expected_keys"][str(block)])
        assert score.key == (expected if math.isinf(expected) else pytest.approx(expected, rel=1e-9, abs=1e-12))


def test_a_constant_move_is_flagged_and_selected_first():
    _, why = selected(key_blocks(), 0.5)
    assert why["accepted"] == CASES["fedtlu_key"]["expected_selected_S2"]
    assert list(why["flagged"]) == CASES["fedtlu_key"]["expected_flagged"]
    assert rank_blocks(scores_of(key_blocks())) == [3, 0, 1, 2]


@pytest.mark.parametrize(("portion", "size", "expected"), CASES["portion_rounding"]["cases"])
def test_halves_of_a_portion_are_rounded_up(portion, size, expected):
    assert num_accepted(portion, size) == expected
