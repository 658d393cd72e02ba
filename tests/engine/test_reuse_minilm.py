"""Reuse on the real model, whose wide maps show differences that narrow ones hide."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, NamedTensors, Stratum
from fedstrata.message import Task
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
from fedstrata.train.trainer import TorchTrainer

pytestmark = pytest.mark.engine

NUM_BLOCKS, RANK, NUM_EXAMPLES = 6, 8, 20


@dataclass
class Texts:
    input_ids: list[np.ndarray]
    labels: np.ndarray
    token_type_ids: None = None
    pixel_values: None = None


class MiniLM:
    """A trainer with one client, and its start."""

    def __init__(self) -> None:
        config = AdapterConfig(max_rank=RANK)
        loaded = load_model(ModelConfig(), config, label_names=["a", "b", "c"], seed=0, base_dir=Path())
        ranks: dict[Stratum, int] = dict.fromkeys(range(NUM_BLOCKS), RANK)
        self.layout = global_layout(loaded.shape, "lora", ranks | {HEAD: 1})
        rng = np.random.default_rng(0)
        ids = [rng.integers(1000, 30000, rng.integers(4, 40)).astype(np.int32) for _ in range(NUM_EXAMPLES)]
        self.trainer = TorchTrainer(
            AdaptedModel(loaded, config),
            self.layout,
            dict.fromkeys(self.layout.targets, 2.0),
            Texts(ids, np.arange(NUM_EXAMPLES) % 3),
            train_indices={"c": np.arange(NUM_EXAMPLES)},
            validation_indices={},
            splits={},
            seed=0,
            threads=1,
            eval_batch_size=8,
        )
        first = self.trainer.initial(self.layout)
        self.start: NamedTensors = {n: v + rng.normal(0, 0.02, v.shape).astype(np.float32) for n, v in first.items()}

    def train(self, lowest: int, reuse: Any) -> Any:
        """Trains the blocks from `lowest` on and the head for two epochs."""
        blocks = [str(b) for b in range(NUM_BLOCKS)]
        task = Task(
            "train", "c", 1, seed=0, ranks=dict.fromkeys(blocks[lowest:], RANK) | {HEAD: 1},
            reads=dict.fromkeys(blocks[:lowest], RANK), learning_rate=5e-3,
            train={"local_epochs": 2, "batch_size": 8}, objective={"id": "task_loss"},
        )  # fmt: skip
        task = replace(task, reuse=reuse)
        return self.trainer.train(task, task.layouts(self.layout), self.start)


def difference(one: NamedTensors, other: NamedTensors) -> float:
    return max(float(np.abs(tensor - other[name]).max()) for name, tensor in one.items() if tensor.size)


def test_reuse_follows_the_plain_loop_and_is_bit_equal_to_itself() -> None:
    world, fresh = MiniLM(), MiniLM()
    for lowest in (5, 4, 2, NUM_BLOCKS):
        plain = world.train(lowest, "off")
        first, hit = world.train(lowest, "always"), world.train(lowest, "always")
        resumed = fresh.train(lowest, "always")
        assert first.numbers["reused_below"] == lowest
        assert difference(plain.tensors, world.start) > 1e-3
        assert difference(first.tensors, plain.tensors) <= 1e-5
        assert first.loss == pytest.approx(plain.loss, abs=1e-5)
        for other in (hit, resumed):
            assert other.loss == first.loss
            assert difference(other.tensors, first.tensors) == 0.0
