"""A small run folder, made of records only, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from fedstrata.record.checkpoint import ServerState, save_checkpoint

DEPTH = {"laptop-16gb": 1.0, "jetson-nx": 0.5, "jetson-tx2": 0.2}


def write_run(
    folder: Path,
    *,
    num_rounds: int = 4,
    num_clients: int = 6,
    num_blocks: int = 3,
    cohort: int = 3,
    finished: bool = True,
    personal: bool = False,
    failed: tuple[tuple[int, str], ...] = (),
    seed: int = 0,
) -> Path:
    """Writes a run folder whose numbers fit together: ledger = sum of rounds = sum of clients.

    Client i owns device i mod 3, which trains the last blocks by `DEPTH`; a reply of d blocks has 100·(d + 1) bytes
    and its task twice as many. Validation accuracy in round r is 0.9 − 0.6/r, the test accuracy 0.85, the base's 0.25.
    """
    rng = np.random.default_rng(seed)
    ids = [f"client-{i:02d}" for i in range(num_clients)]
    device = {c: list(DEPTH)[i % 3] for i, c in enumerate(ids)}
    rounds, clients = [], []
    for r in range(1, num_rounds + 1):
        members = sorted(rng.choice(ids, min(cohort, num_clients), replace=False).tolist())
        lines = [_client(r, c, device[c], num_blocks, (r, c) in failed) for c in members]
        clients += lines
        rounds.append(_round(r, lines, personal))
    totals = {d: sum(r["bytes"][d]["total"] for r in rounds) for d in ("downlink", "uplink")}
    folder.mkdir(parents=True, exist_ok=True)
    status = "success" if finished else "started"
    run = _run_record(ids, device, num_rounds, num_blocks, personal) | {"status": status}
    _json(folder / "run.json", run)
    for name, lines in (("rounds", rounds), ("clients", clients)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tensors = {"a.lora_A": np.arange(6, dtype=np.float32).reshape(2, 3), "head.bias": np.ones(4, np.float32)}
    state = ServerState(tensors, num_rounds, {"0": 1}, accepted={"client-00": 1}, totals=totals)
    save_checkpoint(folder / "checkpoint" / "state.safetensors", state, "e" * 64)
    for name in ("best", "last", "adapter") if finished else ("best",):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "adapter_model.safetensors").write_bytes(save(tensors))
        _json(folder / name / "adapter_config.json", {"r": 2, "peft_type": "LORA"})
    if finished:
        _json(folder / "summary.json", _summary(rounds, totals, len(failed), personal))
    return folder


def _client(server_round: int, client: str, device: str, num_blocks: int, failed: bool) -> dict[str, Any]:
    depth = max(1, round(num_blocks * DEPTH[device]))
    trained = [str(b) for b in range(num_blocks - depth, num_blocks)] + ["head"]
    up = 0 if failed else 100 * (depth + 1)
    failure = {"client": client, "server_round": server_round, "reason": "exception", "detail": "out of memory"}
    return {
        "server_round": server_round,
        "client": client,
        "device": device,
        "status": "failed" if failed else "ok",
        "planned": {s: 1 if s == "head" else 4 for s in trained},
        "trained": [] if failed else trained,
        "num_steps": 0 if failed else 5,
        "loss": None if failed else 1.5 / server_round + 0.1,
        "bytes": {"downlink": _sections(200 * (depth + 1)), "uplink": _sections(up)},
        "failure": failure if failed else None,
        "measured": {"train_s": 0.5 * server_round},
    }


def _round(server_round: int, lines: list[dict[str, Any]], personal: bool) -> dict[str, Any]:
    good = [c for c in lines if c["status"] == "ok"]
    accuracy = 0.9 - 0.6 / server_round
    return {
        "server_round": server_round,
        "cohort": [c["client"] for c in lines],
        "num_replies": len(good),
        "train_loss": sum(c["loss"] for c in good) / len(good) if good else None,
        "metrics": {"validation": _metrics(accuracy, personal)},
        "bytes": {d: _sections(sum(c["bytes"][d]["total"] for c in lines)) for d in ("downlink", "uplink")},
        "failures": [c["failure"] for c in lines if c["failure"]],
        "measured": {"wall_s": 2.0},
    }


def _run_record(
    ids: list[str], device: dict[str, str], num_rounds: int, num_blocks: int, personal: bool
) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "name": "small",
        "status": "success",
        "stop_reason": None,
        "method": "local_only" if personal else "suffix_by_device",
        "seed": 0,
        "spec": {
            "name": "small",
            "adapter": {"kind": "lora", "head": "aggregate"},
            "rounds": {"count": num_rounds, "patience": None},
            "train": {"schedule": "constant"},
            "eval": {"metric": "accuracy"},
        },
        "parts": {"topology": "alone" if personal else "federated"},
        "model": {"source": "org/small-bert", "num_blocks": num_blocks},
        "base_bytes": 1_000_000,
        "labels": ["a", "b", "c", "d"],
        "clients": [{"client": c, "device": device[c], "num_examples": 20} for c in ids],
        "notes": ["3 of 100 texts were repeated and dropped"],
        "measured": {"command": ["fedstrata", "quickstart"], "started_at": "2025-01-01T00:00:00+00:00"},
    }


def _summary(rounds: list[dict[str, Any]], totals: dict[str, int], num_failures: int, personal: bool) -> dict[str, Any]:
    last = {"server_round": len(rounds), **rounds[-1]["metrics"]["validation"]}
    return {
        "schema_version": 1,
        "name": "small",
        "status": "success",
        "stop_reason": "count",
        "method": "local_only" if personal else "suffix_by_device",
        "seed": 0,
        "num_rounds": len(rounds),
        "kept": "last" if personal else "best",
        "kept_round": len(rounds),
        "metrics": {
            "test": _metrics(0.85, personal),
            "base": _metrics(0.25, False),
            "validation": {"final": last, "last_k_mean": last, "best": last},
        },
        "totals": {"uplink_bytes": totals["uplink"], "downlink_bytes": totals["downlink"], "predicted_s": 90.0},
        "base_bytes": 1_000_000,
        "measured": {"train_s": 10.0, "wall_s": 12.5},
        "num_client_failures": num_failures,
        "num_test_reads": 1,
    }


def _metrics(accuracy: float, personal: bool) -> dict[str, float]:
    more = {"client_mean_accuracy": accuracy - 0.01, "worst_clients_accuracy": accuracy - 0.2} if personal else {}
    return {"accuracy": accuracy, "loss": 1.0 - accuracy, **more}


def _sections(total: int) -> dict[str, int]:
    return {"total": total, "header": 0, "side": 0, "values": total}


def _json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def stored_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes run folders below the test's folder by name."""
    return lambda name="run", **options: write_run(tmp_path / name, **options)
