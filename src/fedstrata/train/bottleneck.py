"""Small networks behind transformer blocks (FedAdapter): h ← h + U·gelu(D·h + b) at the output of a block."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional

from fedstrata.core.shape import BOTTLENECK_KINDS, ModelShape
from fedstrata.errors import ModelError
from fedstrata.train.strata import Blocks


@final
class Bottleneck:
    """The adapter of one block, hooked on once; what it holds changes with every client.

        h ← h + U·gelu(D·h + b),    D [w, h], b [w], U [h, w]

    with the exact gelu. U = 0 makes it the identity, whatever D and b are: an adapter that grows by columns of zeros in
    U, or appears with U = 0, preserves the function. A width of its own is what each client has; nothing is rebuilt.

    Args:
        block: Whose output is changed: a tensor, or a tuple or list that begins with one.
        dropout: On the input of D, as PEFT has it on the input of A; only while `dropout_module` is in training mode.

    References:
        FedAdapter (bottleneck adapters in the top blocks). The place, once behind each block, and the activation are
        ours.
    """

    def __init__(self, block: nn.Module, dropout: float) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._is_on = False
        self.dropout_module: nn.Module = (nn.Dropout(dropout) if dropout else nn.Identity()).eval()
        block.register_forward_hook(self._change)

    def put(self, tensors: Mapping[str, torch.Tensor], trained: Collection[str], *, is_on: bool) -> None:
        """Gives it a client's values.

        Args:
            tensors: D, b and U by kind; kept.
            trained: The kinds that get a gradient.
            is_on: Whether it changes the block's output; off for a block that is left out of the model.
        """
        self._parameters = {k: nn.Parameter(tensors[k], requires_grad=k in trained) for k in BOTTLENECK_KINDS}
        self._is_on = is_on

    def off(self) -> None:
        """Takes the values away: the block's output is its own again."""
        self._parameters, self._is_on = {}, False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the block's output alone for a while; the values stay."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before

    def parameter(self, kind: str) -> nn.Parameter:
        """The present D, b or U."""
        return self._parameters[kind]

    @property
    def trained(self) -> tuple[str, ...]:
        """The kinds that require a gradient."""
        return tuple(k for k, p in self._parameters.items() if p.requires_grad)

    def _change(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._is_on:
            return None  # the hook's word for "as it is"
        if isinstance(output, torch.Tensor):
            return self._apply(output)
        changed = (self._apply(output[0]), *output[1:])
        return changed if isinstance(output, tuple) else list(changed)

    def _apply(self, states: torch.Tensor) -> torch.Tensor:
        down, bias, up = (self._parameters[k] for k in BOTTLENECK_KINDS)
        inner = functional.gelu(functional.linear(self.dropout_module(states), down, bias))  # [batch, tokens, w]
        return states + functional.linear(inner, up)


def attach_bottlenecks(blocks: Blocks, shape: ModelShape, dropout: float) -> dict[str, Bottleneck]:
    """Hooks an adapter on every block, turned off, by the block's path.

    Raises:
        ModelError: If the paths that layouts use are not those of the model's blocks.
    """
    paths = [f"{blocks.path}.{i}" for i in range(len(blocks.modules))]
    if list(shape.block_paths) != paths:
        raise ModelError(
            "The blocks' places in the model are not the planned ones",
            where=shape.architecture,
            expected=", ".join(paths[:3]),
            got=", ".join(shape.block_paths[:3]),
            do="report this as a bug",
        )
    return {p: Bottleneck(b, dropout) for p, b in zip(paths, blocks.modules, strict=True)}
