"""From a proposal to the server's next tensors: select, take the server optimizer's step, move the base."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstrata.aggregate.base import Proposal
from fedstrata.core.merges import BaseLog
from fedstrata.core.tensors import NamedTensors, Stratum, stratum_order
from fedstrata.message import rank_keys
from fedstrata.optimize.base import OptimizerState
from fedstrata.plan.checks import check_state
from fedstrata.record.checkpoint import ServerState
from fedstrata.select.base import SelectContext
from fedstrata.select.scores import zico_clients
from fedstrata.select.top_blocks import MIN_HOLDERS
from fedstrata.server.setup import RoundSetup


def _nothing() -> dict[str, Any]:
    return {"holders": {}, "exactness": None, "selection": None, "statistics": {}}


@dataclass(frozen=True)
class Applied:
    """What a round makes of the server.

    Attributes:
        tensors: The server's next tensors.
        versions: Per stratum, the round that last changed it.
        selector: The selector's state.
        base: What is merged into the base model.
        optimizer: The server optimizer's state.
        record: Holders, exactness, selection and statistics, for the round's record.
    """

    tensors: NamedTensors
    versions: Mapping[str, int]
    selector: Mapping[str, Any]
    base: BaseLog
    optimizer: OptimizerState = field(default_factory=OptimizerState)
    record: dict[str, Any] = field(default_factory=_nothing)


def unchanged(state: ServerState) -> Applied:
    """A round in which nothing was merged: everything that was trained stays on its client."""
    optimizer = OptimizerState(state.moments, state.optimizer_steps)
    return Applied(state.tensors, dict(state.versions), dict(state.selector), state.base, optimizer)


def apply_proposal(setup: RoundSetup, state: ServerState, proposal: Proposal, server_round: int) -> Applied:
    """Takes over what the selector accepts.

    Strata that nobody held or that were rejected keep their tensors, versions, moments and base weights.
    """
    context = SelectContext(setup.layout, state.tensors, server_round, setup.seed)
    accepted, selector_state, selection = setup.method.selector.select(dict(state.selector), proposal, context)
    before = OptimizerState(state.moments, state.optimizer_steps)
    accepted, optimizer_state = setup.method.optimizer.step(before, accepted, state.tensors)
    holders = dict(sorted(proposal.holders.items(), key=lambda i: stratum_order(i[0])))
    statistics = dict(proposal.statistics)
    if proposal.moments:
        statistics["mean_squared_delta"] = mean_squared_delta(proposal)
        statistics["zico_clients"] = agreement(proposal)
    return Applied(
        tensors=state.tensors | accepted.tensors,
        versions=dict(state.versions) | {str(s): server_round for s in accepted.holders},
        selector=check_state(setup.method.selector, selector_state, "select"),
        base=state.base.append(accepted.base_update),
        optimizer=optimizer_state,
        record={"holders": rank_keys(holders), "exactness": None, "selection": selection, "statistics": statistics},
    )


def agreement(proposal: Proposal) -> dict[str, float]:
    """Per stratum with enough holders, how well they agree: `zico_clients` over all of its tensors."""
    moments: dict[Stratum, list[tuple[np.ndarray, np.ndarray]]] = {}
    for name, pair in proposal.moments.items():
        moments.setdefault(proposal.layout[name].stratum, []).append(pair)
    enough = {s: m for s, m in moments.items() if proposal.holders[s] >= MIN_HOLDERS}
    return {str(s): zico_clients(m, proposal.holders[s]).reported for s, m in enough.items()}


def mean_squared_delta(proposal: Proposal) -> dict[str, float]:
    """Per stratum, the mean of Δ² over the entries of all its holders' tensors."""
    sums: dict[str, list[float]] = {}
    for name, (_, squares) in proposal.moments.items():
        stratum = proposal.layout[name].stratum
        total = sums.setdefault(str(stratum), [0.0, 0.0])
        total[0] += float(np.sum(squares))
        total[1] += squares.size * proposal.holders[stratum]
    return {s: total / count for s, (total, count) in sums.items() if count}
