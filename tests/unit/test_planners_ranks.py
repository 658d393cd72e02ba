"""Ranks per client, the exclusive baseline, and what a plan costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, TensorSpec
from fedstrata.device import (
    Client,
    DeviceProfile,
    Fleet,
    PlanCost,
    PlanNeeds,
    build_fleet,
    count_step_flop,
    predict_client_seconds,
)
from fedstrata.errors import PlanError
from fedstrata.plan import ClientRanks, Exclusive, InvitingPlanner, PlanContext, check_round_plan

BLOCKS = 3
FLEET = build_fleet({"laptop-16gb": 1, "jetson-nx": 2}, {"a": 10, "b": 10, "c": 10})


def make_shape() -> ModelShape:
    targets = tuple(TargetShape(f"layer.{b}.query", b, 10, 6) for b in range(BLOCKS))
    head = (TensorSpec("classifier.weight", (7,), HEAD),)
    own = tuple(TensorSpec(f"{t.name}.weight", (6, 10), t.block) for t in targets)
    words = TensorSpec("words", (1000,), EMBEDDINGS)
    return ModelShape("Tiny", BLOCKS, 10, 32, targets, head, (words, *own, *head), 4 * 1187)


SHAPE = make_shape()


def world(**changes: Any) -> PlanContext:
    return replace(PlanContext(SHAPE, FLEET, FLEET.ids, 1, 0, 4, SHAPE.blocks), **changes)


def plan(planner, context: PlanContext | None = None, state: dict[str, Any] | None = None):
    context = context or world()
    made, _ = planner.plan(planner.init(SHAPE, FLEET) if state is None else state, context)
    check_round_plan(made, context)
    return {p.client: dict(p.ranks) for p in made.clients}


# ---- ranks per client


def test_everyone_trains_every_block_at_its_own_rank():
    """A client's own entry counts more than its kind's."""
    planner = ClientRanks({"laptop-16gb": 4, "jetson-nx": 1, "c": 2})
    blocks = range(BLOCKS)
    assert plan(planner) == {c: {**dict.fromkeys(blocks, r), HEAD: 1} for c, r in {"a": 4, "b": 1, "c": 2}.items()}
    assert planner.plan({"kept": {}}, world())[0].why == {"rule": "client_ranks", "ranks": {"a": 4, "b": 1, "c": 2}}


def test_a_client_holds_the_first_slices_of_the_servers_factors():
    planner = ClientRanks({"a": 4, "jetson-nx": 2})
    layout = global_layout(SHAPE, "lora", {**planner.server_ranks(SHAPE, 6), HEAD: 1})
    mine = layout.with_ranks(plan(planner)["b"])
    assert layout["layer.1.query.lora_A"].shape == (4, 10)
    assert (mine["layer.1.query.lora_A"].shape, mine["layer.1.query.lora_B"].shape) == ((2, 10), (6, 2))


def test_the_server_keeps_the_largest_rank_of_any_client():
    assert ClientRanks({"a": 2, "jetson-nx": 5}).server_ranks(SHAPE, 4) == dict.fromkeys(range(BLOCKS), 5)
    with pytest.raises(PlanError, match="Rank 7 is larger"):
        ClientRanks({"a": 2, "jetson-nx": 7}).server_ranks(SHAPE, 8)


def test_rank_0_trains_the_head_only():
    made = ClientRanks({"a": 0, "jetson-nx": 3}).plan({"kept": {}}, world(max_rank=3))[0].clients[0]
    assert dict(made.ranks) == {HEAD: 1}
    assert set(made.reads) == set(range(BLOCKS))


def test_with_full_parameters_any_rank_trains_everything():
    full = world(strata=(EMBEDDINGS, *SHAPE.blocks), max_rank=1)
    everything = {EMBEDDINGS: 1, **dict.fromkeys(range(BLOCKS), 1), HEAD: 1}
    assert plan(ClientRanks({"a": 4, "jetson-nx": 2}), full) == dict.fromkeys("abc", everything)


def line(client: str, kept: float | None, status: str = "ok") -> dict[str, Any]:
    return {"client": client, "status": status, "numbers": {} if kept is None else {"kept_rank": kept}}


def test_a_kept_rank_is_kept_for_good():
    """Only smaller ones, only of accepted clients, only where one is reported."""
    planner = ClientRanks({"a": 4, "jetson-nx": 4})
    state = planner.init(SHAPE, FLEET)
    state = planner.observe(state, {"clients": [line("a", 3.0), line("b", None), line("c", 2.0, "failed")]})
    assert {c: r[0] for c, r in plan(planner, state=state).items()} == {"a": 3, "b": 4, "c": 4}
    state = planner.observe(planner.observe(state, {}), {"clients": [line("a", 4.0), line("c", 1.0)]})
    assert {c: r[0] for c, r in plan(planner, state=state).items()} == {"a": 3, "b": 4, "c": 1}


def test_all_mistakes_of_the_ranks_come_at_once():
    with pytest.raises(PlanError) as error:
        ClientRanks({"laptop-16gp": 2, "b": -1}).init(SHAPE, FLEET)
    text = str(error.value)
    assert '"laptop-16gp", which is neither a device kind nor a client: did you mean "laptop-16gb"' in text
    assert 'ranks["b"] = -1' in text
    assert 'nothing about client "a" or its device kind "laptop-16gb"' in text
    assert 'nothing about client "c"' in text
    with pytest.raises(PlanError, match="all ranks are 0"):
        ClientRanks({"laptop-16gb": 0, "jetson-nx": 0}).init(SHAPE, FLEET)


# ---- what a plan costs


def test_forward_and_backward_add_up_to_the_step():
    """T = 2: forward 2·T·(3·60 + 7 + 32), backward 2·T·(60 + 7 + 32) and weights 2·T·(32 + 7); N = 2·(10 + 6)."""
    flop = count_step_flop(SHAPE, {2: 2, HEAD: 1}, 2)
    assert (flop.forward, flop.backward) == (4 * (187 + 32), 4 * (99 + 39))
    device = DeviceProfile("x", 1, flop_per_s=100, down_bytes_per_s=10, up_bytes_per_s=5)
    time = predict_client_seconds(device, SHAPE, {2: 2, HEAD: 1}, 2, 3, 20, 30)
    assert time.forward_s + time.backward_s == pytest.approx(time.compute_s)
    assert time.forward_s == pytest.approx(3 * flop.forward / 100)


def test_seconds_use_the_clients_own_steps_and_the_codecs_bytes():
    """Up 2·16·1 + 7 numbers of 1 byte, down two adapters and the head at 2 bytes."""
    cost = PlanCost(SHAPE, 2, {"a": 3, "b": 6}, up_bytes_per_value=1.0, down_bytes_per_value=2.0)
    trained, reads = {2: 2, HEAD: 1}, {1: 2}
    one, two = (cost.seconds(replace(FLEET["a"], id=c), trained, reads) for c in "ab")
    assert two.compute_s == pytest.approx(2 * one.compute_s)
    assert one.upload_s == pytest.approx(39 / FLEET["a"].device.up_bytes_per_s)
    assert one.download_s == pytest.approx(2 * (32 + 32 + 7) / FLEET["a"].device.down_bytes_per_s)


def test_memory_by_hand():
    """Base 4748; present 71·4, trained 39·12; 4 bytes · 2 tokens · 16 · width 10 per block from the lowest trained."""
    cost = PlanCost(SHAPE, 2, {})
    assert cost.memory_bytes({2: 2, HEAD: 1}, {1: 2}) == 4748 + 4 * 71 + 12 * 39 + 1280
    assert cost.memory_bytes({0: 2}) == 4748 + 4 * 32 + 12 * 32 + 3 * 1280
    assert cost.memory_bytes({HEAD: 1}) == 4748 + 4 * 7 + 12 * 7 + 1280


def test_memory_of_full_parameters_by_hand():
    """Everything: gradients and moments of 1187 numbers; the embeddings lie below all three blocks."""
    cost = PlanCost(SHAPE, 2, {}, adapter="full")
    everything = {EMBEDDINGS: 1, 0: 1, 1: 1, 2: 1, HEAD: 1}
    assert cost.memory_bytes(everything) == 4748 + 12 * 1187 + 3 * 1280
    assert cost.memory_bytes({2: 1}, {0: 1, 1: 1}) == 4748 + 12 * 60 + 1280


def test_a_broken_cap_is_named():
    device = DeviceProfile("x", 100, 1.0, 1.0, 1.0, round_bytes=50)
    assert PlanNeeds(100, 50).broken_cap(device) == ""
    assert PlanNeeds(101, 50).broken_cap(device) == "memory: needs 101 bytes, has 100"
    assert PlanNeeds(100, 51).broken_cap(device) == "bytes of a round: needs 51, may use 50"
    assert PlanNeeds(100, 10**9).broken_cap(replace(device, round_bytes=None)) == ""


# ---- exclusive

ALL_MEMORY = 4748 + 4 * (3 * 64 + 7) + 12 * (3 * 64 + 7) + 3 * 1280
"""Three blocks at rank 4 (4·16 numbers each) and the head, as in `test_memory_by_hand`."""


def fleet_of(**memory: int) -> Fleet:
    return Fleet(tuple(Client(c, DeviceProfile(f"kind {c}", m, 1.0, 1.0, 1.0), 10) for c, m in memory.items()))


def test_only_listed_kinds_take_part():
    planner = Exclusive(["jetson-nx"])
    everything = {**dict.fromkeys(range(BLOCKS), 4), HEAD: 1}
    assert plan(planner) == {"b": everything, "c": everything}
    assert planner.plan({}, world())[0].why == {"rule": "exclusive", "excluded": {"a": "laptop-16gb"}}
    assert isinstance(planner, InvitingPlanner)
    assert planner.invited(world(cohort=())) == ("b", "c")


def test_only_devices_with_enough_memory_take_part():
    fleet = fleet_of(a=ALL_MEMORY, b=ALL_MEMORY - 1, c=2 * ALL_MEMORY)
    context = world(fleet=fleet, cost=PlanCost(SHAPE, 2, dict.fromkeys("abc", 1)))
    assert Exclusive().invited(context) == ("a", "c")
    assert set(plan(Exclusive(), context)) == {"a", "c"}


def test_a_frozen_head_needs_less():
    fleet = fleet_of(a=ALL_MEMORY - 16 * 7, b=1, c=1)
    context = world(fleet=fleet, head=False, cost=PlanCost(SHAPE, 2, dict.fromkeys("abc", 1)))
    assert Exclusive().invited(context) == ("a",)


def test_nobody_is_an_error_that_says_why():
    context = world(fleet=fleet_of(a=1, b=1, c=1), cost=PlanCost(SHAPE, 2, dict.fromkeys("abc", 1)))
    with pytest.raises(PlanError, match=f"kind a: memory: needs {ALL_MEMORY} bytes, has 1"):
        plan(Exclusive(), context)
    with pytest.raises(PlanError, match="No client of round 1 can train"):
        plan(Exclusive(["jetson-nx"]), world(cohort=("a",)))
    with pytest.raises(PlanError, match="does not know what a plan costs"):
        plan(Exclusive())


def test_kinds_that_no_client_has_are_refused():
    with pytest.raises(PlanError, match='did you mean "jetson-nx"'):
        Exclusive(["jetson-xn"]).init(SHAPE, FLEET)
    with pytest.raises(PlanError, match="empty list"):
        Exclusive([]).init(SHAPE, FLEET)
