"""Candidates that were trained side by side: which of them goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedstrata.core.tensors import NamedTensors
from fedstrata.core.wire import SectionBytes
from fedstrata.plan.base import ContestPlanner
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.failure import ClientFailure
from fedstrata.server.apply import Applied
from fedstrata.server.evaluate import Split, evaluate_on_clients
from fedstrata.server.orders import Engine
from fedstrata.server.setup import RoundSetup

MAIN = ""


@dataclass(frozen=True)
class Outcome:
    """What becomes of all models of a round.

    Attributes:
        applied: Of the model that counts.
        groups: Tensors of candidates that go on training side by side.
        planner: The planner's state.
        record: For the round's record.
    """

    applied: Applied
    groups: Mapping[str, NamedTensors]
    planner: dict[str, Any]
    record: dict[str, Any]


def decide(
    setup: RoundSetup,
    state: ServerState,
    applied: Mapping[str, Applied],
    planner_state: dict[str, Any],
    engine: Engine,
    server_round: int,
) -> Outcome:
    """The one model, or with several candidates the first of them until they are judged, and then the best.

    All candidates are judged on the same validation examples: the server's, or every client's. Where clients keep
    strata to themselves (a local head), those with an accepted reply are asked, and each of them uses what it holds
    after this round, whichever candidate it was trained beside; the server's own model has no such strata to be
    judged with, so that clients then score the server's examples, too.

    Args:
        setup: What all rounds share.
        state: Before this round, with the replies that were accepted in it.
        applied: Per group, what the round made of it.
        planner_state: The planner's.
        engine: Evaluates on clients.
        server_round: This round.
    """
    planner = setup.method.planner
    if not isinstance(planner, ContestPlanner):
        (only,) = applied.values()
        return Outcome(only, {}, planner_state, only.record)
    groups = dict(state.groups) | {g: a.tensors for g, a in applied.items()}
    record: dict[str, Any] = {**_joined(applied), "groups": {g: a.record for g, a in sorted(applied.items())}}
    first = next(iter(groups))
    versions = dict(state.versions)
    for one in applied.values():
        versions |= {s: v for s, v in one.versions.items() if v == server_round}
    if not planner.is_over(server_round, setup.num_rounds):
        main = groups.get("same", groups[first])
    else:
        scores, cost = _judge(setup, replace(state, versions=versions), groups, engine, server_round)
        winner, planner_state = planner.settle(planner_state, scores, setup.shape)
        main, groups = groups.get(winner, groups[first]), {}
        record["contest"] = {"scores": scores, "winner": winner, **cost}
    any_applied = next(iter(applied.values()))
    return Outcome(replace(any_applied, tensors=main, versions=versions), groups, planner_state, record)


def _judge(
    setup: RoundSetup, state: ServerState, groups: Mapping[str, NamedTensors], engine: Engine, server_round: int
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Accuracy and loss of every candidate on validation examples, and what the answers cost."""
    scores: dict[str, dict[str, float]] = {}
    down, up = SectionBytes(), SectionBytes()
    failures: list[ClientFailure] = []
    split: Split = "client_validation" if setup.server_score is None else "server_validation"
    asked = state.accepted if setup.is_personal else setup.workers.ids
    for group, tensors in sorted(groups.items()):
        candidate = replace(state, tensors=tensors, server_round=server_round)
        if setup.server_score is not None and not setup.is_personal:
            found = setup.server_score(candidate)
            scores[group] = {"accuracy": found["accuracy"], "loss": found["loss"]}
            continue
        answers = evaluate_on_clients(setup, candidate, engine, split, asked)
        if split == "client_validation":  # the server's examples on clients are no traffic that a deployment would have
            down, up = down + answers.downlink, up + answers.uplink
        failures = [*failures, *answers.failures]
        total = {k: sum(s[k] for s in answers.sums.values()) for k in ("num_examples", "loss_sum", "num_correct")}
        if total["num_examples"]:
            accuracy, loss = (total[k] / total["num_examples"] for k in ("num_correct", "loss_sum"))
            scores[group] = {"accuracy": accuracy, "loss": loss}
    cost = {
        "bytes": {"downlink": down.to_json(), "uplink": up.to_json()},
        "predicted_s": 0.0,
        "failures": [f.to_json() for f in failures],
    }
    return scores, cost


def _joined(applied: Mapping[str, Applied]) -> dict[str, Any]:
    """The record of all groups together: holders add up, the rest stands per group."""
    holders: dict[str, int] = {}
    for one in applied.values():
        for stratum, count in one.record["holders"].items():
            holders[stratum] = holders.get(stratum, 0) + count
    return {"holders": holders, "exactness": None, "selection": None, "statistics": {}}
