"""Who would train what in one round, and what it would cost, without training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedstrata.core.tensors import Stratum
from fedstrata.core.wire import PRELUDE_BYTES, canonical_json
from fedstrata.device.cost import predict_client_seconds
from fedstrata.discovery import foreign_errors
from fedstrata.errors import ConfigError
from fedstrata.experiment.build import Built, build
from fedstrata.experiment.methods import build_method
from fedstrata.experiment.plugins import outside_places
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.watch import Watch
from fedstrata.message import Reply, header_of, rank_keys
from fedstrata.plan.base import ClientPlan, RoundPlan
from fedstrata.record.checkpoint import ServerState
from fedstrata.server.setup import RoundSetup
from fedstrata.server.tasks import local_steps, make_task, plan_round


def plan_table(spec: ExperimentSpec, base_dir: Path, server_round: int, watch: Watch) -> dict[str, Any]:
    """The plan of one round.

    Bytes are exact for codecs of fixed length, an upper bound otherwise; the JSON header of a reply is estimated. From
    round 2 on, every block counts as changed, so that the downlink is an upper bound.

    Returns:
        Per client: blocks, ranks, steps, bytes, predicted seconds; coverage per stratum; totals; what the server
        holds.
    """
    if server_round > spec.rounds.count:
        raise ConfigError(f"There is no round {server_round}", expected=f"1 to {spec.rounds.count}")
    with foreign_errors(outside_places(build_method(spec), spec)):
        return _table(build(spec, base_dir, watch), spec, server_round)


def _table(built: Built, spec: ExperimentSpec, server_round: int) -> dict[str, Any]:
    setup = built.setup
    versions = {str(s): server_round - 1 for s in setup.layout.strata}
    state = replace(built.initial, server_round=server_round - 1, versions=versions)
    plan, _ = plan_round(setup, state)
    clients = [_client_row(setup, state, p) for p in plan.clients]
    coverage: dict[Stratum, int] = {s: 0 for s in setup.layout.strata}
    for p in plan.clients:
        for s in p.strata:
            coverage[s] += 1
    return {
        "server_round": server_round,
        "method": built.method_name,
        "num_blocks": setup.shape.num_blocks,
        "max_rank": spec.adapter.max_rank if spec.adapter.kind == "lora" else 0,
        "clients": clients,
        "coverage": rank_keys(coverage),
        "totals": {
            "downlink_bytes": sum(c["downlink_bytes"] for c in clients),
            "uplink_bytes": sum(c["uplink_bytes"] for c in clients),
            "round_s": max(c["predicted_s"] for c in clients),
        },
        "base_bytes": setup.shape.base_bytes,
        "server": _server_memory(setup, state, plan),
        "notes": built.info["notes"],
    }


def _server_memory(setup: RoundSetup, state: ServerState, plan: RoundPlan) -> dict[str, Any]:
    """What the server holds while replies come in: a sum, or all of what they bring, decoded to float32."""
    aggregator = setup.method.aggregator
    sent = [make_task(setup, state, p).layouts(setup.layout).up.num_values for p in plan.clients]
    collects = aggregator.needs == "all updates"
    return {"aggregator": aggregator.id, "needs": aggregator.needs, "update_bytes": 4 * sum(sent) if collects else 0}


def _client_row(setup: RoundSetup, state: ServerState, plan: ClientPlan) -> dict[str, Any]:
    task = make_task(setup, state, plan)
    layouts = task.layouts(setup.layout)
    member = setup.workers[plan.client]
    steps = local_steps(task.train, member.num_examples)
    reply = Reply(plan.client, task.server_round, member.num_examples, steps, 1.0 / 3, ranks=task.ranks)
    down = PRELUDE_BYTES + len(canonical_json(header_of(task))) + sum(setup.downlink.max_bytes(layouts.down))
    up = PRELUDE_BYTES + len(canonical_json(header_of(reply))) + sum(setup.method.codec.max_bytes(layouts.up))
    tokens = int(task.train["batch_size"]) * setup.max_length
    time = predict_client_seconds(
        member.device,
        setup.shape,
        plan.ranks,
        tokens,
        steps,
        down,
        up,
        adapter=setup.adapter,
        skips_blocks=setup.method.skips_blocks,
    )
    return {
        "client": plan.client,
        "device": member.device.name,
        "num_examples": member.num_examples,
        "blocks": list(plan.blocks),
        "ranks": task.ranks,
        "steps": steps,
        "downlink_bytes": down,
        "uplink_bytes": up,
        "fixed_length": setup.method.codec.fixed_length and setup.downlink.fixed_length,
        "predicted_s": time.total_s,
    }
