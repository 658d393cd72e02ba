"""Whose examples score the blocks, where a method asks for scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from fedstrata.data.proxy import ServerSource
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.method import Method
from fedstrata.plan.base import AskingPlanner
from fedstrata.record.checkpoint import ServerState
from fedstrata.server.probe import CLIENT_SOURCE
from fedstrata.train.trainer import TorchTrainer

DEFAULT_FRACTION = 0.1


def scoring_source(method: Method) -> str | None:
    """`client_heldout`, a source of the server's, or None where nobody is asked."""
    planner = method.planner
    if not isinstance(planner, AskingPlanner) or getattr(planner, "importance", "fisher") != "fisher":
        return None
    return str(getattr(planner, "source", CLIENT_SOURCE))


def server_source(method: Method) -> ServerSource | None:
    """The server's source, where the method asks for one."""
    source = scoring_source(method)
    return cast("ServerSource", source) if source in get_args(ServerSource) else None


def heldout_fraction(spec: ExperimentSpec, method: Method) -> float:
    """The share of every client's training examples that is kept from training.

    As set; else what the method leaves out in all of its arms, or 0.1 where clients score blocks.
    """
    if spec.data.client_proxy_fraction is not None:
        return spec.data.client_proxy_fraction
    return method.held_out or (DEFAULT_FRACTION if scoring_source(method) == CLIENT_SOURCE else 0.0)


def proxy_problems(spec: ExperimentSpec, method: Method) -> list[str]:
    """Keys of `[data]` that the method's scores contradict."""
    source = scoring_source(method)
    problems = []
    if spec.data.proxy_source is not None and source not in ("public", "other_domain"):
        problems.append("data.proxy_source is set, but the method scores no blocks with a file of the server's")
    if source == CLIENT_SOURCE and spec.data.client_proxy_fraction == 0:
        problems.append(
            "data.client_proxy_fraction = 0, but the method scores blocks with the clients' held-out examples"
        )
    return problems


class ServerProbe:
    """Answers a planner's probe with the server's own examples."""

    def __init__(self, trainer: TorchTrainer) -> None:
        self._trainer = trainer

    def __call__(self, state: ServerState, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """`{"sums": {block: number}, "count": examples}`."""
        self._trainer.stand_at(state.base)
        found = self._trainer.fisher_of_server(state.tensors, options)
        return {"sums": {str(b): x for b, x in found.sums.items()}, "count": found.count}
