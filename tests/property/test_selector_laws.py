"""Laws over every registered selector: a part of the proposal, untouched; deterministic; recorded."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.aggregate.base import Proposal
from fedstrata.core.rng import generator
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, TensorSpec
from fedstrata.registry import to_config
from fedstrata.select import SELECTORS, SelectContext
from fedstrata.select.groups import block_groups, num_accepted

CONFIGS: list[dict[str, Any]] = [
    {"id": "accept_all"},
    {"id": "random_blocks", "portion": 0.4, "update_singletons": True},
    {"id": "last_blocks", "portion": 0.6, "update_singletons": False},
    *(
        {"id": "top_blocks", "portion": 0.5, "score": score, "score_on": on, "update_singletons": True}
        for score, on in (
            ("consistency", "factors"),
            ("consistency", "product"),
            ("magnitude", "factors"),
            ("magnitude", "product"),
            ("zico_clients", "factors"),
        )
    ),
]
SCORED = [c for c in CONFIGS if c["id"] == "top_blocks"]
few = settings(max_examples=20, deadline=None)
every_selector = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: "-".join(map(str, c.values())))
every_score = pytest.mark.parametrize("config", SCORED, ids=lambda c: f"{c['score']}-{c['score_on']}")


@dataclass(frozen=True)
class World:
    """A proposal and what stands around it."""

    proposal: Proposal
    context: SelectContext


def make_world(ranks: list[int], held: list[bool], num_clients: int, seed: int, move_head: bool) -> World:
    """One pair and a bias per block; blocks of equal rank form a group. Some tensors move, some do not."""
    specs = []
    for b, rank in enumerate(ranks):
        specs.append(TensorSpec(f"{b}.q.lora_A", (rank, 3), b, "lora_A"))
        specs.append(TensorSpec(f"{b}.q.lora_B", (4, rank), b, "lora_B"))
        specs.append(TensorSpec(f"{b}.bias", (2,), b))
    layout = Layout((*specs, TensorSpec("classifier", (3, 2), HEAD)))
    rng = generator(seed, "world")
    current = {s.name: rng.standard_normal(s.shape, dtype=np.float32) for s in layout}
    holders = {b: num_clients for b, h in enumerate(held) if h} | ({HEAD: num_clients} if move_head else {})
    tensors: NamedTensors = {}
    moments = {}
    for s in layout:
        if s.stratum in holders:
            still = rng.random() < 0.2
            deltas = rng.standard_normal((num_clients, *s.shape)) * (0 if still else 2.0 ** rng.integers(-8, 3))
            tensors[s.name] = (current[s.name] + deltas.mean(axis=0)).astype(np.float32)
            moments[s.name] = (deltas.sum(axis=0), np.square(deltas).sum(axis=0))
    proposal = Proposal(tensors, holders, {"total_weight": 1.0}, moments=moments, layout=layout)
    return World(proposal, SelectContext(layout, current, seed % 100 + 1, seed))


@st.composite
def worlds(draw: st.DrawFn) -> World:
    ranks = draw(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=8))
    held = draw(st.lists(st.booleans(), min_size=len(ranks), max_size=len(ranks)))
    return make_world(ranks, held, draw(st.integers(2, 6)), draw(st.integers(0, 2**40)), draw(st.booleans()))


def select(config: dict[str, Any], world: World) -> tuple[Proposal, dict[str, Any]]:
    selector = SELECTORS.build(config)
    accepted, _, why = selector.select(selector.init(), world.proposal, world.context)
    return accepted, why


def test_every_registered_selector_is_in_this_battery():
    assert {c["id"] for c in CONFIGS} == set(SELECTORS)


@every_selector
def test_a_selector_is_rebuilt_from_its_config(config):
    selector = SELECTORS.build(config)
    assert json.loads(json.dumps(to_config(selector))) == config


@every_selector
@few
@given(world=worlds())
def test_what_is_accepted_is_a_part_of_the_proposal_to_the_bit(config, world):
    accepted, why = select(config, world)
    assert why["accepted"] == [str(s) for s in world.context.layout.strata if s in accepted.holders]
    assert {s: world.proposal.holders[s] for s in accepted.holders} == dict(accepted.holders)
    for spec in world.context.layout:
        assert (spec.name in accepted.tensors) == (spec.stratum in accepted.holders)
        if spec.name in accepted.tensors:
            assert accepted.tensors[spec.name] is world.proposal.tensors[spec.name]
    assert accepted.statistics == world.proposal.statistics


@every_selector
@few
@given(world=worlds())
def test_every_group_gives_its_portion_and_singletons_follow_the_option(config, world):
    accepted, _ = select(config, world)
    if config["id"] == "accept_all":
        assert accepted.holders == world.proposal.holders
        return
    groups, alone = block_groups(world.context.layout, world.proposal.holders)
    for group in groups:
        taken = [b for b in group.candidates if b in accepted.holders]
        assert len(taken) == num_accepted(config["portion"], len(group.candidates))
    assert [s for s in alone if s in accepted.holders] == (alone if config["update_singletons"] else [])


@every_selector
@few
@given(world=worlds())
def test_the_same_round_gives_the_same_choice_and_record(config, world):
    first, second = select(config, world), select(config, world)
    assert first[1] == second[1]
    assert list(first[0].tensors) == list(second[0].tensors)


@every_selector
@few
@given(world=worlds())
def test_the_order_of_tensors_and_holders_does_not_matter(config, world):
    turned = replace(
        world.proposal,
        tensors=dict(reversed(world.proposal.tensors.items())),
        holders=dict(reversed(world.proposal.holders.items())),
    )
    assert select(config, replace(world, proposal=turned))[1] == select(config, world)[1]


@every_selector
@few
@given(world=worlds())
def test_records_are_json(config, world):
    _, why = select(config, world)
    assert json.loads(json.dumps(why, allow_nan=False)) == why


@every_selector
@few
@given(world=worlds())
def test_selecting_changes_neither_proposal_nor_current(config, world):
    before = [{n: t.copy() for n, t in x.items()} for x in (world.proposal.tensors, world.context.current)]
    select(config, world)
    for tensors, old in zip((world.proposal.tensors, world.context.current), before, strict=True):
        assert all(np.array_equal(tensors[n], old[n]) for n in old)


@every_score
@few
@given(world=worlds())
def test_no_rejected_block_has_a_higher_key_than_an_accepted_one(config, world):
    _, why = select(config, world)
    new, old = world.proposal.tensors, world.context.current
    for group in why["groups"]:
        keys = {b: np.inf if why["keys"][b] is None else why["keys"][b] for b in group["candidates"]}
        moved = {
            b: any(not np.array_equal(new[s.name], old[s.name]) for s in world.context.layout.of(int(b))) for b in keys
        }
        for taken in group["accepted"]:
            for left in set(keys) - set(group["accepted"]):
                assert keys[taken] >= keys[left] or (moved[taken] and not moved[left])


@pytest.mark.parametrize("score_on", ["factors", "product"])
@few
@given(world=worlds(), exponent=st.integers(-6, 6))
def test_consistency_does_not_see_the_size_of_the_moves(score_on, world, exponent):
    """From zero weights, so that scaling a move by a power of two is exact."""
    zero = {n: np.zeros_like(t) for n, t in world.context.current.items()}
    base = replace(world, context=replace(world.context, current=zero))
    scaled = {n: t * np.float32(2.0**exponent) for n, t in world.proposal.tensors.items()}
    other = replace(base, proposal=replace(world.proposal, tensors=scaled))
    config = {"id": "top_blocks", "score_on": score_on}
    mine, theirs = (select(config, w)[1]["keys"] for w in (base, other))
    assert mine.keys() == theirs.keys()
    for block in mine:
        assert (mine[block] is None) == (theirs[block] is None)
        if mine[block] is not None:
            assert theirs[block] == pytest.approx(mine[block], rel=1e-9, abs=1e-12)


@few
@given(world=worlds())
def test_product_scores_equal_those_of_the_dense_products(world):
    _, why = select({"id": "top_blocks", "score_on": "product"}, world)
    new, old = world.proposal.tensors, world.context.current
    for block, key in why["keys"].items():
        a, b = f"{block}.q.lora_A", f"{block}.q.lora_B"
        dense = new[b].astype(np.float64) @ new[a] - old[b].astype(np.float64) @ old[a]
        bias = new[f"{block}.bias"].astype(np.float64) - old[f"{block}.bias"]
        expected = sum(np.hypot(1, abs(d.mean()) / d.std()) - 1 for d in (dense, bias) if d.std() > 1e-9)
        if key is not None:
            assert key == pytest.approx(expected, rel=1e-6, abs=1e-9)
