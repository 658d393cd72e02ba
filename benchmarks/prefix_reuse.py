"""How much faster training is when states below the lowest trained block are computed once per example.

MiniLM, LoRA on query and value maps, 64 texts of 64 tokens in batches of 16, one thread. Plain loop and reuse take
turns, several times; each turn sets the client and trains. Run: `python benchmarks/prefix_reuse.py`.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Stratum
from fedstrata.message import Task
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
from fedstrata.train.trainer import REUSE_MEMORY_BYTES, TorchTrainer

NUM_EXAMPLES, NUM_TOKENS, BATCH_SIZE, EPOCHS = 64, 64, 16, 3
RANK, NUM_BLOCKS = 8, 6
CLIENT = "client"


@dataclass
class Texts:
    """Random tokens, all texts of one length."""

    input_ids: list[np.ndarray]
    labels: np.ndarray
    token_type_ids: None = None
    pixel_values: None = None


@dataclass(frozen=True)
class Case:
    """What is compared with the plain loop."""

    name: str
    blocks: tuple[int, ...]
    epochs: int
    is_kept: bool
    limit: float
    wanted: float


CASES = (
    Case("last block, 3 local epochs", (5,), EPOCHS, False, 1.88, 1.6),
    Case("last block, reused across rounds", (5,), 1, True, 3.4, 2.8),
    Case("last two blocks, reused across rounds", (4, 5), 1, True, 1.93, 1.7),
    Case("last two blocks, 3 local epochs", (4, 5), EPOCHS, False, 0.0, 0.0),
    Case("head only, 3 local epochs", (), EPOCHS, False, 0.0, 0.0),
)


def make_trainer(threads: int) -> TorchTrainer:
    """A trainer of MiniLM with one client."""
    adapter = AdapterConfig(max_rank=RANK)
    labels = [str(i) for i in range(5)]
    loaded = load_model(ModelConfig(), adapter, label_names=labels, seed=0, base_dir=Path())
    adapted = AdaptedModel(loaded, adapter)
    ranks: dict[Stratum, int] = dict.fromkeys(range(NUM_BLOCKS), RANK)
    layout = global_layout(loaded.shape, "lora", ranks | {HEAD: 1})
    rng = np.random.default_rng(0)
    ids = [rng.integers(1000, 30000, NUM_TOKENS).astype(np.int32) for _ in range(NUM_EXAMPLES)]
    return TorchTrainer(
        adapted,
        layout,
        dict.fromkeys(layout.targets, 2.0),
        Texts(ids, np.arange(NUM_EXAMPLES) % 5),
        train_indices={CLIENT: np.arange(NUM_EXAMPLES)},
        validation_indices={},
        splits={},
        seed=0,
        threads=threads,
        eval_batch_size=32,
        reuse_memory_bytes=REUSE_MEMORY_BYTES,
    )


def seconds(trainer: TorchTrainer, case: Case, task: Task) -> float:
    """Of one client's training, from decoded tensors to trained ones."""
    layouts = task.layouts(trainer.server_layout)
    start = trainer.initial(layouts.present)
    if not case.is_kept:
        trainer.reuse.cache.clear()
    began = time.perf_counter()
    trainer.train(task, layouts, start)
    return time.perf_counter() - began


def main() -> None:
    """Measures and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    trainer = make_trainer(options.threads)
    print("| trained | plain, ms/step | reuse, ms/step | faster | wanted | limit by step times |")
    print("|---|---:|---:|---:|---:|---:|")
    for case in CASES:
        ranks = {str(b): RANK for b in case.blocks} | {HEAD: 1}
        reads = {str(b): RANK for b in range(NUM_BLOCKS) if b not in case.blocks}
        train = {"local_epochs": case.epochs, "batch_size": BATCH_SIZE}
        plain = Task("train", CLIENT, 1, seed=0, ranks=ranks, reads=reads, learning_rate=1e-3, train=train,
                     objective={"id": "task_loss"}, threads=options.threads)  # fmt: skip
        reuse = replace(plain, reuse="always")
        for task in (plain, reuse):
            seconds(trainer, case, task)  # the first one pays for pages, and fills what is kept
        times = [[seconds(trainer, case, task) for task in (plain, reuse)] for _ in range(options.repeats)]
        steps = case.epochs * -(-NUM_EXAMPLES // BATCH_SIZE)
        before, after = (1e3 * median(column) / steps for column in zip(*times, strict=True))
        ratio = median(a / b for a, b in times)
        wanted, limit = (f"{x:.2f}" if x else "" for x in (case.wanted, case.limit))
        print(f"| {case.name} | {before:.0f} | {after:.0f} | {ratio:.2f} | {wanted} | {limit} |")


if __name__ == "__main__":
    main()
