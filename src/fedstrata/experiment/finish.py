"""The end of a run: adapters, the one reading of the test set, the summary (written last)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fedstrata.experiment.build import Built
from fedstrata.experiment.provenance import now
from fedstrata.experiment.scoring import client_metrics, server_metrics
from fedstrata.experiment.store import SCHEMA_VERSION, RunFolder
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.files import copy_folder, read_json, read_lines, write_json
from fedstrata.server.evaluate import evaluate_on_clients
from fedstrata.server.orders import Engine


def finish(
    folder: RunFolder, built: Built, state: ServerState, engine: Engine, reason: str, *, wall_s: float, first_round: int
) -> dict[str, Any]:
    """Completes the run folder.

    Args:
        folder: Where.
        built: The experiment.
        state: After the last round.
        engine: For models that live on clients.
        reason: Why the run ended: `count`, `target`, `patience` or `interrupted`.
        wall_s: Seconds of this process.
        first_round: The first round that this process ran.

    Returns:
        The summary.
    """
    built.save_adapter(folder.path / "last", state.tensors, state.base)
    kept = built.keep if state.best is not None else "last"
    if built.is_personal:
        test = client_metrics(evaluate_on_clients(built.setup, state, engine, "test", state.accepted).sums)
        _save_personal(folder, built, state)
    else:
        test = server_metrics(built.score_folder(folder.path / kept, "test"))
        copy_folder(folder.path / kept, folder.path / "adapter")
    record = read_json(folder.run_file)
    status = "success" if reason == "count" else "stopped early"
    rounds = read_lines(folder.path / "rounds.jsonl")
    earlier = sum(r["measured"]["wall_s"] for r in rounds if r["server_round"] < first_round)
    summary = {
        "schema_version": SCHEMA_VERSION,
        "name": built.spec.name,
        "status": status,
        "stop_reason": reason,
        "method": built.method_name,
        "seed": built.spec.run.seed,
        "num_rounds": state.server_round,
        "kept": kept,
        "kept_round": state.best["server_round"] if kept == "best" and state.best else state.server_round,
        "metrics": {"test": test, "base": _base(built), "validation": _validation(built, state)},
        "totals": {
            "uplink_bytes": state.totals["uplink"]["total"],
            "downlink_bytes": state.totals["downlink"]["total"],
            "predicted_s": state.totals["predicted_s"],
        },
        "base_bytes": built.setup.shape.base_bytes,
        "measured": {
            "train_s": sum(r["measured"]["train_s"] for r in rounds),
            "wall_s": earlier + wall_s,
        },
        "num_client_failures": state.totals["num_client_failures"],
        "num_test_reads": int(record["measured"].get("earlier_test_reads", 0)) + 1,
    }
    folder.write_run(
        record | {"status": status, "stop_reason": reason, "measured": record["measured"] | {"finished_at": now()}}
    )
    write_json(folder.summary_file, summary)
    return summary


def _base(built: Built) -> dict[str, float]:
    """The model before the first round: base weights and an untrained head."""
    return server_metrics(built.score(built.initial, "test"))


def _validation(built: Built, state: ServerState) -> dict[str, Any]:
    if not state.validation:
        return {"final": None, "last_k_mean": None, "best": None}
    last = state.validation[-built.spec.run.last_k :]
    means = {key: sum(v[key] for v in last) / len(last) for key in state.validation[-1] if key not in ("server_round",)}
    best = next(v for v in state.validation if state.best and v["server_round"] == state.best["server_round"])
    return {
        "final": dict(sorted(state.validation[-1].items())),
        "last_k_mean": means | {"num_rounds": len(last)},
        "best": dict(sorted(best.items())),
    }


def _save_personal(folder: RunFolder, built: Built, state: ServerState) -> None:
    """One adapter per client that ever trained."""
    target = folder.path / "adapter"
    if target.exists():
        shutil.rmtree(target)
    for client, accepted_round in sorted(state.accepted.items()):
        own = built.client_tensors(folder.path / "clients", client, accepted_round)
        built.save_adapter(target / Path(client).name, state.tensors | own, state.base)
