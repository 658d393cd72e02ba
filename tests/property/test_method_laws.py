"""Laws 1 to 5 and 8 for every registered method with every kind of adapter, on seeded noise instead of training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.aggregate import CohortMean, RankSliceMean
from fedstrata.core.rng import generator
from fedstrata.core.tensors import HEAD
from fedstrata.errors import PlanError, RoundError
from fedstrata.optimize import Momentum
from fedstrata.plan import PLANNERS, ClientRanks
from fedstrata.plan.base import ContestPlanner

Case = tuple[str, str]
SIZES = {"a": 30, "b": 7, "c": 12, "d": 1}
PAIR = {"a": 17, "b": 4}  # one of each device kind
BLOCKS = 3
FEW = settings(max_examples=2, deadline=None)
PLANS_FROM_THE_COHORT = {"legend": {"target_s": 10.0}}
"""Depths by an anchor scan follow from everybody's seconds, a failed client's too; with a target they do not."""

shapes = st.fixed_dictionaries(
    {"width": st.integers(5, 9), "height": st.integers(5, 9), "rank": st.integers(2, 3), "seed": st.integers(0, 2**31)}
)
sizes = st.lists(st.integers(1, 500), min_size=2, max_size=5).map(lambda n: {f"site {i}": k for i, k in enumerate(n)})


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b))


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: Any = None) -> bool:
    return all(a[n].tobytes() == b[n].tobytes() for n in (names if names is not None else a.keys() | b.keys()))


@FEW
@given(shape=shapes)
def test_one_reply_makes_the_server_equal_to_that_client(lab: Any, case: Case, shape: dict[str, int]) -> None:
    """Law 1: what a client shares (fedsa_lora: A; slicing methods: its slices) is what the server has afterwards."""
    world = lab.world(lab.plain(case[0]), case[1], sizes=PAIR, clients_per_round=1, num_blocks=BLOCKS, **shape)
    record, clients = world.round()
    (client,) = clients
    held = lab.trained_by(world, record, clients)
    for stratum in held:
        sides = world.sides(client, stratum)
        assert sides
        assert all(close(server, mine) for _, server, mine in sides)
    assert clients[client]["trained"]
    assert held or lab.method(case[0]).topology == "alone"


def only(kind: str, sizes: dict[str, int]) -> dict[str, str]:
    """Habits with which only clients on one kind of device answer; every second one is small."""
    return {c: "raise" for i, c in enumerate(sorted(sizes)) if ("big", "small")[i % 2] != kind}


@pytest.mark.parametrize("kind", ["big", "small"])
@settings(max_examples=1, deadline=None)
@given(shape=shapes, sizes=st.lists(st.integers(1, 500), min_size=4, max_size=5))
def test_identical_replies_give_what_one_of_them_gives(
    lab: Any, case: Case, kind: str, shape: dict[str, int], sizes: list[int]
) -> None:
    """Law 2; the replies have one rank, which is smaller than the server's on small devices."""
    if lab.method(case[0]).topology == "pooled" or (case[0], kind) == ("fslora", "small"):
        pytest.skip("one client, or slices that differ from client to client")
    named = {f"site {i}": n for i, n in enumerate(sizes)}
    options = {"num_blocks": BLOCKS, "all_alike": True, "habits": only(kind, named)}
    world = lab.world(lab.plain(case[0]), case[1], sizes=named, **options, **shape)
    record, clients = world.round()
    assert record["num_replies"] >= 2
    for stratum, holders in lab.trained_by(world, record, clients).items():
        for client in holders:
            assert all(close(server, mine) for _, server, mine in world.sides(client, stratum))


def two_blocks(method: Any) -> Any:
    """The method with a plan of blocks 0 and 1 only, where another plan makes sense at all."""
    if isinstance(method.planner, ContestPlanner):
        return method
    return method.with_parts(planner=PLANNERS.build({"id": "first_k", "k": 2}))


@settings(max_examples=1, deadline=None)
@given(shape=shapes)
def test_what_nobody_trained_keeps_its_bits_and_its_version(lab: Any, case: Case, shape: dict[str, int]) -> None:
    """Law 3, in a model where 1, 10 and 11 could be mixed up; the server's moments and base weights rest as well."""
    method = two_blocks(lab.plain(case[0]))
    if method.aggregator.fixed_coordinates:
        method = method.with_parts(optimizer=Momentum())
    world = lab.world(method, case[1], sizes={"a": 3, "b": 9}, **shape)
    before, base = world.state, world.state.base.dense()
    record, clients = world.round()
    held = lab.trained_by(world, record, clients)
    layout, after = world.setup.layout, world.state.base.dense()
    changed = {s for line in clients.values() for s in line["trained"]}  # of candidates, by any of them
    for stratum in layout.strata:
        specs = layout.of(stratum)
        names = [s.name for s in specs]
        targets = {s.target for s in specs} & set(layout.targets)
        if stratum in held:
            moved = any(not same_bits(base, after, [t]) for t in targets & after.keys())
            assert moved or not same_bits(before.tensors, world.state.tensors, names)
        else:
            assert same_bits(before.tensors, world.state.tensors, names)
            assert all(same_bits(base, after, [t]) for t in targets & base.keys())
            assert not any(name.split("/", 1)[1] in names for name in world.state.moments)
            assert not any(t in after and t not in base for t in targets)
        shared = stratum not in world.setup.local_strata
        expected = world.state.server_round if str(stratum) in changed and shared else before.versions[str(stratum)]
        assert world.state.versions[str(stratum)] == expected
    if not isinstance(method.planner, ContestPlanner):
        assert record["holders"] == {str(s): len(held[s]) for s in layout.strata if s in held}
        assert {int(s) for s in changed if s.isdecimal()} == {0, 1}  # and neither 10 nor 11


def test_a_rank_slice_that_nobody_has_keeps_its_bits(lab: Any, case: Case) -> None:
    """Law 3 for slicing methods: two clients of rank 1 answer, the server has three slices."""
    method = lab.method(case[0])
    if not method.aggregator.unequal_ranks or method.aggregator.folds_scaling or case[1] != "lora":
        pytest.skip("does not share rank slices")
    world = lab.world(lab.plain(case[0]), sizes=SIZES, habits=only("small", SIZES), num_blocks=BLOCKS)
    record, clients = world.round()
    for stratum, holders in lab.trained_by(world, record, clients).items():
        covered = sorted({h for c in holders for h in world.slices(c, stratum)})
        absent = [h for h in range(3) if h not in covered]
        for spec in (s for s in world.setup.layout.of(stratum) if s.kind != "weight"):
            old, new = world.before.tensors[spec.name], world.state.tensors[spec.name]
            old, new = (x if spec.kind == "lora_A" else x.T for x in (old, new))
            assert absent
            assert old[absent].tobytes() == new[absent].tobytes()
            assert all(old[h].tobytes() != new[h].tobytes() for h in covered)


@pytest.mark.parametrize("how", ["raise", "nan", "damage"])
def test_a_failed_client_leaves_the_model_as_if_it_had_not_been_drawn(lab: Any, case: Case, how: str) -> None:
    """Law 4; a client that fails fails in a probe as well."""
    method = lab.method(case[0], **PLANS_FROM_THE_COHORT.get(case[0], {}))
    failing = lab.pooled if method.topology == "pooled" else "d" if case[1] == "bottleneck" else "b"
    habits, damage = ({}, {failing}) if how == "damage" else ({failing: how}, set())
    world = lab.world(method, case[1], sizes=SIZES, habits=habits, damage=damage, num_blocks=BLOCKS)
    if method.topology == "pooled":
        with pytest.raises(RoundError, match=r"0 good replies of 1"):
            world.round()
        return
    without = lab.without(world, failing)
    record, clients = world.round()
    expected, others = without.round()
    if case[1] != "bottleneck":  # the absent client would deal the candidates anew
        assert same_bits(world.state.tensors, without.state.tensors)
        assert same_bits(world.state.base.dense(), without.state.base.dense())
        assert world.state.versions == without.state.versions
        assert case[0] == "legend" or world.state.planner == without.state.planner
        for key in ("holders", "exactness", "selection", "train_loss", "statistics"):
            assert record[key] == expected[key]
        assert {c: clients[c]["trained"] for c in others} == {c: others[c]["trained"] for c in others}
    assert record["num_replies"] == expected["num_replies"] == 3
    assert world.state.accepted == without.state.accepted == {c: 4 for c in SIZES if c != failing}
    (failure,) = record["failures"]
    reason = "bad reply" if how == "damage" else "exception"
    assert (failure["client"], failure["server_round"], failure["reason"]) == (failing, 4, reason)
    assert {"raise": "the disk of this client is full", "nan": "NaN", "damage": "damaged"}[how] in failure["detail"]
    down, up = (len(world.payloads.get((failing, d), b"")) for d in ("down", "up"))
    assert clients[failing]["status"] == "failed"
    assert (clients[failing]["bytes"]["downlink"]["total"], clients[failing]["bytes"]["uplink"]["total"]) == (down, up)
    for direction in ("down", "up"):
        crossed = sum(len(data) for (_, d), data in world.payloads.items() if d == direction)
        assert record["bytes"][f"{direction}link"]["total"] == crossed
    assert (up > 0) == (how == "damage")
    probed = len(record.get("probes", {"failures": []})["failures"])
    assert world.state.totals["num_client_failures"] == 1 + probed


@FEW
@given(shape=shapes, sizes=sizes, uniform=st.booleans())
def test_a_mean_divides_by_the_examples_of_its_holders_or_of_the_cohort(
    lab: Any, case: Case, shape: dict[str, int], sizes: dict[str, int], uniform: bool
) -> None:
    """Law 5, tensor by tensor for means of tensors, and for every weighted method's head."""
    method, weight_by = lab.plain(case[0]), "uniform" if uniform else "num_examples"
    if not hasattr(method.aggregator, "weight_by"):
        pytest.skip("a robust mean is unweighted")
    method = lab.plain(case[0], weight_by=weight_by) if case[0] not in ("central", "local_only") else method
    uniform = method.aggregator.weight_by == "uniform"
    world = lab.world(method, case[1], sizes=sizes, num_blocks=BLOCKS, **shape)
    before = world.state.tensors
    record, clients = world.round()
    weight = {c: 1 if uniform else world.trainer.sizes[c] for c in clients}
    by_tensor = method.aggregator.id in ("holders_mean", "factor_mean")
    for stratum, holders in lab.trained_by(world, record, clients).items():
        for spec in world.setup.layout.of(stratum) if by_tensor or stratum == HEAD else ():
            if spec.name not in world.trainer.tasks[holders[0]].layouts(world.setup.layout).up:
                assert world.state.tensors[spec.name].tobytes() == before[spec.name].tobytes()
                continue
            local = {c: world.trainer.local[c][spec.name].astype(np.float64) for c in holders}
            mean = sum(weight[c] * local[c] for c in holders) / sum(weight[c] for c in holders)
            np.testing.assert_allclose(world.state.tensors[spec.name], mean, rtol=2e-6, atol=1e-6)


def test_a_cohort_mean_counts_the_absent_with_what_the_server_had(lab: Any) -> None:
    """W + Σ_holders n·(local − W) / Σ_cohort n, where blocks have different holders."""
    method = lab.method("fedavg").with_parts(
        planner=PLANNERS.build({"id": "random_k", "strata": 2}), aggregator=CohortMean()
    )
    world = lab.world(method, sizes=SIZES, num_blocks=BLOCKS)
    before = world.state.tensors
    record, clients = world.round()
    for stratum, holders in lab.trained_by(world, record, clients).items():
        for spec in world.setup.layout.of(stratum):
            w = before[spec.name].astype(np.float64)
            moved = sum(SIZES[c] * (world.trainer.local[c][spec.name] - w) for c in holders) / sum(SIZES.values())
            np.testing.assert_allclose(world.state.tensors[spec.name], w + moved, rtol=2e-6, atol=1e-6)
    assert any(0 < count < 4 for count in record["holders"].values())


def test_a_change_that_was_not_planned_fails_the_client(lab: Any, case: Case) -> None:
    """Law 8."""
    habits = dict.fromkeys(("a", "b", lab.pooled), "stray")
    world = lab.world(lab.method(case[0]), case[1], sizes=PAIR, habits=habits, num_blocks=BLOCKS)
    with pytest.raises(RoundError, match=r"Training changed .*, which was not planned"):
        world.round()


def test_a_plan_without_a_change_is_a_warning_with_its_reason(lab: Any, case: Case) -> None:
    """Law 8; nobody has moved, so that the server's model stays what it is."""
    habits = dict.fromkeys(("a", "c", lab.pooled), "still") | only("big", SIZES)
    world = lab.world(lab.plain(case[0]), case[1], sizes=SIZES, habits=habits, num_blocks=BLOCKS)
    before = world.state
    record, clients = world.round()
    for client in (c for c in clients.values() if c["failure"] is None):
        assert (client["status"], client["trained"]) == ("ok", [])
        planned = [("block " if s.isdigit() else "") + s for s in client["planned"]]
        assert client["warnings"] == [f"{s} was planned but did not change: no step was taken" for s in planned]
    layout = world.setup.layout
    if case[1] == "lora":
        assert all(close(world.effective(world.state, t), world.effective(before, t)) for t in layout.targets)
        assert same_bits(before.tensors, world.state.tensors, [s.name for s in layout.of(HEAD)])
    else:
        assert same_bits(before.tensors, world.state.tensors)
    error = (record["exactness"] or {}).get("exactness_error")
    assert error is None or error <= 1e-6


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("last_k", {"k": 0}),
        ("fedra_freeze", {"strata": 0}),
        ("suffix_by_device", {"depth": {"big": 0, "small": 0}}),
        ("flora", {"ranks": {"big": 0, "small": 0}}),
    ],
)
def test_a_round_in_which_nobody_would_train_is_refused(lab: Any, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="obody would train"):
        lab.world(lab.method(name, **options), sizes=SIZES, head="frozen").round()


def test_ranks_that_the_mean_cannot_take_are_refused_before_anything_is_sent(lab: Any) -> None:
    method = lab.method("fedavg").with_parts(planner=ClientRanks({"big": 3, "small": 2}))
    world = lab.world(method, sizes=SIZES)
    with pytest.raises(PlanError, match=r"client \w+ would train block 0 at rank 2, the server has 3 \(and \d+ more"):
        world.round()
    assert not world.payloads
    lab.world(method.with_parts(aggregator=RankSliceMean()), sizes=SIZES).round()


def test_only_the_named_stream_decides_who_is_drawn(lab: Any) -> None:
    worlds = [lab.world(lab.method("fedavg"), sizes=SIZES, clients_per_round=2, seed=seed) for seed in (1, 1, 2)]
    cohorts = [[world.round()[0]["cohort"] for _ in range(6)] for world in worlds]
    assert cohorts[0] == cohorts[1] != cohorts[2]
    rng = generator(1, "cohort", 4)  # the first round of these worlds is the fourth
    keys = rng.gumbel(size=4)
    assert cohorts[0][0] == sorted(np.array(sorted(SIZES))[np.argsort(-keys)[:2]].tolist())
