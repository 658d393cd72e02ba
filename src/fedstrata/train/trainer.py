"""The real trainer: one model, all data of this process, any client's task."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import psutil

from fedstrata.client import LocalWork, Score
from fedstrata.core.lora import init_lora
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.errors import ClientError
from fedstrata.message import Task, TaskLayouts
from fedstrata.objective.base import OBJECTIVES
from fedstrata.train.batches import Examples
from fedstrata.train.config import TrainConfig
from fedstrata.train.evaluate import evaluate
from fedstrata.train.local import train_locally
from fedstrata.train.lora import AdaptedModel


class TorchTrainer:
    """Trains and evaluates with torch; clients share the base model and take turns.

    Args:
        adapted: The model.
        layout: The server's tensors.
        scaling: LoRA scaling per target.
        examples: All encoded examples that this process may see.
        train_indices: Training examples by client.
        validation_indices: Validation examples by client.
        splits: Examples of `server_validation` and `test`.
        seed: The run's seed.
        threads: CPU threads for evaluations that no task asks for.
        eval_batch_size: Examples per forward pass of an evaluation.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        layout: Layout,
        scaling: Mapping[str, float],
        examples: Examples,
        *,
        train_indices: Mapping[str, np.ndarray],
        validation_indices: Mapping[str, np.ndarray],
        splits: Mapping[str, np.ndarray],
        seed: int,
        threads: int,
        eval_batch_size: int,
    ) -> None:
        self.adapted, self.scaling, self.examples = adapted, scaling, examples
        self._layout = layout
        self._train, self._validation, self._splits = train_indices, validation_indices, splits
        self._seed, self._threads, self._eval_batch = seed, threads, eval_batch_size

    @property
    def server_layout(self) -> Layout:
        """Layout of the server's tensors."""
        return self._layout

    def initial(self, layout: Layout) -> NamedTensors:
        """First values: LoRA pairs and fresh heads from named streams, other weights from the checkpoint."""
        first = init_lora(self._seed, layout) | self.adapted.base_tensors(layout)
        return {name: first[name] for name in layout.names}

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        """One client's training in one round."""
        if task.client not in self._train:
            raise ClientError(f"There is no data of client {task.client} here")
        self.adapted.set_client(start, layouts.present, layouts.trained, self._scaling_of(layouts.present))
        result = train_locally(
            self.adapted,
            self.examples,
            self._train[task.client],
            config=TrainConfig.model_validate(task.train),
            learning_rate=task.learning_rate,
            objective=OBJECTIVES.build(task.objective),
            start=start,
            seed_path=(task.seed, task.server_round, task.client),
            threads=task.threads,
        )
        return LocalWork(
            tensors=self.adapted.read(layouts.present),
            num_examples=result.num_examples,
            num_steps=result.num_steps,
            loss=result.mean_loss,
            numbers={"last_loss": result.last_loss, "num_tokens": float(result.num_tokens)},
            measured={"train_s": result.train_s, "rss_bytes": float(psutil.Process().memory_info().rss)},
        )

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        """Evaluates what a task describes on the split that it names."""
        own = task.split == "client_validation"
        indices = self._validation.get(task.client) if own else self._splits.get(task.split)
        if indices is None:
            raise ClientError(f"Client {task.client} has no examples of {task.split}")
        return self._score(layouts.present, tensors, indices, task.threads)

    def score(self, tensors: NamedTensors, split: str) -> Score:
        """Evaluates the server's model on a split of the server's."""
        return self._score(self._layout, tensors, self.indices_of(split), self._threads)

    def indices_of(self, split: str) -> np.ndarray:
        """Which examples `server_validation` or `test` holds."""
        return self._splits[split]

    def _score(self, layout: Layout, tensors: NamedTensors, indices: np.ndarray, threads: int) -> Score:
        self.adapted.set_client(tensors, layout, Layout(()), self._scaling_of(layout))
        sums = evaluate(self.adapted, self.examples, indices, batch_size=self._eval_batch, threads=threads)
        return Score(sums.num_examples, sums.loss_sum, sums.num_correct)

    def _scaling_of(self, layout: Layout) -> dict[str, float]:
        return {t: self.scaling[t] for t in layout.targets}
