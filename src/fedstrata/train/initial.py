"""First values of parameters from named streams, whatever torch's own random state is."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from torch import nn

from fedstrata.core.rng import generator

DEFAULT_RANGE = 0.02


def initialize(model: nn.Module, names: Collection[str], seed: int, stream: str) -> None:
    """Fills parameters the way transformers' models do.

    Weights ~ N(0, initializer_range²) from `generator(seed, stream, name)`, biases 0, norm weights 1; the padding row
    of an embedding table is 0.

    Args:
        model: Changed in place.
        names: Which of its parameters.
        seed: The run's seed.
        stream: `base_init` or `head_init`.
    """
    std = float(getattr(getattr(model, "config", None), "initializer_range", None) or DEFAULT_RANGE)
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if name in names:
            path, _, local = name.rpartition(".")
            rng = generator(seed, stream, name)
            values = _first_values(owners[path], local, tuple(parameter.shape), std, rng)
            with torch.no_grad():
                parameter.copy_(torch.from_numpy(values))


def _first_values(
    owner: nn.Module, local: str, shape: tuple[int, ...], std: float, rng: np.random.Generator
) -> np.ndarray:
    if local.endswith("bias"):
        return np.zeros(shape, np.float32)
    if type(owner).__name__.endswith("Norm"):
        return np.ones(shape, np.float32)
    values = rng.standard_normal(shape, dtype=np.float32) * np.float32(std)
    if isinstance(owner, nn.Embedding) and owner.padding_idx is not None:
        values[owner.padding_idx] = 0
    return values
