"""Validation after each round: it selects the best state and decides when to stop. The test is not read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedstrata.client import Score
from fedstrata.errors import RoundError
from fedstrata.experiment.build import Built
from fedstrata.experiment.contradictions import has_validation
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.record.checkpoint import ServerState
from fedstrata.server.evaluate import ClientScores, KeepPayload, Split, drop_payload, evaluate_on_clients
from fedstrata.server.orders import Engine


def metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Accuracy and mean loss of sums over examples."""
    count = sums["num_examples"]
    return {
        "accuracy": sums["num_correct"] / count,
        "loss": sums["loss_sum"] / count,
        "num_examples": count,
    }


def server_metrics(score: Score) -> dict[str, float]:
    """Metrics of an evaluation on the server."""
    return metrics({"num_examples": score.num_examples, "loss_sum": score.loss_sum, "num_correct": score.num_correct})


def client_metrics(per_client: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Metrics over all clients' examples together, and how they spread over clients.

    `worst_clients_accuracy` is the mean accuracy of the worst tenth of the clients (at least one).

    Raises:
        RoundError: If no client has a result.
    """
    scored = [s for s in per_client.values() if s["num_examples"]]
    if not scored:
        raise RoundError(
            "No client could evaluate the model",
            expected="at least one client with examples for it",
            got=f"{len(per_client)} answers, none of them with an example",
            do="give clients examples to validate on (data.client_validation_fraction), or evaluate on the server",
        )
    pooled = metrics({k: sum(s[k] for s in scored) for k in ("num_examples", "loss_sum", "num_correct")})
    accuracies = sorted(s["num_correct"] / s["num_examples"] for s in scored)
    worst = accuracies[: max(1, len(accuracies) // 10)]
    return pooled | {
        "num_clients": len(scored),
        "client_mean_accuracy": sum(accuracies) / len(accuracies),
        "worst_clients_accuracy": sum(worst) / len(worst),
    }


def validate(
    built: Built, state: ServerState, record: dict[str, Any], engine: Engine, keep: KeepPayload = drop_payload
) -> ServerState:
    """Adds this round's validation to the state and the record, where one is due.

    Raises:
        RoundError: If clients evaluate and none of them could.
    """
    spec = built.spec
    if state.server_round % spec.eval.every or not has_validation(spec):
        return state
    if spec.eval.on == "clients" or built.is_personal:
        split: Split = "client_validation" if spec.eval.on == "clients" else "server_validation"
        asked = record["cohort"] if built.is_personal else built.setup.workers.ids
        scores = evaluate_on_clients(built.setup, state, engine, split, asked, keep)
        known = dict(state.personal) | scores.sums if built.is_personal else scores.sums
        values = client_metrics(known)
        state = replace(state, personal=dict(sorted(known.items())) if built.is_personal else {})
        state = _count(state, record, scores, bytes_too=spec.eval.on == "clients")
    else:
        values = server_metrics(built.score(state, "server_validation"))
    record["metrics"] = {"validation": values}
    value = values[spec.eval.metric]
    state = replace(state, validation=(*state.validation, {"server_round": state.server_round, **values}))
    if state.best is None or _beats(spec, value, state.best["value"]):
        state = replace(state, best={"server_round": state.server_round, "value": value})
    return state


def is_better(built: Built, state: ServerState) -> bool:
    """Whether this round's state is the best so far and worth keeping."""
    return not built.is_personal and state.best is not None and state.best["server_round"] == state.server_round


def stop_reason(spec: ExperimentSpec, state: ServerState) -> str | None:
    """Why no further round follows: `count`, `target` or `patience`; None to go on. A function of the state alone."""
    rounds = spec.rounds
    if state.validation and state.best is not None and state.validation[-1]["server_round"] == state.server_round:
        latest = state.validation[-1][spec.eval.metric]
        if rounds.target is not None and not _beats(spec, rounds.target, latest):
            return "target"
        since = sum(v["server_round"] > state.best["server_round"] for v in state.validation)
        if rounds.patience is not None and since >= rounds.patience:
            return "patience"
    return "count" if state.server_round >= rounds.count else None


def _beats(spec: ExperimentSpec, value: float, other: float) -> bool:
    return value < other if spec.eval.metric == "loss" else value > other


def _count(state: ServerState, record: dict[str, Any], scores: ClientScores, *, bytes_too: bool) -> ServerState:
    """Puts the failures of an evaluation, and its bytes, into the record and the ledger."""
    totals: dict[str, Any] = {k: dict(v) if isinstance(v, Mapping) else v for k, v in state.totals.items()}
    record["failures"] = record["failures"] + [f.to_json() for f in scores.failures]
    totals["num_client_failures"] += len(scores.failures)
    if bytes_too:
        sent = {"downlink": scores.downlink.to_json(), "uplink": scores.uplink.to_json()}
        record["evaluation_bytes"] = sent
        for direction, sections in sent.items():
            for key, value in sections.items():
                totals[direction][key] += value
    return replace(state, totals=totals)
