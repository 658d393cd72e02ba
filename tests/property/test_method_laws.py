"""The laws of a round, for every registered method with every kind of adapter, on seeded noise instead of training."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.aggregate import AGGREGATORS
from fedstrata.client import ClientState
from fedstrata.codec import CODECS
from fedstrata.core.rng import generator
from fedstrata.core.tensors import HEAD, parse_stratum
from fedstrata.errors import PlanError, RoundError
from fedstrata.method import METHODS
from fedstrata.objective import OBJECTIVES
from fedstrata.plan import PLANNERS
from fedstrata.registry import to_config
from fedstrata.select import SELECTORS

Case = tuple[str, str]
SIZES = {"a": 30, "b": 7, "c": 12, "d": 1}
PAIR = {"a": 17, "b": 4}  # one of each device kind
FEW = settings(max_examples=3, deadline=None)

shapes = st.fixed_dictionaries(
    {"width": st.integers(3, 9), "height": st.integers(3, 9), "rank": st.integers(1, 3), "seed": st.integers(0, 2**31)}
)
sizes = st.lists(st.integers(1, 500), min_size=2, max_size=5).map(lambda n: {f"site {i}": k for i, k in enumerate(n)})


def trained_by(clients: dict[str, Any]) -> dict[Any, list[str]]:
    """Stratum → the clients whose reply trained it."""
    strata = {s for c in clients.values() for s in c["trained"]}
    return {parse_stratum(s): [k for k, c in clients.items() if s in c["trained"]] for s in strata}


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.linalg.norm(a - b) <= 1e-6 * np.linalg.norm(b))


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: Any = None) -> bool:
    return all(a[n].tobytes() == b[n].tobytes() for n in (names if names is not None else a.keys() | b.keys()))


def merges(case: Case, lab: Any) -> bool:
    return lab.method(case[0]).topology != "alone"


@FEW
@given(shape=shapes)
def test_one_reply_makes_the_server_equal_to_that_client(lab: Any, case: Case, shape: dict[str, int]) -> None:
    world = lab.world(lab.method(case[0]), case[1], sizes=PAIR, clients_per_round=1, **shape)
    _, clients = world.round()
    (client,) = clients
    for stratum in trained_by(clients) if merges(case, lab) else ():
        mine = lab.effective(world, world.trainer.local[client], stratum)
        server = lab.effective(world, world.state.tensors, stratum)
        assert all(close(server[n], mine[n]) for n in mine)
    assert clients[client]["trained"]


@FEW
@given(shape=shapes, sizes=sizes)
def test_identical_replies_give_what_one_of_them_gives(
    lab: Any, case: Case, shape: dict[str, int], sizes: dict[str, int]
) -> None:
    world = lab.world(lab.method(case[0]), case[1], sizes=sizes, all_alike=True, **shape)
    _, clients = world.round()
    for stratum, holders in trained_by(clients).items() if merges(case, lab) else ():
        server = lab.effective(world, world.state.tensors, stratum)
        for client in holders:
            mine = lab.effective(world, world.trainer.local[client], stratum)
            assert all(close(server[n], mine[n]) for n in mine)


@FEW
@given(shape=shapes)
def test_what_nobody_trained_keeps_its_bits_and_its_version(lab: Any, case: Case, shape: dict[str, int]) -> None:
    method = lab.method(case[0])
    if "plan" in method.open_choices:
        method = method.with_parts(planner=PLANNERS.build({"id": "first_k", "k": 2}))
    world = lab.world(method, case[1], sizes={"a": 3, "b": 9}, **shape)
    before = world.state
    record, clients = world.round()
    held = set(trained_by(clients)) if merges(case, lab) else set()
    layout = world.setup.layout
    for stratum in layout.strata:
        names = [s.name for s in layout.of(stratum)]
        if stratum in held:
            assert not same_bits(before.tensors, world.state.tensors, names)
            assert world.state.versions[str(stratum)] == world.state.server_round == before.server_round + 1
        else:
            assert same_bits(before.tensors, world.state.tensors, names)
            assert world.state.versions[str(stratum)] == before.versions[str(stratum)]
    assert record["holders"] == {str(s): len(trained_by(clients)[s]) for s in layout.strata if s in held}
    if "plan" in method.open_choices:
        assert {s for s in trained_by(clients) if isinstance(s, int)} == {0, 1}  # and neither 10 nor 11


@pytest.mark.parametrize("how", ["raise", "nan", "damage"])
def test_a_failed_client_leaves_the_model_as_if_it_had_not_been_drawn(lab: Any, case: Case, how: str) -> None:
    method = lab.method(case[0])
    failing = lab.pooled if method.topology == "pooled" else "b"
    habits, damage = ({}, {failing}) if how == "damage" else ({failing: how}, set())
    world = lab.world(method, case[1], sizes=SIZES, habits=habits, damage=damage)
    if method.topology == "pooled":
        with pytest.raises(RoundError, match=r"0 good replies of 1"):
            world.round()
        return
    without = lab.without(world, failing)
    record, clients = world.round()
    expected, others = without.round()
    assert same_bits(world.state.tensors, without.state.tensors)
    assert world.state.versions == without.state.versions
    assert world.state.accepted == without.state.accepted == {c: 4 for c in SIZES if c != failing}
    for key in ("holders", "exactness", "selection", "num_replies", "train_loss"):
        assert record[key] == expected[key]
    assert {c: clients[c]["trained"] for c in others} == {c: others[c]["trained"] for c in others}
    (failure,) = record["failures"]
    reason = "bad reply" if how == "damage" else "exception"
    assert (failure["client"], failure["server_round"], failure["reason"]) == (failing, 4, reason)
    assert {"raise": "the disk of this client is full", "nan": "NaN", "damage": "damaged"}[how] in failure["detail"]
    down, up = (len(world.payloads.get((failing, d), b"")) for d in ("down", "up"))
    assert clients[failing]["status"] == "failed"
    assert (clients[failing]["bytes"]["downlink"]["total"], clients[failing]["bytes"]["uplink"]["total"]) == (down, up)
    assert record["bytes"]["downlink"]["total"] == expected["bytes"]["downlink"]["total"] + down
    assert record["bytes"]["uplink"]["total"] == expected["bytes"]["uplink"]["total"] + up
    assert (up > 0) == (how == "damage")
    assert world.state.totals["num_client_failures"] == 1


@FEW
@given(shape=shapes, sizes=sizes, uniform=st.booleans())
def test_a_mean_divides_by_the_examples_of_its_holders_or_of_the_cohort(
    lab: Any, case: Case, shape: dict[str, int], sizes: dict[str, int], uniform: bool
) -> None:
    method, weight_by = lab.method(case[0]), "uniform" if uniform else "num_examples"
    for config in ({"id": to_config(method.aggregator)["id"]}, {"id": "cohort_mean"}):
        if config["id"] == "cohort_mean" and "aggregate" not in method.open_choices:
            continue
        aggregator = AGGREGATORS.build(config | {"weight_by": weight_by})
        world = lab.world(method.with_parts(aggregator=aggregator), case[1], sizes=sizes, **shape)
        before = world.state.tensors
        _, clients = world.round()
        weight = {c: 1 if uniform else world.trainer.sizes[c] for c in clients}
        for stratum, holders in trained_by(clients).items() if merges(case, lab) else ():
            for spec in world.setup.layout.of(stratum):
                local = {c: world.trainer.local[c][spec.name].astype(np.float64) for c in holders}
                if config["id"] == "cohort_mean":  # W + Σ_holders w·(local − W) / Σ_cohort w
                    moved = sum(weight[c] * (local[c] - before[spec.name]) for c in holders) / sum(weight.values())
                    mean = before[spec.name] + moved
                else:  # Σ_holders w·local / Σ_holders w
                    mean = sum(weight[c] * local[c] for c in holders) / sum(weight[c] for c in holders)
                np.testing.assert_allclose(world.state.tensors[spec.name], mean, rtol=2e-6, atol=1e-6)


@FEW
@given(shape=shapes, sizes=sizes)
def test_the_logged_exactness_error_is_the_dense_one(
    lab: Any, case: Case, shape: dict[str, int], sizes: dict[str, int]
) -> None:
    world = lab.world(lab.method(case[0]), case[1], sizes=sizes, **shape)
    record, clients = world.round()
    if not merges(case, lab):
        assert record["exactness"] is None
        return
    if case[1] == "full":
        assert record["exactness"]["exactness_error"] is None
        assert "LoRA" in record["exactness"]["reason"]
        return
    layout, scaling = world.setup.layout, world.setup.scaling

    def product(tensors: dict[str, np.ndarray], target: str) -> np.ndarray:
        a, b = (tensors[f"{target}.{f}"].astype(np.float64) for f in ("lora_A", "lora_B"))
        return np.asarray(scaling[target] * (b @ a))

    errors, means, moves = [], [], []
    for target in layout.targets:
        holders = trained_by(clients).get(layout[f"{target}.lora_A"].stratum, [])
        total = sum(world.trainer.sizes[c] for c in holders)
        if holders:  # E = ‖D_s − Σ q_k·D_k‖_F with q_k = n_k / Σ_holders n
            q = {c: world.trainer.sizes[c] / total for c in holders}
            mean = sum(q[c] * product(world.trainer.local[c], target) for c in holders)
            start = sum(q[c] * product(world.trainer.starts[c], target) for c in holders)
            errors.append(np.linalg.norm(product(world.state.tensors, target) - mean))
            means.append(np.linalg.norm(mean))
            moves.append(np.linalg.norm(mean - start))
    expected = np.linalg.norm(errors) / np.linalg.norm(means)
    assert record["exactness"]["exactness_error"] == pytest.approx(expected, rel=1e-3, abs=1e-7)
    expected = np.linalg.norm(errors) / np.linalg.norm(moves)
    assert record["exactness"]["exactness_error_update"] == pytest.approx(expected, rel=1e-3, abs=1e-7)
    assert len(record["exactness"]["per_target"]) == len(errors)


def test_a_change_that_was_not_planned_fails_the_client(lab: Any, case: Case) -> None:
    habits = dict.fromkeys(("a", "b", lab.pooled), "stray")
    world = lab.world(lab.method(case[0]), case[1], sizes=PAIR, habits=habits, head="frozen")
    with pytest.raises(RoundError, match=r"Training changed .*, which was not planned"):
        world.round()


def test_a_plan_without_a_change_is_a_warning_with_its_reason(lab: Any, case: Case) -> None:
    habits = dict.fromkeys(("a", "b", lab.pooled), "still")
    world = lab.world(lab.method(case[0]), case[1], sizes=PAIR, habits=habits)
    before = world.state.tensors
    record, clients = world.round()
    for client in clients.values():
        assert (client["status"], client["trained"]) == ("ok", [])
        planned = [("block " if s.isdigit() else "") + s for s in client["planned"]]
        assert client["warnings"] == [f"{s} was planned but did not change: no step was taken" for s in planned]
    assert same_bits(before, world.state.tensors)
    assert record["exactness"] is None or record["exactness"]["exactness_error"] in (0.0, None)


def test_an_aggregated_head_is_trained_by_everybody_and_averaged(lab: Any, case: Case) -> None:
    world = lab.world(lab.method(case[0]), case[1], sizes=SIZES)
    _, clients = world.round()
    assert all("head" in c["trained"] for c in clients.values())
    if merges(case, lab):
        n = {c: world.trainer.sizes[c] for c in clients}
        for spec in world.setup.layout.of(HEAD):
            mean = sum(n[c] * world.trainer.local[c][spec.name].astype(np.float64) for c in clients) / sum(n.values())
            np.testing.assert_allclose(world.state.tensors[spec.name], mean, rtol=2e-6, atol=1e-7)


def test_a_local_head_never_crosses_the_line_and_continues_from_itself(lab: Any, case: Case) -> None:
    world = lab.world(lab.method(case[0]), case[1], sizes=SIZES, head="local")
    names = [s.name for s in world.setup.layout.of(HEAD)]
    before = {n: world.state.tensors[n].copy() for n in names}
    _, clients = world.round()
    mine = {c: {n: t.copy() for n, t in world.trainer.local[c].items()} for c in clients}
    for client in clients:
        layouts = world.trainer.tasks[client].layouts(world.setup.layout)
        assert not any(n in layout for n in names for layout in (layouts.down, layouts.up))
        kept = ClientState.from_bytes(world.states.read(client, 4), world.setup.layout)
        assert same_bits(kept.local, mine[client], names)
    world.round()
    assert same_bits(before, world.state.tensors, names)
    assert all(same_bits(world.trainer.starts[c], mine[c], names) for c in clients)


def test_a_frozen_head_is_read_by_everybody_and_changed_by_nobody(lab: Any, case: Case) -> None:
    world = lab.world(lab.method(case[0]), case[1], sizes=SIZES, head="frozen")
    names = [s.name for s in world.setup.layout.of(HEAD)]
    before = world.state
    _, clients = world.round()
    assert all("head" not in c["planned"] and c["reads"]["head"] == 1 for c in clients.values())
    assert same_bits(before.tensors, world.state.tensors, names)
    assert world.state.versions["head"] == before.versions["head"]
    if merges(case, lab):
        assert all(same_bits(world.trainer.starts[c], dict(before.tensors), names) for c in clients)


def test_a_method_is_rebuilt_from_what_it_says_about_itself(lab: Any, case: Case) -> None:
    method = lab.method(case[0])
    config = json.loads(json.dumps(method.to_config()))
    registries = {
        "plan": PLANNERS, "objective": OBJECTIVES, "codec": CODECS, "aggregate": AGGREGATORS, "select": SELECTORS,
    }  # fmt: skip
    parts = {key: registry.build(config[key]) for key, registry in registries.items()}
    assert parts["plan"] == method.planner
    assert parts["objective"] == method.objective
    assert parts["codec"] == method.codec
    assert parts["aggregate"] == method.aggregator
    assert parts["select"] == method.selector
    assert (config["send"], config["topology"]) == (method.send, method.topology)
    assert METHODS.find(case[0].upper().replace("_", "-")).name == case[0]


@pytest.mark.parametrize(
    ("name", "options"),
    [("last_k", {"k": 0}), ("fedra_freeze", {"strata": 0}), ("suffix_by_device", {"depth": {"big": 0, "small": 0}})],
)
def test_a_round_in_which_nobody_would_train_is_refused(lab: Any, name: str, options: dict[str, Any]) -> None:
    world = lab.world(lab.method(name, **options), sizes=SIZES, head="frozen")
    with pytest.raises(PlanError, match="obody would train anything"):
        world.round()


def test_only_the_named_stream_decides_who_is_drawn(lab: Any) -> None:
    worlds = [lab.world(lab.method("fedavg"), sizes=SIZES, clients_per_round=2, seed=seed) for seed in (1, 1, 2)]
    cohorts = [[world.round()[0]["cohort"] for _ in range(6)] for world in worlds]
    assert cohorts[0] == cohorts[1] != cohorts[2]
    rng = generator(1, "cohort", 4)  # the first round of these worlds is the fourth
    keys = rng.gumbel(size=4)
    assert cohorts[0][0] == sorted(np.array(sorted(SIZES))[np.argsort(-keys)[:2]].tolist())
