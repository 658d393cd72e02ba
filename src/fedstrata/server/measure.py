"""What was planned, trained, sent, waited and changed: the records of one round and the ledger."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedstrata.core.tensors import NamedTensors, Stratum
from fedstrata.core.wire import SectionBytes
from fedstrata.device.cost import RoundTime, count_flop_per_step, predict_client_seconds
from fedstrata.message import Reply, Task
from fedstrata.plan.base import ClientPlan, RoundPlan
from fedstrata.record.failure import ClientFailure, Reason
from fedstrata.server.setup import RoundSetup
from fedstrata.server.tasks import local_steps


@dataclass
class Traffic:
    """One client's part of a round, filled in as it happens."""

    plan: ClientPlan
    task: Task
    start: NamedTensors = field(default_factory=dict)
    slices: Mapping[Stratum, tuple[int, ...]] = field(default_factory=dict)
    down: SectionBytes = field(default_factory=SectionBytes)
    up: SectionBytes = field(default_factory=SectionBytes)
    reply: Reply | None = None
    failure: ClientFailure | None = None

    def refuse(self, reason: Reason, detail: str) -> None:
        """Turns the reply into a failure."""
        self.reply, self.failure = None, ClientFailure(self.task.client, self.task.server_round, reason, detail)


def local_flop(setup: RoundSetup, plan: ClientPlan) -> float:
    """Operations of one client's training, by the sizes of its plan alone."""
    tokens = int(setup.train["batch_size"]) * setup.max_length
    steps = local_steps(setup.train, setup.workers[plan.client].num_examples)
    return float(steps * count_flop_per_step(setup.shape, plan.ranks, tokens, adapter=setup.adapter))


def predicted(setup: RoundSetup, mine: Traffic) -> RoundTime:
    """Seconds that the client's device would need, by its profile."""
    member = setup.workers[mine.plan.client]
    steps = mine.reply.num_steps if mine.reply else local_steps(mine.task.train, member.num_examples)
    tokens = int(mine.task.train["batch_size"]) * setup.max_length
    return predict_client_seconds(
        member.device,
        setup.shape,
        mine.plan.ranks,
        tokens,
        steps,
        mine.down.total,
        mine.up.total,
        adapter=setup.adapter,
        skips_blocks=setup.method.skips_blocks,
    )


def client_record(setup: RoundSetup, mine: Traffic) -> dict[str, Any]:
    """The line of `clients.jsonl`."""
    reply, time = mine.reply, predicted(setup, mine)
    record: dict[str, Any] = {
        "server_round": mine.task.server_round,
        "client": mine.plan.client,
        "device": setup.workers[mine.plan.client].device.name,
        "status": "ok" if reply else "failed",
        "planned": mine.task.ranks,
        "reads": mine.task.reads,
        "trained": reply.trained if reply else [],
        "num_examples": reply.num_examples if reply else 0,
        "num_steps": reply.num_steps if reply else 0,
        "loss": reply.loss if reply else None,
        "bytes": {"downlink": mine.down.to_json(), "uplink": mine.up.to_json()},
        "predicted": {
            "download_s": time.download_s,
            "compute_s": time.compute_s,
            "forward_s": time.forward_s,
            "backward_s": time.backward_s,
            "upload_s": time.upload_s,
            "total_s": time.total_s,
        },
        "precision": reply.precision if reply else None,
        "numbers": reply.numbers if reply else {},
        "warnings": reply.warnings if reply else [],
        "failure": mine.failure.to_json() if mine.failure else None,
    }
    record["measured"] = {k: float(v) for k, v in reply.measured.items()} if reply else {}
    return record


def round_record(
    plan: RoundPlan,
    clients: Iterable[Mapping[str, Any]],
    merged: Mapping[str, Any],
    probes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The line of `rounds.jsonl`, without its metrics."""
    clients = list(clients)
    good = [c for c in clients if c["status"] == "ok"]
    steps = sum(c["num_steps"] for c in good)
    slowest = max((c["predicted"]["total_s"] for c in clients), default=0.0)
    waits = [slowest - c["predicted"]["total_s"] for c in clients]
    return {
        "server_round": plan.server_round,
        "cohort": [c["client"] for c in clients],
        "num_replies": len(good),
        "train_loss": sum(c["loss"] * c["num_steps"] for c in good) / steps if steps else None,
        "num_steps": steps,
        "metrics": {},
        "bytes": {d: _add_bytes(c["bytes"][d] for c in clients) for d in ("downlink", "uplink")},
        "predicted": {"round_s": slowest, "mean_wait_s": sum(waits) / len(waits) if waits else 0.0},
        "failures": [c["failure"] for c in clients if c["failure"]],
        "why": dict(plan.why),
        **merged,
        **({"probes": dict(probes)} if probes else {}),
    }


def add_totals(totals: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    """The ledger after this round."""
    none = {"total": 0, "header": 0, "side": 0, "values": 0}
    more = [record[key] for key in ("probes", "contest") if key in record]
    sent = {
        d: _add_bytes([totals.get(d, none), record["bytes"][d], *(m["bytes"][d] for m in more)])
        for d in ("downlink", "uplink")
    }
    failures = len(record["failures"]) + sum(len(m["failures"]) for m in more)
    return {
        **sent,
        "predicted_s": sum(
            (m["predicted_s"] for m in more), totals.get("predicted_s", 0.0) + record["predicted"]["round_s"]
        ),
        "num_client_failures": totals.get("num_client_failures", 0) + failures,
        "num_client_records": totals.get("num_client_records", 0) + len(record["cohort"]),
    }


def _add_bytes(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    parts = list(parts)
    return {key: sum(p[key] for p in parts) for key in ("total", "header", "side", "values")}
