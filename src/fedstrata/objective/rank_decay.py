"""HetLoRA's rank decay: the last rank slices are pushed towards zero, and dropped once they have shrunk."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from fedstrata.errors import ConfigError
from fedstrata.objective.base import OBJECTIVES, Finished, FinishingObjective


@OBJECTIVES.register
@dataclass(frozen=True)
class RankDecay(FinishingObjective):
    """A penalty on the tail of every pair, and self-pruning after training.

        tail = Σ_targets ‖B[:, m:]‖_F · ‖A[m:, :]‖_F,    m = ⌊γ·r⌋,    penalty = λ·tail

    with r the client's rank. After training a client whose tail fell below its (positive) value at the start of the
    round keeps rank max(m, r_min) from then on, if r > r_min: it sends the leading slices and says so as `kept_rank`.

    Args:
        gamma: γ, the share of slices that may stay, above 0 and below 1.
        weight: λ.
        min_rank: r_min, 1 or more: no client shrinks below it, however small γ is.

    References:
        Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models, EMNLP 2024,
        Section 3.2.
    """

    id: ClassVar[str] = "rank_decay"
    gamma: float = 0.99
    weight: float = 1e-3
    min_rank: int = 1

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.gamma < 1:
            problems.append(f"gamma = {self.gamma}: above 0 and below 1")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            problems.append(f"weight = {self.weight}: 0 or more")
        if self.min_rank < 1:
            problems.append(f"min_rank = {self.min_rank}: 1 or more")
        if problems:
            raise ConfigError('The objective "rank_decay" has wrong options', problems=problems)

    @property
    def is_plain(self) -> bool:
        """Whether λ = 0."""
        return self.weight == 0

    def penalty(self, trained: Mapping[str, Any], start: Mapping[str, Any]) -> Any:
        """λ·tail of the current factors; its gradient is 0 where a factor's tail is 0."""
        total: Any = 0.0
        for lora_A, lora_B in _pairs(trained):
            m = self._kept(len(lora_A))
            total = total + lora_B[:, m:].norm() * lora_A[m:].norm()
        return self.weight * total

    def finish(self, trained: Mapping[str, np.ndarray], start: Mapping[str, np.ndarray]) -> Finished:
        """Keeps max(m, r_min) slices where the tail shrank."""
        ranks = {len(lora_A) for lora_A, _ in _pairs(trained)}
        if not ranks:
            return Finished()
        rank = max(ranks)
        kept = max(self._kept(rank), self.min_rank)
        before, after = self._tail(start), self._tail(trained)
        shrinks = before > 0 and after < before and rank > self.min_rank
        numbers = {"kept_rank": float(kept if shrinks else rank), "tail_before": before, "tail_after": after}
        return Finished(kept if shrinks else None, numbers)

    def _kept(self, rank: int) -> int:
        """M = ⌊γ·r⌋; a product that is whole up to rounding is whole."""
        return math.floor(self.gamma * rank + 1e-9)

    def _tail(self, tensors: Mapping[str, np.ndarray]) -> float:
        total = 0.0
        for lora_A, lora_B in _pairs(tensors):
            m = self._kept(len(lora_A))
            tails = (np.linalg.norm(x.astype(np.float64)) for x in (lora_B[:, m:], lora_A[m:]))
            total += math.prod(map(float, tails))
        return total


def _pairs(tensors: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """A and B of every target whose both factors are trained."""
    targets = [n.removesuffix(".lora_A") for n in tensors if n.endswith(".lora_A")]
    return [(tensors[f"{t}.lora_A"], tensors[f"{t}.lora_B"]) for t in targets if f"{t}.lora_B" in tensors]
