"""Law 9, the head's policy, and what a method says about itself, for every registered method."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import AGGREGATORS
from fedstrata.codec import CODECS
from fedstrata.core.tensors import HEAD
from fedstrata.method import METHODS, PairRule
from fedstrata.objective import OBJECTIVES
from fedstrata.optimize import OPTIMIZERS
from fedstrata.plan import PLANNERS
from fedstrata.record.client_state import ClientState
from fedstrata.select import SELECTORS

Case = tuple[str, str]
SIZES = {"a": 30, "b": 7, "c": 12, "d": 1}
BLOCKS = 4


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray], names: Any) -> bool:
    return all(a[n].tobytes() == b[n].tobytes() for n in names)


def head_world(lab: Any, case: Case, head: str, **options: Any) -> Any:
    """A world with this policy, unless the method fixes another one."""
    method = lab.plain(case[0])
    if method.head not in (None, head):
        pytest.skip(f"its head is {method.head}")
    return lab.world(method, case[1], sizes=SIZES, head=head, num_blocks=BLOCKS, **options)


def test_an_aggregated_head_is_trained_by_everybody_and_averaged(lab: Any, case: Case) -> None:
    world = head_world(lab, case, "aggregate")
    record, clients = world.round()
    assert all("head" in c["trained"] for c in clients.values())
    holders = lab.trained_by(world, record, clients).get(HEAD, [])
    assert bool(holders) == (world.setup.method.topology != "alone")
    uniform = getattr(world.setup.method.aggregator, "weight_by", "uniform") == "uniform"
    n = {c: 1 if uniform else world.trainer.sizes[c] for c in holders}
    for spec in world.setup.layout.of(HEAD) if holders and not world.setup.method.aggregator.robust else ():
        mean = sum(n[c] * world.trainer.local[c][spec.name].astype(np.float64) for c in n) / sum(n.values())
        np.testing.assert_allclose(world.state.tensors[spec.name], mean, rtol=2e-6, atol=1e-7)


def test_a_local_head_never_crosses_the_line_and_continues_from_itself(lab: Any, case: Case) -> None:
    world = head_world(lab, case, "local")
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
    world = head_world(lab, case, "frozen")
    names = [s.name for s in world.setup.layout.of(HEAD)]
    before = world.state
    _, clients = world.round()
    assert all("head" not in c["planned"] and c["reads"]["head"] == 1 for c in clients.values())
    assert same_bits(before.tensors, world.state.tensors, names)
    assert world.state.versions["head"] == before.versions["head"]
    if world.setup.method.topology != "alone":
        assert all(same_bits(world.trainer.starts[c], dict(before.tensors), names) for c in clients)


def test_a_method_is_rebuilt_from_what_it_says_about_itself(lab: Any, case: Case) -> None:
    method = lab.method(case[0])
    config = json.loads(json.dumps(method.to_config()))
    registries = {
        "plan": (PLANNERS, method.planner),
        "objective": (OBJECTIVES, method.objective),
        "codec": (CODECS, method.codec),
        "aggregate": (AGGREGATORS, method.aggregator),
        "select": (SELECTORS, method.selector),
        "optimize": (OPTIMIZERS, method.optimizer),
    }
    for key, (registry, part) in registries.items():
        assert registry.build(config[key]) == part
    pairs = config["pairs"] | {k: tuple(config["pairs"][k]) for k in ("local", "drawn")}
    assert PairRule(**pairs | {"trained": tuple(map(tuple, pairs["trained"]))}) == method.pairs
    for key in ("send", "topology", "scaling", "head", "skips_blocks"):
        assert config[key] == getattr(method, key)
    assert METHODS.find(case[0].upper().replace("_", "-")).name == case[0]


def test_the_facts_of_a_method_are_those_of_its_parts(lab: Any, case: Case) -> None:
    """What `fedstrata methods --compare` prints, against what clients of two kinds really do."""
    facts, method = METHODS.entries[case[0]].facts, lab.method(case[0])
    assert facts.unequal_ranks <= (method.aggregator.unequal_ranks or case[1] == "full")
    assert bool(facts.client_state) >= bool(method.pairs.local or method.topology == "alone")
    world = lab.world(method, case[1], sizes=SIZES, num_blocks=BLOCKS)
    _, clients = world.round()
    planned = [{s: r for s, r in c["planned"].items() if s.isdecimal()} for c in clients.values()]
    if len({frozenset(p) for p in planned}) > 1:
        assert facts.unequal_depth or method.topology == "alone"
    ranks = [{r for p in planned for s, r in p.items() if s == block} for block in map(str, range(BLOCKS))]
    if any(len(r) > 1 for r in ranks):
        assert facts.unequal_ranks or case[1] == "bottleneck"
