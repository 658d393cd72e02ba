"""A long run over many registered clients, and many runs in one process. Run: `python benchmarks/long_and_large.py`.

10,000 clients with examples of their own, 100 of them a round, 500 rounds of a one-block model: start-up, seconds and
resident memory over the rounds, which must not grow. Then 100 short runs in one process. `--rounds`, `--clients` and
`--runs` make it smaller.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

import fedstrata as fs
from fedstrata.experiment.build import Built
from fedstrata.experiment.load import load_spec
from fedstrata.experiment.runner import RunOptions, run_experiment
from fedstrata.experiment.watch import SilentWatch
from fedstrata.record.checkpoint import ServerState

MODEL = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def rss_mb() -> float:
    """Resident memory of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


class Meter(SilentWatch):
    """Notes when rounds begin and end, and the memory after each."""

    def __init__(self) -> None:
        self.began = self.last = time.perf_counter()
        self.start_up_s = 0.0
        self.round_s: list[float] = []
        self.rss_mb: list[float] = []

    def start(self, built: Built, state: ServerState) -> None:
        """Rounds begin."""
        self.last = time.perf_counter()
        self.start_up_s = self.last - self.began

    def round_done(self, record: Mapping[str, Any]) -> None:
        """Notes one round."""
        self.round_s.append(time.perf_counter() - self.last)
        self.rss_mb.append(rss_mb())
        self.last = time.perf_counter()


def experiment(folder: Path, num_clients: int, rounds: int, per_round: int) -> dict[str, Any]:
    """A tiny model and four short texts for each client."""
    (folder / "model.json").write_text(json.dumps(MODEL))
    words = ("red", "blue", "iron", "zinc", "dog", "cat")
    lines = [
        json.dumps({"text": f"{words[(i + k) % 6]} {i} {k}", "label": words[(i + k) % 6], "client": f"c{i:05d}"})
        for i in range(num_clients)
        for k in range(6)
    ]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return {
        "name": "large",
        "model": {"source": f"config:{folder / 'model.json'}", "max_length": 12},
        "data": {
            "source": str(folder / "data.jsonl"),
            "columns": {"client": "client"},
            "test_fraction": 0.02,
            "validation_fraction": 0.02,
        },
        "adapter": {"max_rank": 2, "alpha": 4},
        "method": {"name": "fedavg"},
        "rounds": {"count": rounds, "clients_per_round": per_round},
        "train": {"local_steps": 1, "batch_size": 4, "learning_rate": 0.01},
        "simulation": {"devices": {"laptop-16gb": num_clients}, "partition": {"kind": "natural"}},
    }


def long_run(num_clients: int, rounds: int, per_round: int) -> None:
    """One run; prints start-up, and seconds and memory by tenth."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = experiment(folder, num_clients, rounds, per_round)
        meter = Meter()
        spec, base = load_spec(values, {})
        run_experiment(spec, base, RunOptions(folder / "run"), meter)
        size_mb = sum(f.stat().st_size for f in (folder / "run").rglob("*") if f.is_file()) / 1e6
    print(f"{num_clients:,} clients, {per_round} a round, {rounds} rounds: start-up {meter.start_up_s:.1f} s")
    print("\n| after round | ms a client-round | resident MB |\n|---:|---:|---:|")
    tenth = max(1, rounds // 10)
    for end in range(tenth, rounds + 1, tenth):
        ms = 1000 * statistics.median(meter.round_s[end - tenth : end]) / per_round
        print(f"| {end} | {ms:.1f} | {meter.rss_mb[end - 1]:.0f} |")
    base_mb = meter.rss_mb[min(49, rounds - 1)]
    print(f"\nMemory from round 50 on: {100 * (max(meter.rss_mb[49:] or [base_mb]) / base_mb - 1):+.1f} %")
    print(f"Run folder: {size_mb:.0f} MB")


def many_runs(num_runs: int) -> None:
    """Short runs one after the other; prints the memory after some of them."""
    seen = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        values = experiment(folder, 6, 2, 3)
        for i in range(num_runs):
            fs.run(values, out=folder / f"run{i}", quiet=True, seed=i)
            seen.append(rss_mb())
    tenth = max(1, num_runs // 10)
    print(
        f"\nResident MB over {num_runs} runs in one process: " + ", ".join(f"{m:.0f}" for m in seen[tenth - 1 :: tenth])
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--per-round", type=int, default=100)
    parser.add_argument("--runs", type=int, default=100)
    options = parser.parse_args()
    if options.rounds:
        long_run(options.clients, options.rounds, options.per_round)
    if options.runs:
        many_runs(options.runs)


if __name__ == "__main__":
    main()
