"""Aggregators by hand, sizes around the chunk, and the exactness probe."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedstrata.aggregate import AGGREGATORS, ClientUpdate, CohortMean, ExactnessProbe, FactorMean, HoldersMean
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Layout, TensorSpec
from fedstrata.errors import AggregationError, ConfigError
from fedstrata.registry import to_config
from fedstrata.select import SELECTORS, SelectContext

CHUNK = 1 << 15


def weights_layout(*sizes: int) -> Layout:
    return Layout(tuple(TensorSpec(f"w{i}", (n,), i) for i, n in enumerate(sizes)))


def update(client: str, num_examples: int, layout: Layout, deltas: dict[str, list[float]], start=None, send="delta"):
    mine = layout.restrict(layout[n].stratum for n in deltas)
    begin = start or {s.name: np.zeros(s.shape, np.float32) for s in mine}
    return ClientUpdate(
        client,
        num_examples,
        mine,
        {n: begin[n] for n in mine.names},
        {n: np.array(d, np.float32) for n, d in deltas.items()},
        send,
    )


def merge(aggregator, layout, updates, current):
    acc = aggregator.zero(layout)
    for u in updates:
        acc = aggregator.add(acc, u)
    return aggregator.finish(acc, current)


TWO = weights_layout(1, 1)
CURRENT = {"w0": np.array([100], np.float32), "w1": np.array([200], np.float32)}


def hand_round():
    """a (n = 1) moves both by 4, b (n = 3) moves w0 by 8; both start from the server's values."""
    return [
        update("a", 1, TWO, {"w0": [4], "w1": [4]}, CURRENT),
        update("b", 3, TWO, {"w0": [8]}, CURRENT),
    ]


def test_holders_mean_divides_by_those_who_trained():
    """w0: (1·104 + 3·108)/4 = 107; w1: 1·204/1 = 204. Uniform w0: (104 + 108)/2 = 106."""
    merged = merge(HoldersMean(), TWO, hand_round(), CURRENT).tensors
    assert (merged["w0"].item(), merged["w1"].item()) == (107, 204)
    assert merge(HoldersMean("uniform"), TWO, hand_round(), CURRENT).tensors["w0"].item() == 106


def test_cohort_mean_counts_absence_as_no_change():
    """w0: 100 + (1·4 + 3·8)/4 = 107; w1: 200 + 1·4/(1 + 3) = 201. Uniform w1: 200 + 4/2 = 202."""
    merged = merge(CohortMean(), TWO, hand_round(), CURRENT).tensors
    assert (merged["w0"].item(), merged["w1"].item()) == (107, 201)
    assert merge(CohortMean("uniform"), TWO, hand_round(), CURRENT).tensors["w1"].item() == 202


def test_cohort_mean_takes_differences_out_of_values():
    sent = [update("a", 1, TWO, {"w0": [104], "w1": [204]}, CURRENT, "weights"), hand_round()[1]]
    merged = merge(CohortMean(), TWO, sent, CURRENT).tensors
    assert (merged["w0"].item(), merged["w1"].item()) == (107, 201)


def test_holders_mean_respects_where_each_client_started():
    """Starts 1, 1 and 2 with Δ = 1, weights 1, 2, 3: (1·2 + 2·2 + 3·3)/6 = 2.5."""
    layout = weights_layout(1)
    starts = [{"w0": np.array([x], np.float32)} for x in (1, 1, 2)]
    updates = [update(c, n, layout, {"w0": [1]}, s) for c, n, s in zip("abc", (1, 2, 3), starts, strict=True)]
    assert merge(HoldersMean(), layout, updates, CURRENT).tensors["w0"].item() == 2.5


def test_sums_keep_what_float32_would_lose():
    """1e8 + 1 − 1e8 = 1 in float64 and 0 in float32."""
    layout = weights_layout(1)
    updates = [update(c, 1, layout, {"w0": [x]}) for c, x in zip("abc", (1e8, 1, -1e8), strict=True)]
    assert merge(HoldersMean(), layout, updates, CURRENT).tensors["w0"].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("aggregator", [HoldersMean(), CohortMean()], ids=lambda a: a.id)
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7])
def test_chunks_join_without_a_seam(aggregator, size):
    layout, rng = weights_layout(size), np.random.default_rng(size)
    current = {"w0": rng.standard_normal(size).astype(np.float32)}
    updates, expected = [], np.zeros(size)
    for k, send in enumerate(("delta", "weights", "delta")):
        start = {"w0": current["w0"] + np.float32(k > 1)}
        values = rng.standard_normal(size).astype(np.float32)
        updates.append(update(f"c{k}", k + 1, layout, {"w0": values}, start, send))
        u = updates[-1]
        expected += (k + 1) / 6 * (u.local("w0") if aggregator.id == "holders_mean" else current["w0"] + u.delta("w0"))
    merged = merge(aggregator, layout, updates, current).tensors["w0"]
    assert np.allclose(merged, expected, rtol=1e-6, atol=1e-6)


def test_accumulators_are_allocated_for_trained_tensors_only():
    layout = weights_layout(10, 10**12)
    acc = HoldersMean().add(HoldersMean().zero(layout), update("a", 1, layout, {"w0": [1.0] * 10}))
    assert list(acc.moved) == ["w0"]


def test_views_of_a_payload_can_be_added():
    layout = weights_layout(3)
    data = np.frombuffer(np.arange(3, dtype="<f4").tobytes(), "<f4")
    sent = ClientUpdate("a", 1, layout, layout.zeros(), {"w0": data})
    assert merge(HoldersMean(), layout, [sent], CURRENT).tensors["w0"].tolist() == [0, 1, 2]


def test_a_stratum_whose_holders_have_no_weight_is_an_error():
    updates = [update("a", 0, TWO, {"w1": [4]}), update("b", 3, TWO, {"w0": [8]})]
    with pytest.raises(AggregationError, match="block 1"):
        merge(HoldersMean(), TWO, updates, CURRENT)


def test_negative_weights_are_refused():
    with pytest.raises(AggregationError, match="negative"):
        merge(HoldersMean(), TWO, [update("a", -1, TWO, {"w0": [1]})], CURRENT)


def test_tensors_that_the_server_lacks_are_refused():
    other = Layout((TensorSpec("stranger", (1,), 0),))
    with pytest.raises(AggregationError, match="stranger"):
        merge(HoldersMean(), TWO, [update("a", 1, other, {"stranger": [1]})], CURRENT)


def test_arrays_that_are_not_as_their_layout_says_are_refused():
    with pytest.raises(AggregationError, match="as its layout says"):
        merge(HoldersMean(), TWO, [update("a", 1, TWO, {"w0": [1, 2]})], CURRENT)


def test_other_shapes_of_plain_weights_are_refused():
    other = Layout((TensorSpec("w0", (2,), 0),))
    with pytest.raises(AggregationError, match="another shape"):
        merge(HoldersMean(), TWO, [update("a", 1, other, {"w0": [1, 2]})], CURRENT)


def test_factor_mean_refuses_full_parameters_and_takes_a_head():
    with pytest.raises(AggregationError, match="factor_mean"):
        FactorMean().zero(TWO)
    with pytest.raises(AggregationError):
        FactorMean().zero(Layout((TensorSpec("e", (1,), EMBEDDINGS),)))
    assert FactorMean().zero(Layout((TensorSpec("h", (1,), HEAD),))).num_replies == 0


@pytest.mark.parametrize("part", [p for p in AGGREGATORS if "weight_by" in to_config(AGGREGATORS.build(p))])
def test_unknown_weightings_are_refused_with_a_hint(part):
    with pytest.raises(ConfigError, match='did you mean "num_examples"'):
        AGGREGATORS.build({"id": part, "weight_by": "num_example"})


# ---- selector


def test_accept_all_passes_the_proposal_on():
    proposal = merge(HoldersMean(), TWO, hand_round(), CURRENT)
    selector = SELECTORS.build("accept_all")
    accepted, state, why = selector.select(selector.init(), proposal, SelectContext(TWO, CURRENT, 1, 0))
    assert accepted is proposal
    assert state == {}
    assert why == {"rule": "accept_all", "accepted": ["0", "1"]}


# ---- exactness probe

PAIR = Layout(
    (
        TensorSpec("q.lora_A", (1, 3), 0, "lora_A"),
        TensorSpec("q.lora_B", (2, 1), 0, "lora_B"),
        TensorSpec("v.lora_A", (1, 3), 1, "lora_A"),
        TensorSpec("v.lora_B", (2, 1), 1, "lora_B"),
    )
)
ZERO = PAIR.zeros()


def pair(client: str, a: list[float], b: list[float], num_examples: int = 1, target: str = "q") -> ClientUpdate:
    mine = PAIR.restrict([0 if target == "q" else 1])
    values = {f"{target}.lora_A": np.array([a], np.float32), f"{target}.lora_B": np.array([b], np.float32).T}
    return ClientUpdate(client, num_examples, mine, {n: ZERO[n] for n in mine.names}, values)


def probe_round(updates: list[ClientUpdate], aggregator=None, **options):
    aggregator = aggregator or HoldersMean()
    probe = ExactnessProbe(PAIR, {"q": 2.0, "v": 2.0}, aggregator, **options)
    acc = aggregator.zero(PAIR)
    for u in updates:
        probe.add(u)
        acc = aggregator.add(acc, u)
    return probe.finish(aggregator.finish(acc, ZERO), ZERO)


def test_exactness_of_two_orthogonal_clients_by_hand():
    """D_1 = s·e1e1ᵀ, D_2 = s·e2e2ᵀ, mean of products s/2·diag(1, 1), product of means s/4·[[1, 1], [1, 1]].

    Difference s/4·[[1, −1], [−1, 1]]: norm s/2; mean: norm s/√2; ratio 1/√2.
    """
    found = probe_round([pair("a", [1, 0, 0], [1, 0]), pair("b", [0, 1, 0], [0, 1])])
    assert found["exactness_error"] == pytest.approx(2**-0.5)
    assert found["exactness_error_update"] == pytest.approx(2**-0.5)
    assert list(found["per_target"]) == ["q"]
    assert found["per_target"]["q"]["exactness_error"] == pytest.approx(2**-0.5)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_exactness_of_the_cohort_mean_sees_what_zero_filling_loses():
    """Only a of the weights 1 and 3 holds q: A and B shrink to a quarter, the product to 1/16, error 15/16."""
    updates = [pair("a", [1, 0, 0], [1, 0], 1), pair("b", [1, 0, 0], [1, 0], 3, "v")]
    found = probe_round(updates, CohortMean())
    assert found["per_target"]["q"]["exactness_error"] == pytest.approx(15 / 16)
    assert found["per_target"]["v"]["exactness_error"] == pytest.approx(7 / 16)


def test_exactness_counts_each_start():
    """Clients that stay where they started, in two places: no update, and the mean is off: not a finite ratio."""
    a, b = pair("a", [1, 0, 0], [1, 0]), pair("b", [0, 1, 0], [0, 1])
    still = [ClientUpdate(u.client, 1, u.layout, u.values, u.values, "weights") for u in (a, b)]
    found = probe_round(still)
    assert found["exactness_error"] == pytest.approx(2**-0.5)
    assert found["exactness_error_update"] is None


def test_a_round_without_any_change_is_exact():
    found = probe_round([pair("a", [0, 0, 0], [0, 0]), pair("b", [0, 0, 0], [0, 0])])
    assert (found["exactness_error"], found["exactness_error_update"]) == (0.0, 0.0)


def test_exactness_is_null_beyond_its_memory():
    """A pair has 3 + 2 numbers; the common start is kept once: 5 + 5 for the first client, 15 for both."""
    updates = [pair("a", [1, 0, 0], [1, 0]), pair("b", [0, 1, 0], [0, 1])]
    assert probe_round(updates, max_values=15)["exactness_error"] is not None
    found = probe_round(updates, max_values=14)
    assert found["exactness_error"] is None
    assert "14 numbers" in found["reason"]


@pytest.mark.parametrize(
    ("layout", "options", "reason"),
    [
        (PAIR, {"max_values": 0}, "switched off"),
        (TWO, {}, "no LoRA pairs"),
        (PAIR, {}, "no reply"),
    ],
)
def test_exactness_says_why_it_is_null(layout, options, reason):
    probe = ExactnessProbe(layout, {"q": 1.0, "v": 1.0}, HoldersMean(), **options)
    proposal = merge(HoldersMean(), TWO, hand_round(), CURRENT)
    if layout is TWO:
        probe.add(hand_round()[0])
    found = probe.finish(proposal, ZERO)
    assert found["exactness_error"] is None
    assert found["exactness_error_update"] is None
    assert reason in found["reason"]


def test_a_factor_that_nobody_sent_is_the_servers_own():
    """b alone is in the proposal: the server's A is still today's."""
    aggregator, sent = HoldersMean(), pair("a", [1, 0, 0], [1, 0])
    probe = ExactnessProbe(PAIR, {"q": 2.0}, aggregator)
    probe.add(sent)
    proposal = merge(aggregator, PAIR, [sent], ZERO)
    only_b = type(proposal)({"q.lora_B": proposal.tensors["q.lora_B"]}, proposal.holders)
    current = ZERO | {"q.lora_A": np.array([[1, 0, 0]], np.float32)}
    assert probe.finish(only_b, current)["exactness_error"] == 0.0
    assert probe.finish(only_b, ZERO)["exactness_error"] == pytest.approx(1.0)
