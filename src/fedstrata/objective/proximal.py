"""FedProx's proximal term."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.errors import ConfigError
from fedstrata.objective.base import OBJECTIVES, Objective


@OBJECTIVES.register
@dataclass(frozen=True)
class Proximal(Objective):
    """Keeps a client near its start.

        penalty = (μ/2) · Σ_tensors ‖w − start‖²

    over the client's trainable tensors; for LoRA these are the factors, not their product.

    Args:
        mu: μ, 0 or more; 0 leaves the term out.

    References:
        Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Section 3.2.
    """

    id: ClassVar[str] = "proximal"
    mu: float = 0.01

    def __post_init__(self) -> None:
        if not (math.isfinite(self.mu) and self.mu >= 0):
            raise ConfigError(
                "The proximal term cannot reward distance",
                where="mu",
                expected="a number of 0 or more",
                got=str(self.mu),
            )

    @property
    def is_plain(self) -> bool:
        """Whether μ = 0."""
        return self.mu == 0

    def penalty(self, trained: Mapping[str, Any], start: Mapping[str, Any]) -> Any:
        """The term, as a scalar of the kind that the tensors are."""
        total: Any = 0.0
        for name, tensor in trained.items():
            total = total + ((tensor - start[name]) ** 2).sum()
        return 0.5 * self.mu * total
