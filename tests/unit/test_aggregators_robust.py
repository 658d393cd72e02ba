"""Robust means by hand: what they leave out, what they do with too few holders, and what they record."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import (
    AGGREGATORS,
    ClientUpdate,
    ClippedMean,
    ExactnessProbe,
    HoldersMean,
    Krum,
    Median,
    Proposal,
    TrimmedMean,
)
from fedstrata.aggregate.krum import squared_distances
from fedstrata.aggregate.robust import StratumReplies
from fedstrata.core.tensors import HEAD, Layout, TensorSpec
from fedstrata.errors import AggregationError, ConfigError

ONE = Layout((TensorSpec("w", (1,), 0),))
TWO = Layout((TensorSpec("w", (1,), 0), TensorSpec("v", (1,), 0)))
ROBUST = [p for p in AGGREGATORS if AGGREGATORS[p].robust]


def update(k: int, layout: Layout, values: dict[str, float], start: float = 10.0, send: str = "delta", n: int = 1):
    begin = {s.name: np.full(s.shape, start, np.float32) for s in layout}
    sent = {m: np.full(layout[m].shape, x, np.float32) for m, x in values.items()}
    return ClientUpdate(f"c{k}", n, layout, begin, sent, send)  # type: ignore[arg-type]


def ones(*deltas: float, **options: Any) -> list[ClientUpdate]:
    return [update(k, ONE, {"w": d}, **options) for k, d in enumerate(deltas)]


def merge(part: Any, updates: list[ClientUpdate], layout: Layout = ONE) -> Proposal:
    acc = part.zero(layout)
    for u in updates:
        acc = part.add(acc, u)
    return part.finish(acc, {s.name: np.full(s.shape, 10, np.float32) for s in layout})


def value(part: Any, updates: list[ClientUpdate], layout: Layout = ONE, name: str = "w") -> float:
    return float(merge(part, updates, layout).tensors[name].item())


def test_the_four_robust_means_say_so():
    assert ROBUST == ["clipped_mean", "krum", "median", "trimmed_mean"]


# ---- median


def test_the_median_of_differences_moves_the_start():
    """10 + median(1, 2, 100) = 12; of four 10 + (2 + 3)/2 = 12.5."""
    assert value(Median(), ones(1, 100, 2)) == 12
    assert value(Median(), ones(1, 100, 2, 3)) == 12.5


def test_examples_do_not_count_in_a_robust_mean():
    heavy = [update(k, ONE, {"w": d}, n=n) for k, (d, n) in enumerate([(1, 1), (2, 1), (100, 10**6)])]
    assert value(Median(), heavy) == 12


def test_values_are_turned_into_differences():
    """Values 13, 14, 15 from starts 12, 12, 12: differences 1, 2, 3."""
    assert value(Median(), ones(13, 15, 14, start=12.0, send="weights")) == 14


def test_unequal_starts_are_averaged():
    """Starts 10, 11, 12 and differences 1, 2, 300: 11 + 2."""
    updates = [update(k, ONE, {"w": d}, start=s) for k, (d, s) in enumerate([(1, 10), (2, 11), (300, 12)])]
    assert value(Median(), updates) == 13


def test_the_median_joins_its_chunks_without_a_seam():
    size = (1 << 15) + 3
    layout = Layout((TensorSpec("w", (size,), 0),))
    rng = np.random.default_rng(0)
    values = rng.standard_normal((5, size)).astype(np.float32)
    updates = [ClientUpdate(f"c{k}", 1, layout, layout.zeros(), {"w": v}) for k, v in enumerate(values)]
    assert np.array_equal(merge(Median(), updates, layout).tensors["w"], np.median(values, axis=0))


# ---- trimmed mean


def test_a_trimmed_mean_cuts_both_ends():
    """m = 5, β = 0.2: g = 1, (2 + 3 + 4)/3 = 3; m = 10, β = 0.3: g = 3, (4 + 5 + 6 + 7)/4 = 5.5."""
    assert value(TrimmedMean(), ones(100, 3, -50, 4, 2)) == 13
    assert value(TrimmedMean(0.3), ones(1, 2, 3, 4, 5, 6, 7, 8, 9, 1000)) == 15.5
    record = merge(TrimmedMean(0.3), ones(*range(10))).statistics["strata"]["0"]
    assert record == {"num_holders": 10, "fallback": None, "num_trimmed": 3}


@pytest.mark.parametrize(
    ("beta", "least"), [(0.2, 5), (0.1, 10), (1 / 3, 3), (0.3, 4), (0.29, 4), (0.49, 3), (0.4999999999, 3)]
)
def test_a_trimmed_mean_needs_one_reply_to_cut_on_each_side(beta, least):
    """The smallest m with ⌊βm⌋ ≥ 1 and m > 2⌊βm⌋."""
    part = TrimmedMean(beta)
    assert part.min_holders == least
    assert merge(part, ones(*range(least))).statistics["warnings"] == []
    assert merge(part, ones(*range(least - 1))).statistics["warnings"] != []


def test_shares_that_are_whole_up_to_rounding_are_whole():
    """0.29·100 = 28.999999999999996 in float64."""
    assert [TrimmedMean(b).num_trimmed(m) for b, m in ((0.29, 100), (0.1, 10), (0.1, 19))] == [29, 1, 1]


@pytest.mark.parametrize("beta", [0, 0.5, -0.1, float("nan")])
def test_a_trimmed_mean_cannot_cut_everything(beta):
    with pytest.raises(ConfigError, match="trimmed"):
        TrimmedMean(beta)


# ---- krum


def test_krum_takes_the_reply_with_the_closest_neighbors():
    """m = 5, f = 1: two neighbors each. 0, 1, 2, 10, 50: scores 1+4, 1+1, 1+4, 64+81, …: the 1 wins."""
    proposal = merge(Krum(), ones(50, 0, 1, 2, 10))
    assert proposal.tensors["w"].item() == 11
    assert proposal.statistics["strata"]["0"]["chosen"] == ["c2"]


def test_krum_needs_the_whole_block_not_single_entries():
    """(w, v): d is best in w alone; over both tensors the cluster around (5, 5) wins."""
    pairs = [(5, 5), (5.1, 5), (5, 5.2), (4, 90), (0, -90)]
    updates = [update(k, TWO, {"w": w, "v": v}) for k, (w, v) in enumerate(pairs)]
    proposal = merge(Krum(), updates, TWO)
    assert proposal.statistics["strata"]["0"]["chosen"] == ["c0"]
    assert [proposal.tensors[n].item() for n in ("w", "v")] == [15, 15]


def test_multi_krum_averages_the_best():
    """Scores of 0, 1, 2, 10, 50 with two neighbors: 5, 2, 5, 145, …; the best three average to 1; ties: lower id."""
    assert value(Krum(multi=3), ones(0, 1, 2, 10, 50)) == 11
    assert merge(Krum(multi=2), ones(0, 1, 2, 10, 50)).statistics["strata"]["0"]["chosen"] == ["c0", "c1"]


@pytest.mark.parametrize(("f", "multi", "least"), [(0, 1, 3), (1, 1, 5), (2, 1, 7), (1, 4, 5), (1, 6, 7)])
def test_krum_needs_two_f_plus_three_and_multi_plus_f(f, multi, least):
    part = Krum(f, multi)
    assert merge(part, ones(*range(least))).statistics["strata"]["0"]["fallback"] is None
    assert merge(part, ones(*range(least - 1))).statistics["strata"]["0"]["fallback"] == "mean"


def test_distances_keep_their_digits_far_from_zero():
    """w is 8 apart at 1e8 (its float32 spacing), v the same: 8² = 64; x² + y² − 2xy would round in steps of 4."""
    layout = Layout((TensorSpec("w", (1,), 0), TensorSpec("v", (1,), 0)))
    holders = tuple(update(k, layout, {"w": 1e8 + 8 * k, "v": 1e8}) for k in range(2))
    distances = squared_distances(StratumReplies(0, layout.specs, holders))
    assert distances.tolist() == [[0, 64], [64, 0]]


@pytest.mark.parametrize("options", [{"f": -1}, {"multi": 0}])
def test_krum_counts_replies(options):
    with pytest.raises(ConfigError, match="at least"):
        Krum(**options)


# ---- clipping


def test_clipping_cuts_long_differences_to_the_median_length():
    """Lengths 5, 5 and 50 of (3, 4), (−3, 4), (30, 40): the third counts as (3, 4); mean (1, 4)."""
    pairs = [(3, 4), (-3, 4), (30, 40)]
    updates = [update(k, TWO, {"w": w, "v": v}) for k, (w, v) in enumerate(pairs)]
    proposal = merge(ClippedMean(), updates, TWO)
    assert [proposal.tensors[n].item() for n in ("w", "v")] == [11, 14]
    record = proposal.statistics["strata"]["0"]
    assert (record["bound"], record["clipped"]) == (5, ["c2"])


def test_clipping_leaves_lengths_up_to_the_median_alone():
    """2, 2, −2, 2: mean 1. Of 1, 2, 3 only the 3 is cut, to 2: mean 5/3."""
    assert value(ClippedMean(), ones(2, 2, -2, 2)) == 11
    assert value(ClippedMean(), ones(1, 2, 3)) == pytest.approx(10 + 5 / 3)


def test_where_most_did_not_move_clipping_lets_nothing_through():
    assert value(ClippedMean(), ones(0, 0, 5)) == 10


# ---- what is common


@pytest.mark.parametrize("part_id", ROBUST)
def test_too_few_holders_take_the_plain_mean_and_say_so(part_id):
    proposal = merge(AGGREGATORS.build(part_id), ones(1, 4))
    assert proposal.tensors["w"].item() == 12.5
    assert proposal.statistics["strata"]["0"]["fallback"] == "mean"
    assert proposal.holders == {0: 2}
    (warning,) = proposal.statistics["warnings"]
    assert "block 0 has 2" in warning
    assert "plain mean" in warning


@pytest.mark.parametrize("part_id", ROBUST)
def test_too_few_holders_can_leave_the_block_as_it_is(part_id):
    """The head has seven holders and is merged; block 0 has two and stays out of the proposal."""
    layout = Layout((TensorSpec("w", (1,), 0), TensorSpec("h", (1,), HEAD)))
    mine = [layout if k < 2 else layout.restrict([HEAD]) for k in range(7)]
    updates = [update(k, m, dict.fromkeys(m.names, 2.0)) for k, m in enumerate(mine)]
    proposal = merge(AGGREGATORS.build({"id": part_id, "fallback": "keep"}), updates, layout)
    assert list(proposal.tensors) == ["h"]
    assert proposal.holders == {HEAD: 7}
    assert proposal.tensors["h"].item() == 12
    (warning,) = proposal.statistics["warnings"]
    assert "stays as it is" in warning
    assert proposal.restrict([HEAD]).holders == {HEAD: 7}


@pytest.mark.parametrize("part_id", ROBUST)
def test_unknown_fallbacks_are_refused(part_id):
    with pytest.raises(ConfigError, match="fallback"):
        AGGREGATORS.build({"id": part_id, "fallback": "kep"})
    with pytest.raises(ConfigError, match='did you mean "keep"'):
        AGGREGATORS[part_id](fallback="kep")  # type: ignore[call-arg]


@pytest.mark.parametrize("part_id", ROBUST)
def test_one_wrong_reply_of_seven_moves_a_robust_mean_little(part_id):
    """Six replies within ±1 and one of 1e6: the result stays within 1, the plain mean is off by 1e5."""
    honest = [-1, -0.5, 0, 0.5, 0.75, 1]
    updates = ones(1e6, *honest)
    part = AGGREGATORS.build(part_id)
    assert abs(value(part, updates) - 10) <= 1
    assert value(HoldersMean(), updates) > 1e5


def test_holders_of_one_block_must_hold_the_same_tensors():
    both = update(0, TWO, {"w": 1, "v": 1})
    half = update(1, ONE, {"w": 1})
    with pytest.raises(AggregationError, match="client c1"):
        merge(Median(), [both, half], TWO)


def test_robust_means_record_a_distance_instead_of_an_error():
    """Clients 0, 0 and 3·e1e1ᵀ: the mean of products is 1, the median 0: the distance is 1/1 of the mean."""
    layout = Layout((TensorSpec("q.lora_A", (1, 1), 0, "lora_A"), TensorSpec("q.lora_B", (1, 1), 0, "lora_B")))
    part = Median()
    probe, acc = ExactnessProbe(layout, {"q": 1.0}, part), part.zero(layout)
    for k, b in enumerate((0, 0, 3)):
        values = {"q.lora_A": np.ones((1, 1), np.float32), "q.lora_B": np.full((1, 1), b, np.float32)}
        sent = ClientUpdate(f"c{k}", 1, layout, layout.zeros(), values)
        probe.add(sent)
        acc = part.add(acc, sent)
    found = probe.finish(part.finish(acc, layout.zeros()), layout.zeros())
    assert found["exactness_error"] is None
    assert found["distance_to_mean"] == pytest.approx(1)
    assert found["per_target"]["q"]["distance_to_mean_update"] == pytest.approx(1)
    assert "robust" in found["reason"]
