"""The laws of selectors."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedstrata.aggregate.base import Proposal
from fedstrata.check.common import config_law, copied, is_json, same_bits
from fedstrata.check.law import Law, Trial
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, Stratum, TensorSpec, stratum_name
from fedstrata.select.base import SELECTORS, SelectContext, Selector


@dataclass(frozen=True)
class _World:
    proposal: Proposal
    context: SelectContext


def _world(trial: Trial) -> _World:
    """One block and the head at first; later up to eight blocks, some without a holder, with a base that moves."""
    rng = trial.rng("world")
    num_blocks = 1 + min(trial.index, 7)
    specs: list[TensorSpec] = []
    for b in range(num_blocks):
        rank = 1 + (b % 2 if trial.index > 3 else 0)
        specs.append(TensorSpec(f"{b}.q.lora_A", (rank, 3), b, "lora_A"))
        specs.append(TensorSpec(f"{b}.q.lora_B", (4, rank), b, "lora_B"))
    layout = Layout((*specs, TensorSpec("classifier", (3, 2), HEAD)))
    current = {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in layout}
    num_clients = 4 + trial.index % 3
    held: list[Stratum] = [s for s in layout.strata if trial.index == 0 or rng.random() < 0.8] or [0]
    tensors: NamedTensors = {}
    moments: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for s in layout:
        if s.stratum in held:
            deltas = rng.standard_normal((num_clients, *s.shape)) * 2.0 ** float(rng.integers(-6, 3))
            tensors[s.name] = (current[s.name] + deltas.mean(axis=0)).astype(np.float32)
            moments[s.name] = (deltas.sum(axis=0), np.square(deltas).sum(axis=0))
    targets = [t for t in layout.targets if f"{t}.lora_A" in tensors]
    base = {t: (np.ones((4, 1), np.float32), np.ones((1, 3), np.float32)) for t in targets} if trial.index % 2 else {}
    weights = {t: {f"c{k}": 1 / num_clients for k in range(num_clients)} for t in targets}
    holders = dict.fromkeys(held, num_clients)
    trial.note(f"{num_blocks} blocks; {', '.join(map(stratum_name, held))} have {num_clients} holders each")
    proposal = Proposal(tensors, holders, {"denominator": "holders"}, base, weights, moments, layout)
    return _World(proposal, SelectContext(layout, current, 1 + trial.index, trial.seed))


def _select(selector: Selector, world: _World) -> tuple[Proposal, dict[str, Any], dict[str, Any]]:
    return selector.select(selector.init(), world.proposal, world.context)


def _subset(selector: Selector, trial: Trial) -> None:
    world = _world(trial)
    accepted, _, _ = _select(selector, world)
    strangers = [s for s in accepted.holders if s not in world.proposal.holders]
    trial.demand(not strangers, f"it accepts {strangers}, which nobody trained")
    expected = world.proposal.restrict(accepted.holders)
    for name in ("tensors", "base_update", "weights", "moments"):
        got, wanted = getattr(accepted, name), getattr(expected, name)
        trial.demand(
            set(got) == set(wanted),
            f"accepted are {', '.join(map(stratum_name, accepted.holders)) or 'no strata'}",
            f"the {name} it passes on:     {sorted(got)}",
            f"those of accepted strata: {sorted(wanted)}",
            "take the part with Proposal.restrict, which cuts everything alike",
        )
    trial.demand(dict(accepted.holders) == dict(expected.holders), f"holders changed: {dict(accepted.holders)}")
    trial.demand(accepted.statistics == world.proposal.statistics, "statistics of the proposal changed")
    same = same_bits({n: accepted.tensors[n] for n in expected.tensors}, expected.tensors)
    trial.demand(same, "an accepted tensor does not have the proposal's bits")


def _untouched(selector: Selector, trial: Trial) -> None:
    world = _world(trial)
    before, current = copied(world.proposal.tensors), copied(world.context.current)
    state = selector.init()
    kept = copy.deepcopy(state)
    accepted, _, _ = selector.select(state, world.proposal, world.context)
    trial.demand(same_bits(before, world.proposal.tensors), "select() changed the proposal's tensors")
    trial.demand(same_bits(current, dict(world.context.current)), "select() changed the server's tensors")
    trial.demand(state == kept, f"select() changed the state it was given: {kept} became {state}")
    after = dict(world.context.current) | accepted.tensors
    rejected = [s.name for s in world.context.layout if s.stratum not in accepted.holders]
    moved = [n for n in rejected if after[n].tobytes() != current[n].tobytes()]
    trial.demand(not moved, f"rejected, and yet changed: {', '.join(moved)}")


def _repeat(selector: Selector, trial: Trial) -> None:
    world = _world(trial)
    turned = replace(
        world.proposal,
        tensors=dict(list(world.proposal.tensors.items())[::-1]),
        holders=dict(list(world.proposal.holders.items())[::-1]),
    )
    first, again, other = (_select(selector, w) for w in (world, world, replace(world, proposal=turned)))
    trial.demand(first[1:] == again[1:], "the same round gave", f"first {first[2]}", f"then  {again[2]}")
    trial.demand(first[2] == other[2], "another order of the tensors gave", f"first {first[2]}", f"then  {other[2]}")


def _json(selector: Selector, trial: Trial) -> None:
    world = _world(trial)
    _, state, why = _select(selector, world)
    for what, value in (("the state of init()", selector.init()), ("the new state", state), ("why", why)):
        trial.demand(is_json(value), f"{what} does not survive JSON: {value!r}"[:400])
    selector.select(state, world.proposal, replace(world.context, server_round=world.context.server_round + 1))


SELECTOR_LAWS: tuple[Law[Selector], ...] = (
    config_law(SELECTORS),
    Law("subset", "what is accepted is a part of the proposal, cut as Proposal.restrict cuts, to the bit", _subset),
    Law("untouched", "what is rejected keeps its bits, and nothing that came in is changed", _untouched),
    Law("repeat", "the same round gives the same choice, whatever the order of tensors", _repeat),
    Law("json", "states and reasons survive JSON", _json),
)
