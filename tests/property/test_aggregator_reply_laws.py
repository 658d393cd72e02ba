"""Law 4 over every registered aggregator: the order of replies, their weights, and what happens to the arrays."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.aggregate import AGGREGATORS, ClientUpdate, MergeContext, Proposal
from fedstrata.core.lora import LoraTerm, product
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, TensorSpec
from fedstrata.errors import AggregationError

WEIGHTED = [part for part in AGGREGATORS if "weight_by" in {f.name for f in fields(AGGREGATORS[part])}]
CONFIGS = [{"id": part} for part in AGGREGATORS] + [{"id": part, "weight_by": "uniform"} for part in WEIGHTED]
RANK, OUT, IN, SCALING = 2, 5, 3, 2.0

TRAINS_B_ONLY = {"svd_mean"}
"""Clients hold A frozen and send B; the server's A is theirs."""
OTHER_DENOMINATORS = {"cohort_mean", "sketch_mean", "norm_weighted_pad"}
"""Holders without examples beside others with some: the cohort's weight, or norms, is what they are divided by."""
REFACTORED = {"product_mean", "raflora", "svd_mean"}
"""Law 10: their pair is factored again, so that tests compare products."""
STRATA = (0, 1, 2, HEAD)
LAYOUT = Layout(
    (
        *(
            spec
            for b in range(3)
            for spec in (
                TensorSpec(f"b.{b}.q.lora_A", (RANK, IN), b, "lora_A"),
                TensorSpec(f"b.{b}.q.lora_B", (OUT, RANK), b, "lora_B"),
            )
        ),
        TensorSpec("head.weight", (2, OUT), HEAD),
        TensorSpec("head.bias", (), HEAD),
    )
)


def values(layout: Layout, seed: int) -> NamedTensors:
    rng = np.random.default_rng(seed)
    return {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in layout}


CURRENT = values(LAYOUT, 0)
CONTEXT = MergeContext({f"b.{b}.q": SCALING for b in range(3)}, seed=5, server_round=1)


def trained(layout: Layout, part: str) -> Layout:
    """What clients of this aggregator train of a layout."""
    return Layout(tuple(s for s in layout if part not in TRAINS_B_ONLY or s.kind != "lora_A"))


@dataclass(frozen=True)
class Reply:
    """One client's part of a drawn round."""

    num_examples: int
    strata: tuple[Any, ...]
    seed: int
    send: str = "delta"

    def update(self, client: str, part: str) -> ClientUpdate:
        layout = trained(LAYOUT.restrict(self.strata), part)
        start = {n: CURRENT[n] for n in layout.names}
        return ClientUpdate(client, self.num_examples, layout, start, values(layout, self.seed), self.send)


replies = st.builds(
    Reply,
    num_examples=st.integers(1, 60),
    strata=st.sets(st.sampled_from(STRATA), min_size=1).map(lambda s: tuple(sorted(s, key=str))),
    seed=st.integers(1, 10**6),
    send=st.sampled_from(["delta", "weights"]),
)
rounds = st.lists(replies, min_size=1, max_size=5)
every_aggregator = pytest.mark.parametrize("config", [{"id": part} for part in AGGREGATORS], ids=lambda c: c["id"])
every_weighting = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(c.values()))
few = settings(max_examples=5, deadline=None)


def merge(aggregator: Any, updates: list[ClientUpdate]) -> Proposal:
    acc = aggregator.zero(LAYOUT, CONTEXT)
    for update in updates:
        acc = aggregator.add(acc, update)
    return aggregator.finish(acc, CURRENT)


def named(cohort: list[Reply], part: str) -> list[ClientUpdate]:
    return [reply.update(f"c{k}", part) for k, reply in enumerate(cohort)]


def effective(tensors: NamedTensors, name: str, scaling: float = SCALING) -> np.ndarray:
    """s·B·A of a target, or a plain weight."""
    if name.endswith(".q"):
        return product(LoraTerm(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"], scaling))
    return tensors[name].astype(np.float64)


def effective_of(proposal: Proposal, name: str) -> np.ndarray:
    """What the server's model has at a map after the proposal, without this round's base."""
    dense = effective(CURRENT | proposal.tensors, name)
    if name in proposal.base_update:
        left, right = proposal.base_update[name]
        dense = dense + left.astype(np.float64) @ right
    return dense


def maps(layout: Layout) -> list[str]:
    return list(dict.fromkeys(s.target for s in layout))


@every_aggregator
@few
@given(cohort=rounds)
def test_names_of_clients_do_not_matter_beyond_rounding(config, cohort):
    """Law 4: replies are fed in ascending id, so that renaming clients changes the order of the sums only."""
    aggregator, part = AGGREGATORS.build(config), config["id"]
    one, other = merge(aggregator, named(cohort, part)), merge(aggregator, named(cohort[::-1], part))
    for name in maps(LAYOUT):
        assert np.allclose(effective_of(one, name), effective_of(other, name), rtol=1e-5, atol=2e-5)
    for name, tensor in one.tensors.items() if part not in REFACTORED else ():
        assert np.allclose(tensor, other.tensors[name], rtol=1e-6, atol=1e-5)


@every_aggregator
@few
@given(cohort=rounds)
def test_repeating_a_round_gives_the_same_bits(config, cohort):
    aggregator, part = AGGREGATORS.build(config), config["id"]
    assert bits(merge(aggregator, named(cohort, part))) == bits(merge(aggregator, named(cohort, part)))


@every_aggregator
@few
@given(cohort=rounds)
def test_starts_that_are_equal_copies_give_the_same_bits(config, cohort):
    aggregator, part = AGGREGATORS.build(config), config["id"]
    copies = [replace(u, start={n: t.copy() for n, t in u.start.items()}) for u in named(cohort, part)]
    assert bits(merge(aggregator, named(cohort, part))) == bits(merge(aggregator, copies))


def bits(proposal: Proposal) -> dict[str, bytes]:
    """Everything that a proposal would change."""
    pairs = {f"{t} {i}": f for t, factors in proposal.base_update.items() for i, f in enumerate(factors)}
    return {n: t.tobytes() for n, t in (proposal.tensors | pairs).items()}


@every_aggregator
@pytest.mark.parametrize("second", ["c1", "c0", "b"])
def test_replies_out_of_order_are_refused_and_change_nothing(config, second):
    aggregator, part = AGGREGATORS.build(config), config["id"]
    first = Reply(3, (0,), 1).update("c1", part)
    acc = aggregator.add(aggregator.zero(LAYOUT, CONTEXT), first)
    with pytest.raises(AggregationError, match="ascending"):
        aggregator.add(acc, Reply(5, (0, 1), 2).update(second, part))
    after, before = aggregator.finish(acc, CURRENT), merge(aggregator, [first])
    assert dict(after.holders) == dict(before.holders)
    assert bits(after) == bits(before)


@every_weighting
def test_a_round_without_replies_or_weight_is_an_error(config):
    """Robust means are unweighted: a client without examples counts there."""
    aggregator, part = AGGREGATORS.build(config), config["id"]
    with pytest.raises(AggregationError):
        aggregator.finish(aggregator.zero(LAYOUT, CONTEXT), CURRENT)
    with pytest.raises(AggregationError):
        aggregator.weights({})
    if part in WEIGHTED and config.get("weight_by") != "uniform":
        with pytest.raises(AggregationError):
            merge(aggregator, [Reply(0, (0,), 1).update("c0", part)])
        with pytest.raises(AggregationError):
            aggregator.weights({"c0": 0})
        if part not in OTHER_DENOMINATORS:
            with pytest.raises(AggregationError):
                merge(aggregator, [Reply(0, (0,), 1).update("c0", part), Reply(3, (1,), 1).update("c1", part)])


@every_weighting
@few
@given(sizes=st.dictionaries(st.text("abc", min_size=1), st.integers(1, 1000), min_size=1, max_size=5))
def test_weights_are_positive_and_add_up_to_one(config, sizes):
    weights = AGGREGATORS.build(config).weights(sizes)
    assert set(weights) == set(sizes)
    assert min(weights.values()) > 0
    assert sum(weights.values()) == pytest.approx(1, abs=1e-12)


@every_weighting
@few
@given(cohort=rounds)
def test_weights_in_a_proposal_belong_to_the_holders_and_add_up_to_one(config, cohort):
    updates = named(cohort, config["id"])
    for target, weights in merge(AGGREGATORS.build(config), updates).weights.items():
        assert set(weights) == {u.client for u in updates if f"{target}.lora_B" in u.layout}
        assert sum(weights.values()) == pytest.approx(1, abs=1e-12)


@every_aggregator
@few
@given(cohort=rounds)
def test_the_current_tensors_and_the_updates_are_left_alone(config, cohort):
    before = {n: t.copy() for n, t in CURRENT.items()}
    updates = named(cohort, config["id"])
    sent = [{n: t.copy() for n, t in u.values.items()} for u in updates]
    proposal = merge(AGGREGATORS.build(config), updates)
    for tensor in proposal.tensors.values():
        tensor += 1
    assert all(np.array_equal(CURRENT[n], t) for n, t in before.items())
    assert all(np.array_equal(u.values[n], t) for u, s in zip(updates, sent, strict=True) for n, t in s.items())


@every_aggregator
def test_summing_aggregators_do_not_keep_updates(config):
    aggregator, part = AGGREGATORS.build(config), config["id"]
    if aggregator.needs != "sum":
        pytest.skip("keeps the cohort's factors")
    acc, refs = aggregator.zero(LAYOUT, CONTEXT), []
    for k in range(3):
        update = Reply(1, STRATA, k).update(f"c{k}", part)
        refs += [weakref.ref(t) for t in update.values.values()]
        acc = aggregator.add(acc, update)
        del update
    assert [r() for r in refs] == [None] * len(refs)
    assert aggregator.finish(acc, CURRENT).tensors
