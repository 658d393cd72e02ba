"""Scores a model on a set of examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from fedstrata.errors import DataError
from fedstrata.train.batches import Examples, collate, evaluation_batches, lengths_of
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.threads import torch_threads


@dataclass(frozen=True)
class EvalSums:
    """Sums over examples; they add over parts of a set.

    Attributes:
        num_examples: How many were scored.
        loss_sum: Sum of their cross-entropies, float64, in nats.
        num_correct: How many were predicted right.
    """

    num_examples: int
    loss_sum: float
    num_correct: int

    def metrics(self) -> dict[str, float | int]:
        """Means.

        Raises:
            DataError: If nothing was scored.
        """
        if self.num_examples == 0:
            raise DataError("There are no examples to evaluate")
        return {
            "accuracy": self.num_correct / self.num_examples,
            "loss": self.loss_sum / self.num_examples,
            "num_examples": self.num_examples,
        }


def evaluate(
    adapted: AdaptedModel, examples: Examples, indices: np.ndarray, *, batch_size: int = 32, threads: int = 1
) -> EvalSums:
    """Scores `indices`, a set: its order does not matter.

    Batches go by ascending length, so little is padding, and they are the same whoever asks; on one machine with
    equal threads the sums are bit-equal.

    Args:
        adapted: The model as it stands.
        examples: All encoded examples.
        indices: Which to score, `[n]`.
        batch_size: Examples per forward pass.
        threads: Torch threads.
    """
    indices = np.asarray(indices, np.int64)
    loss_sum, num_correct = 0.0, 0
    with torch_threads(threads), torch.inference_mode():
        for chosen in evaluation_batches(indices, lengths_of(examples, indices), batch_size):
            batch = collate(examples, chosen, adapted.pad_id)
            labels = batch.pop("labels")
            scores = adapted.logits(batch).double()
            loss_sum += float(functional.cross_entropy(scores, labels, reduction="sum"))
            num_correct += int((scores.argmax(dim=-1) == labels).sum())
    return EvalSums(len(indices), loss_sum, num_correct)
