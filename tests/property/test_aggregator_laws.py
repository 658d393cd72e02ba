"""Laws 1 to 5 and 7 over every registered aggregator."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.aggregate import AGGREGATORS, ClientUpdate, ExactnessProbe, Proposal
from fedstrata.core.lora import LoraTerm, product
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, TensorSpec
from fedstrata.errors import AggregationError
from fedstrata.registry import to_config

CONFIGS = [{"id": part} for part in AGGREGATORS] + [{"id": part, "weight_by": "uniform"} for part in AGGREGATORS]
RANK, OUT, IN, SCALING = 2, 5, 3, 2.0
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


@dataclass(frozen=True)
class Reply:
    """One client's part of a drawn round."""

    num_examples: int
    strata: tuple[Any, ...]
    seed: int
    send: str = "delta"

    def update(self, client: str) -> ClientUpdate:
        layout = LAYOUT.restrict(self.strata)
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
every_aggregator = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(c.values()))
few = settings(max_examples=20, deadline=None)


def merge(aggregator: Any, updates: list[ClientUpdate]) -> Proposal:
    acc = aggregator.zero(LAYOUT)
    for update in updates:
        acc = aggregator.add(acc, update)
    return aggregator.finish(acc, CURRENT)


def named(cohort: list[Reply]) -> list[ClientUpdate]:
    return [reply.update(f"c{k}") for k, reply in enumerate(cohort)]


def effective(tensors: NamedTensors, name: str) -> np.ndarray:
    """s·B·A of a target, or a plain weight."""
    if name.endswith(".q"):
        return product(LoraTerm(tensors[f"{name}.lora_A"], tensors[f"{name}.lora_B"], SCALING))
    return tensors[name].astype(np.float64)


def maps(layout: Layout) -> list[str]:
    return list(dict.fromkeys(s.target for s in layout))


def assert_close(a: np.ndarray, b: np.ndarray) -> None:
    assert np.linalg.norm(a - b) <= 1e-6 * max(np.linalg.norm(b), 1e-3)


@every_aggregator
@few
@given(reply=replies)
def test_one_reply_gives_that_clients_effective_weights(config, reply):
    """Law 1."""
    update = reply.update("c0")
    proposal = merge(AGGREGATORS.build(config), [update])
    local = {n: update.local(n) for n in update.layout.names}
    for name in maps(update.layout):
        assert_close(effective(proposal.tensors, name), effective(local, name))


@every_aggregator
@few
@given(reply=replies, count=st.integers(2, 6))
def test_identical_replies_count_as_one(config, reply, count):
    """Law 2."""
    aggregator = AGGREGATORS.build(config)
    one, many = merge(aggregator, named([reply])), merge(aggregator, named([reply] * count))
    for name in maps(LAYOUT.restrict(reply.strata)):
        assert_close(effective(many.tensors, name), effective(one.tensors, name))


@every_aggregator
@few
@given(cohort=rounds)
def test_strata_without_a_holder_stay_out_of_the_proposal(config, cohort):
    """Law 3."""
    proposal = merge(AGGREGATORS.build(config), named(cohort))
    held = {s for reply in cohort for s in reply.strata}
    assert set(proposal.tensors) == {s.name for s in LAYOUT if s.stratum in held}
    assert dict(proposal.holders) == {s: sum(s in r.strata for r in cohort) for s in STRATA if s in held}


@every_aggregator
@few
@given(cohort=rounds)
def test_results_are_finite_whole_float32_tensors(config, cohort):
    proposal = merge(AGGREGATORS.build(config), named(cohort))
    for name, tensor in proposal.tensors.items():
        assert (tensor.dtype, tensor.shape) == (np.float32, LAYOUT[name].shape)
        assert np.isfinite(tensor).all()


@every_aggregator
@few
@given(cohort=rounds)
def test_means_are_the_ones_that_their_denominator_says(config, cohort):
    """Law 5: Σ w·local / Σ_holders w, or W + Σ w·Δ / Σ_cohort w, in plain float64."""
    aggregator, updates = AGGREGATORS.build(config), named(cohort)
    proposal = merge(aggregator, updates)
    uniform = config.get("weight_by") == "uniform"
    for name, merged in proposal.tensors.items():
        holders = [(1 if uniform else u.num_examples, u) for u in updates if name in u.layout]
        if proposal.statistics["denominator"] == "holders":
            expected = sum(w * u.local(name) for w, u in holders) / sum(w for w, _ in holders)
        else:
            everyone = sum(1 if uniform else u.num_examples for u in updates)
            expected = CURRENT[name] + sum(w * u.delta(name) for w, u in holders) / everyone
        assert np.allclose(merged, expected, rtol=1e-6, atol=1e-6)


@every_aggregator
@few
@given(cohort=rounds)
def test_names_of_clients_do_not_matter_beyond_rounding(config, cohort):
    """Law 4: replies are fed in ascending id, so that renaming clients changes the order of the sums only."""
    aggregator = AGGREGATORS.build(config)
    one, other = merge(aggregator, named(cohort)), merge(aggregator, named(cohort[::-1]))
    for name, tensor in one.tensors.items():
        assert np.allclose(tensor, other.tensors[name], rtol=1e-6, atol=1e-6)


@every_aggregator
@few
@given(cohort=rounds)
def test_repeating_a_round_gives_the_same_bits(config, cohort):
    aggregator = AGGREGATORS.build(config)
    one, again = merge(aggregator, named(cohort)), merge(aggregator, named(cohort))
    for name, tensor in one.tensors.items():
        assert tensor.tobytes() == again.tensors[name].tobytes()


@every_aggregator
@few
@given(cohort=rounds)
def test_starts_that_are_equal_copies_give_the_same_bits(config, cohort):
    aggregator = AGGREGATORS.build(config)
    copies = [replace(u, start={n: t.copy() for n, t in u.start.items()}) for u in named(cohort)]
    one, other = merge(aggregator, named(cohort)), merge(aggregator, copies)
    for name, tensor in one.tensors.items():
        assert tensor.tobytes() == other.tensors[name].tobytes()


@every_aggregator
@pytest.mark.parametrize("second", ["c1", "c0", "b"])
def test_replies_out_of_order_are_refused_and_change_nothing(config, second):
    aggregator = AGGREGATORS.build(config)
    first = Reply(3, (0,), 1).update("c1")
    acc = aggregator.add(aggregator.zero(LAYOUT), first)
    with pytest.raises(AggregationError, match="ascending"):
        aggregator.add(acc, Reply(5, (0, 1), 2).update(second))
    after, before = aggregator.finish(acc, CURRENT), merge(aggregator, [first])
    assert dict(after.holders) == dict(before.holders)
    for name, tensor in before.tensors.items():
        assert np.array_equal(tensor, after.tensors[name])


@every_aggregator
def test_a_round_without_replies_or_weight_is_an_error(config):
    aggregator = AGGREGATORS.build(config)
    with pytest.raises(AggregationError):
        aggregator.finish(aggregator.zero(LAYOUT), CURRENT)
    with pytest.raises(AggregationError):
        aggregator.weights({})
    if config.get("weight_by") != "uniform":
        with pytest.raises(AggregationError):
            merge(aggregator, [Reply(0, (0,), 1).update("c0")])
        with pytest.raises(AggregationError):
            aggregator.weights({"c0": 0})


@every_aggregator
@few
@given(sizes=st.dictionaries(st.text("abc", min_size=1), st.integers(1, 1000), min_size=1, max_size=5))
def test_weights_are_positive_and_add_up_to_one(config, sizes):
    weights = AGGREGATORS.build(config).weights(sizes)
    assert set(weights) == set(sizes)
    assert min(weights.values()) > 0
    assert sum(weights.values()) == pytest.approx(1, abs=1e-12)


@every_aggregator
@few
@given(cohort=rounds)
def test_the_current_tensors_and_the_updates_are_left_alone(config, cohort):
    before = {n: t.copy() for n, t in CURRENT.items()}
    updates = named(cohort)
    sent = [{n: t.copy() for n, t in u.values.items()} for u in updates]
    merge(AGGREGATORS.build(config), updates)
    assert all(np.array_equal(CURRENT[n], t) for n, t in before.items())
    assert all(np.array_equal(u.values[n], t) for u, s in zip(updates, sent, strict=True) for n, t in s.items())


@every_aggregator
def test_summing_aggregators_do_not_keep_updates(config):
    aggregator = AGGREGATORS.build(config)
    if aggregator.needs != "sum":
        pytest.skip("keeps the cohort's factors")
    acc, refs = aggregator.zero(LAYOUT), []
    for k in range(3):
        update = Reply(1, STRATA, k).update(f"c{k}")
        refs += [weakref.ref(t) for t in update.values.values()]
        acc = aggregator.add(acc, update)
        del update
    assert [r() for r in refs] == [None] * len(refs)
    assert aggregator.finish(acc, CURRENT).tensors


@every_aggregator
def test_unequal_ranks_are_merged_or_refused_by_name(config):
    aggregator = AGGREGATORS.build(config)
    full = Reply(3, (0,), 1).update("c0")
    layout = LAYOUT.with_ranks({0: 1})
    start = {s.name: CURRENT[s.name][tuple(slice(n) for n in s.shape)] for s in layout}
    small = ClientUpdate("c1", 2, layout, start, values(layout, 5))
    if aggregator.unequal_ranks:
        assert merge(aggregator, [full, small]).tensors
    else:
        with pytest.raises(AggregationError, match="c1") as error:
            merge(aggregator, [full, small])
        assert "block 0" in str(error.value)
        assert "rank 1" in str(error.value)


@every_aggregator
@few
@given(reply=replies.filter(lambda r: r.strata != (HEAD,)))
def test_the_exactness_error_of_one_reply_is_rounding(config, reply):
    """Law 7: at most 1e-5 after the cast to float32."""
    aggregator, update = AGGREGATORS.build(config), reply.update("c0")
    probe = ExactnessProbe(LAYOUT, {f"b.{b}.q": SCALING for b in range(3)}, aggregator)
    probe.add(update)
    found = probe.finish(merge(aggregator, [update]), CURRENT)
    assert found["exactness_error"] <= 1e-5
    assert found["exactness_error_update"] <= 1e-5


@every_aggregator
def test_an_aggregator_is_rebuilt_from_its_config(config):
    aggregator = AGGREGATORS.build(config)
    assert AGGREGATORS.build(to_config(aggregator)) == aggregator
    assert to_config(aggregator)["id"] == config["id"]
