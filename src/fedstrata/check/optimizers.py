"""The laws of server optimizers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedstrata.aggregate.base import Proposal
from fedstrata.check.common import config_law, copied, first_difference, is_json, same_bits
from fedstrata.check.law import Law, Trial
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, Stratum, TensorSpec, all_finite
from fedstrata.optimize.base import OPTIMIZERS, OptimizerState, ServerOptimizer


def _layout(trial: Trial) -> Layout:
    num_blocks = 2 + min(trial.index, 4)
    shape = (1,) if trial.index == 0 else (3, 1 + trial.index % 5)
    return Layout((*(TensorSpec(f"b.{b}.w", shape, b) for b in range(num_blocks)), TensorSpec("head", (2,), HEAD)))


def _tensors(trial: Trial, layout: Layout, whose: str) -> NamedTensors:
    return {s.name: trial.rng(whose, s.name).standard_normal(s.shape).astype(np.float32) for s in layout}


def _proposal(trial: Trial, layout: Layout, server_round: int) -> Proposal:
    """Block 1 has no holder in odd rounds, the head none in the second."""
    held: list[Stratum] = [
        s for s in layout.strata if not (s == 1 and server_round % 2) and not (s == HEAD and server_round == 2)
    ]
    mine = layout.restrict(held)
    trial.note(f"round {server_round}: {', '.join(mine.names)} have holders")
    values = _tensors(trial, mine, f"mean {server_round}")
    return Proposal(values, dict.fromkeys(held, 2), {"denominator": "holders"}, layout=layout)


def _step(
    optimizer: ServerOptimizer, state: OptimizerState, proposal: Proposal, current: NamedTensors
) -> tuple[NamedTensors, OptimizerState, Proposal]:
    accepted, after = optimizer.step(state, proposal, current)
    return current | accepted.tensors, after, accepted


def _form(optimizer: ServerOptimizer, trial: Trial) -> None:
    layout = _layout(trial)
    current, state = _tensors(trial, layout, "current"), OptimizerState()
    for server_round in (1, 2, 3):
        proposal = _proposal(trial, layout, server_round)
        kept = (copied(current), copied(proposal.tensors), copied(state.moments), dict(state.steps))
        new, after, accepted = _step(optimizer, state, proposal, current)
        trial.demand(
            list(accepted.tensors) == list(proposal.tensors),
            f"round {server_round}: new values of {list(accepted.tensors)}, accepted were {list(proposal.tensors)}",
        )
        trial.demand(
            replace(accepted, tensors={}) == replace(proposal, tensors={}), "something beside the tensors changed"
        )
        for name, tensor in accepted.tensors.items():
            good = tensor.dtype == np.float32 and tensor.shape == layout[name].shape and all_finite(tensor)
            trial.demand(good, f"{name} is {tensor.dtype} {list(tensor.shape)}; expected finite float32")
        for key, moment in after.moments.items():
            name = key.partition("/")[2]
            good = name in layout and moment.dtype == np.float64 and moment.shape == layout[name].shape
            trial.demand(
                good, f'moment "{key}" is {moment.dtype} {list(moment.shape)}; expected "<slot>/<tensor>", float64'
            )
        trial.demand(is_json(dict(after.steps)), f"steps do not survive JSON: {after.steps!r}"[:300])
        same = same_bits(kept[0], current) and same_bits(kept[1], proposal.tensors)
        trial.demand(same and same_bits(kept[2], state.moments) and kept[3] == dict(state.steps), "an argument changed")
        current, state = new, after


def _untouched(optimizer: ServerOptimizer, trial: Trial) -> None:
    layout = _layout(trial)
    current, state = _tensors(trial, layout, "current"), OptimizerState()
    for server_round in (1, 2, 3, 4):
        proposal = _proposal(trial, layout, server_round)
        new, after, _ = _step(optimizer, state, proposal, current)
        for name in (n for n in layout.names if n not in proposal.tensors):
            trial.demand(new[name].tobytes() == current[name].tobytes(), f"round {server_round}: {name} moved")
            old, now = ({k: m for k, m in s.moments.items() if k.partition("/")[2] == name} for s in (state, after))
            trial.demand(
                same_bits(old, now),
                f"round {server_round}: nobody held {name}, and its moments changed",
                first_difference(old, now),
            )
            trial.demand(
                state.steps.get(name) == after.steps.get(name),
                f"round {server_round}: nobody held {name}, and its steps went from "
                f"{state.steps.get(name)} to {after.steps.get(name)}",
            )
        current, state = new, after


def _repeat(optimizer: ServerOptimizer, trial: Trial) -> None:
    """Also through a checkpoint: copies in another order."""
    layout = _layout(trial)
    current, state = _tensors(trial, layout, "current"), OptimizerState()
    for server_round in (1, 2, 3):
        proposal = _proposal(trial, layout, server_round)
        stored = OptimizerState(dict(sorted(copied(state.moments).items())), dict(sorted(state.steps.items())))
        new, after, _ = _step(optimizer, state, proposal, current)
        again, _, _ = _step(optimizer, stored, proposal, copied(current))
        trial.demand(same_bits(new, again), f"round {server_round}, from a stored state:", first_difference(new, again))
        current, state = new, after


def _still(optimizer: ServerOptimizer, trial: Trial) -> None:
    layout = _layout(trial)
    current = _tensors(trial, layout, "current")
    proposal = Proposal(copied(current), dict.fromkeys(layout.strata, 2), layout=layout)
    new, _, _ = _step(optimizer, OptimizerState(), proposal, current)
    trial.demand(
        same_bits(new, current), "the mean equals the server, in the first round:", first_difference(new, current)
    )


OPTIMIZER_LAWS: tuple[Law[ServerOptimizer], ...] = (
    config_law(OPTIMIZERS),
    Law(
        "form", "new values of just the accepted tensors, finite float32; moments float64; arguments left alone", _form
    ),
    Law("untouched", "what nobody held keeps weight, moments and steps, to the bit", _untouched),
    Law("repeat", "the same state and proposal give the same bits, also from a checkpoint", _repeat),
    Law("still", "without a difference and without a past nothing moves", _still),
)
