"""Laws 1 to 3, 5, 7 and 10 over every registered aggregator; exceptions are stated per aggregator at the top."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.aggregate import AGGREGATORS, ClientUpdate, ExactnessProbe, MergeContext, Proposal
from fedstrata.core.lora import LoraTerm, product
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, TensorSpec
from fedstrata.errors import AggregationError
from fedstrata.registry import to_config

WEIGHTED = [part for part in AGGREGATORS if "weight_by" in {f.name for f in fields(AGGREGATORS[part])}]
CONFIGS = [{"id": part} for part in AGGREGATORS] + [{"id": part, "weight_by": "uniform"} for part in WEIGHTED]
RANK, OUT, IN, SCALING = 2, 5, 3, 2.0

TRAINS_B_ONLY = {"svd_mean"}
"""Clients hold A frozen and send B; the server's A is theirs."""
MEANS_OF_TENSORS = {"holders_mean", "cohort_mean", "factor_mean", "rank_slice_mean", "sketch_mean"}
"""Law 5 as a formula per tensor; the others merge products, weigh by norms, or are robust and unweighted."""
SLICING = {"rank_slice_mean", "norm_weighted_pad", "sketch_mean"}
"""Laws 1 and 3 hold per rank slice."""
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


def local_of(update: ClientUpdate) -> NamedTensors:
    """A client's model after training, with what it did not train as it was."""
    return CURRENT | {n: update.local(n) for n in update.layout.names}


def cut(update_rank: int, seed: int, part: str, stratum: int = 0) -> ClientUpdate:
    """A reply of a smaller rank."""
    layout = trained(LAYOUT.with_ranks({stratum: update_rank}), part)
    start = {s.name: CURRENT[s.name][tuple(slice(n) for n in s.shape)] for s in layout}
    return ClientUpdate("c1", 2, layout, start, values(layout, seed))


def maps(layout: Layout) -> list[str]:
    return list(dict.fromkeys(s.target for s in layout))


def assert_close(a: np.ndarray, b: np.ndarray) -> None:
    assert np.linalg.norm(a - b) <= 1e-6 * max(np.linalg.norm(b), 1e-3)


@every_aggregator
@few
@given(reply=replies)
def test_one_reply_gives_that_clients_effective_weights(config, reply):
    """Law 1."""
    update = reply.update("c0", config["id"])
    proposal = merge(AGGREGATORS.build(config), [update])
    for name in maps(LAYOUT.restrict(reply.strata)):
        assert_close(effective_of(proposal, name), effective(local_of(update), name))


@pytest.mark.parametrize("part", [p for p in AGGREGATORS if AGGREGATORS[p].unequal_ranks])
@few
@given(seed=st.integers(1, 10**6))
def test_one_reply_of_a_smaller_rank_counts_on_its_slices(part, seed):
    """Laws 1 and 3: slicing methods keep the other slices to the bit; products become the client's."""
    update = cut(1, seed, part)
    proposal = merge(AGGREGATORS.build(part), [update])
    a, b = (f"b.0.q.lora_{x}" for x in "AB")
    if part in SLICING:
        assert_close(proposal.tensors[a][:1], update.local(a))
        assert_close(proposal.tensors[b][:, :1], update.local(b))
        assert proposal.tensors[a][1:].tobytes() == CURRENT[a][1:].tobytes()
        assert proposal.tensors[b][:, 1:].tobytes() == CURRENT[b][:, 1:].tobytes()
    else:
        local = {n: update.local(n) for n in update.layout.names}
        assert_close(effective_of(proposal, "b.0.q"), effective(local, "b.0.q"))


@pytest.mark.parametrize("part", [p for p in AGGREGATORS if AGGREGATORS[p].folds_scaling])
@few
@given(reply=replies.filter(lambda r: r.strata != (HEAD,)), scaling=st.sampled_from([0.5, 1.0, 16.0]))
def test_a_clients_own_scaling_is_folded_into_its_product(part, reply, scaling):
    """Law 6: s_k·B_k·A_k arrives, whatever the server's s."""
    update = replace(reply.update("c0", part), scaling=dict.fromkeys(CONTEXT.scaling, scaling))
    proposal = merge(AGGREGATORS.build(part), [update])
    for name in update.layout.targets:
        assert_close(effective_of(proposal, name), effective(local_of(update), name, scaling))


@every_weighting
@few
@given(reply=replies, count=st.integers(2, 6))
def test_identical_replies_count_as_one(config, reply, count):
    """Law 2."""
    aggregator, part = AGGREGATORS.build(config), config["id"]
    one, many = merge(aggregator, named([reply], part)), merge(aggregator, named([reply] * count, part))
    for name in maps(LAYOUT.restrict(reply.strata)):
        assert_close(effective_of(many, name), effective_of(one, name))


@every_aggregator
@few
@given(cohort=rounds)
def test_strata_without_a_holder_stay_out_of_the_proposal(config, cohort):
    """Law 3."""
    proposal = merge(AGGREGATORS.build(config), named(cohort, config["id"]))
    held = {s for reply in cohort for s in reply.strata}
    assert set(proposal.tensors) == {s.name for s in LAYOUT if s.stratum in held}
    assert dict(proposal.holders) == {s: sum(s in r.strata for r in cohort) for s in STRATA if s in held}
    assert set(proposal.base_update) <= {t for t in LAYOUT.targets if int(t.split(".")[1]) in held}


@every_aggregator
@few
@given(cohort=rounds)
def test_results_are_finite_whole_float32_tensors_in_order(config, cohort):
    proposal = merge(AGGREGATORS.build(config), named(cohort, config["id"]))
    assert list(proposal.tensors) == [n for n in LAYOUT.names if n in proposal.tensors]
    for name, tensor in proposal.tensors.items():
        assert (tensor.dtype, tensor.shape) == (np.float32, LAYOUT[name].shape)
        assert np.isfinite(tensor).all()
    for target, (left, right) in proposal.base_update.items():
        assert (left.dtype, right.dtype) == (np.float32, np.float32)
        assert (left.shape[0], right.shape[1]) == (OUT, IN)
        assert left.shape[1] == right.shape[0] <= IN
        assert f"{target}.lora_A" in LAYOUT


@every_aggregator
@few
@given(cohort=rounds)
def test_every_proposal_can_be_cut_to_a_block(config, cohort):
    proposal = merge(AGGREGATORS.build(config), named(cohort, config["id"]))
    stratum = next(iter(proposal.holders))
    part = proposal.restrict([stratum])
    assert list(part.tensors) == [s.name for s in LAYOUT.of(stratum)]
    assert list(part.holders) == [stratum]
    assert set(part.base_update) == {s.target for s in LAYOUT.of(stratum)} & set(proposal.base_update)


@pytest.mark.parametrize(
    "config", [c for c in CONFIGS if c["id"] in MEANS_OF_TENSORS], ids=lambda c: "-".join(c.values())
)
@few
@given(cohort=rounds)
def test_means_are_the_ones_that_their_denominator_says(config, cohort):
    """Law 5: Σ w·local / Σ_holders w, or W + Σ w·Δ / Σ_cohort w, in plain float64."""
    aggregator, updates = AGGREGATORS.build(config), named(cohort, config["id"])
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


@every_weighting
@few
@given(cohort=rounds)
def test_the_head_is_a_mean_that_says_its_denominator(config, cohort):
    """Law 9 with head = "aggregate"; robust means merge it like every stratum."""
    aggregator, updates = AGGREGATORS.build(config), named(cohort, config["id"])
    proposal = merge(aggregator, updates)
    assert proposal.statistics["denominator"] in ("holders", "cohort")
    if aggregator.robust or "head.weight" not in proposal.tensors:
        return
    uniform = config.get("weight_by") == "uniform"
    weight = {u.client: 1 if uniform else u.num_examples for u in updates}
    holders = [u for u in updates if "head.weight" in u.layout]
    whole = holders if proposal.statistics["denominator"] == "holders" else updates
    total = sum(weight[u.client] for u in whole)
    missing = total - sum(weight[u.client] for u in holders)
    expected = sum(weight[u.client] * u.local("head.weight") for u in holders) + missing * CURRENT["head.weight"]
    assert np.allclose(proposal.tensors["head.weight"], expected / total, rtol=1e-6, atol=1e-6)


@every_aggregator
def test_unequal_ranks_are_merged_or_refused_by_name(config):
    aggregator, part = AGGREGATORS.build(config), config["id"]
    full, small = Reply(3, (0,), 1).update("c0", part), cut(1, 5, part)
    assert aggregator.uniform_rank_only is not aggregator.unequal_ranks
    if aggregator.unequal_ranks:
        assert merge(aggregator, [full, small]).tensors
    else:
        with pytest.raises(AggregationError, match="c1") as error:
            merge(aggregator, [full, small])
        assert "block 0" in str(error.value)
        assert "rank 1" in str(error.value)


def measure(aggregator: Any, updates: list[ClientUpdate]) -> dict[str, Any]:
    """What the probe finds, under the names of an exactness error."""
    probe = ExactnessProbe(LAYOUT, CONTEXT.scaling, aggregator)
    for update in updates:
        probe.add(update)
    found = probe.finish(merge(aggregator, updates), CURRENT)
    if aggregator.robust:
        return {
            "exactness_error": found["distance_to_mean"],
            "exactness_error_update": found["distance_to_mean_update"],
        }
    return found


@every_aggregator
@few
@given(reply=replies.filter(lambda r: r.strata != (HEAD,)))
def test_the_exactness_error_of_one_reply_is_rounding(config, reply):
    """Law 7: at most 1e-5 after the cast to float32."""
    found = measure(AGGREGATORS.build(config), [reply.update("c0", config["id"])])
    assert found["exactness_error"] <= 1e-5
    assert found["exactness_error_update"] <= 1e-5


@pytest.mark.parametrize("part", [p for p in AGGREGATORS if AGGREGATORS[p].exact])
@few
@given(cohort=rounds)
def test_exact_aggregators_have_no_exactness_error(part, cohort):
    """Law 7, over all targets with holders."""
    error = measure(AGGREGATORS.build(part), named(cohort, part))["exactness_error"]
    assert error is None or error <= 1e-5


@pytest.mark.parametrize("part", [p for p in AGGREGATORS if not AGGREGATORS[p].exact and not AGGREGATORS[p].robust])
def test_who_is_not_called_exact_is_not(part):
    cohort = [Reply(k + 1, (0,), k + 1) for k in range(3)]
    assert measure(AGGREGATORS.build(part), named(cohort, part))["exactness_error"] > 1e-3


@pytest.mark.parametrize("part", sorted(REFACTORED))
@few
@given(seed=st.integers(1, 10**6))
def test_factoring_again_leaves_no_direction_dead(part, seed):
    """Law 10: a client whose second column of B is 0 gives one spare direction, with a row in A."""
    update = Reply(3, (0,), seed, "weights").update("c0", part)
    update.values["b.0.q.lora_B"][:, 1] = 0
    merged = merge(AGGREGATORS.build(part), [update]).tensors
    assert merged["b.0.q.lora_B"].any(axis=0).tolist() == [True, False]
    assert merged["b.0.q.lora_A"].any(axis=1).all()


@every_weighting
def test_an_aggregator_is_rebuilt_from_its_config(config):
    aggregator = AGGREGATORS.build(config)
    assert AGGREGATORS.build(to_config(aggregator)) == aggregator
    assert to_config(aggregator)["id"] == config["id"]
