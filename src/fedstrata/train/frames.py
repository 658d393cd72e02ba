"""A small trained matrix between the frozen factors of a map (Fed-SB), and the gradients that frames can follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedstrata.core.linalg import LowRank, fix_signs, single_thread, truncated_svd
from fedstrata.core.shape import TargetShape
from fedstrata.errors import ClientError, ModelError
from fedstrata.train.batches import Examples, collate, evaluation_batches, lengths_of
from fedstrata.train.threads import torch_threads

if TYPE_CHECKING:
    from fedstrata.train.lora import AdaptedModel

VALUES_AT_ONCE = 1 << 26
"""Numbers of inputs and output gradients that a sketch keeps at once (256 MiB): more maps take another pass."""
PICTURE_TOKENS = 256


@final
class SquareMap:
    """R between A and B of one PEFT layer: the layer adds s·B·R·A·x.

    PEFT computes s·B(A(x)); a hook behind A, put on once, multiplies by R. Without an R the layer is plain LoRA.

    Args:
        layer: A PEFT LoRA layer.
        adapter: Name of its pair.
    """

    def __init__(self, layer: Any, adapter: str) -> None:
        self.R: nn.Parameter | None = None
        layer.lora_A[adapter].register_forward_hook(self._between)

    def put(self, square: torch.Tensor, *, is_trained: bool) -> None:
        """Sets R [r, r]; kept."""
        self.R = nn.Parameter(square, requires_grad=is_trained)

    def off(self) -> None:
        """Takes R away."""
        self.R = None

    def parameter(self) -> nn.Parameter:
        """The present R.

        Raises:
            ModelError: Without one.
        """
        if self.R is None:
            raise ModelError("This map has no R", do="report this as a bug")
        return self.R

    def _between(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output if self.R is None else functional.linear(output, self.R)  # [batch, tokens, r]


def gradient_sketch(
    adapted: AdaptedModel,
    examples: Examples,
    indices: np.ndarray,
    ranks: Mapping[str, int],
    *,
    batch_size: int = 32,
    threads: int = 1,
) -> dict[str, LowRank]:
    """The best rank-r factors of the mean loss's gradient at every map.

        G = (1/n) Σ_i ∂ℓ_i/∂W = (1/n) Σ_t δ_t·x_tᵀ ≈ U_r·S_r·V_rᵀ

    with x_t the map's input and δ_t the gradient of its output at token t. Inputs and gradients are kept, never more
    than `VALUES_AT_ONCE` numbers; maps beyond that take another pass over the examples. An [out, in] matrix is formed
    for one map at a time, and only where there are more tokens than that. The model is left as it was: no hook, no
    gradient; nothing needs to be trainable.

    Args:
        adapted: The model as `set_client` left it.
        examples: Encoded examples.
        indices: Which of them, each once, `[n]`; their order does not matter.
        ranks: r by target; targets without one are left out.
        batch_size: Examples per pass.
        threads: Torch threads.

    Returns:
        By target, left = U_r·S_r [out, r] and right = V_rᵀ [r, in], float64, in module order; r is cut to the map's
        smaller side, and directions that the gradient does not have are 0 in both.

    Raises:
        ClientError: Without examples, or if a gradient is not finite.
        ModelError: If there is no such target.
    """
    indices = np.asarray(indices, np.int64)
    if len(indices) == 0:
        raise ClientError("There is no example to take gradients of", where="gradient sketch")
    targets = [t for t in adapted.shape.targets if ranks.get(t.name, 0) > 0]
    unknown = sorted(ranks.keys() - {t.name for t in adapted.shape.targets})
    if unknown:
        raise ModelError(f"{unknown[0]} is no map that carries an adapter", where="gradient sketch")
    lengths = lengths_of(examples, indices)
    num_tokens = int(np.where(lengths > 0, lengths, PICTURE_TOKENS).sum())
    batches = list(evaluation_batches(indices, lengths, batch_size))
    found: dict[str, LowRank] = {}
    with torch_threads(threads), torch.enable_grad():
        for group in _groups(targets, num_tokens):
            rows = _token_rows(adapted, examples, batches, [t.name for t in group])
            for t in group:
                found[t.name] = _sketch(t, rows.pop(t.name), ranks[t.name], len(indices))
    return found


Rows = list[tuple[np.ndarray, np.ndarray]]
"""Output gradients δ [N, out] and inputs x [N, in] of some tokens, float32."""


def _groups(targets: Sequence[TargetShape], num_tokens: int) -> Iterator[list[TargetShape]]:
    """Maps that go through one pass over the examples together: at least one, as many as fit."""
    group: list[TargetShape] = []
    size = 0
    for t in targets:
        own = num_tokens * (t.in_features + t.out_features)
        if group and size + own > VALUES_AT_ONCE:
            yield group
            group, size = [], 0
        group.append(t)
        size += own
    if group:
        yield group


def _token_rows(
    adapted: AdaptedModel, examples: Examples, batches: Sequence[np.ndarray], names: Sequence[str]
) -> dict[str, Rows]:
    """δ and x of every token at some maps, without the tokens whose gradient is 0."""
    rows: dict[str, Rows] = {name: [] for name in names}
    for chosen in batches:
        batch = collate(examples, chosen, adapted.pad_id)
        labels = batch.pop("labels")
        with _probes(adapted.model, names) as seen:
            loss = functional.cross_entropy(adapted.logits(batch), labels, reduction="sum")
        gradients = torch.autograd.grad(loss, [probe for _, _, probe in seen], allow_unused=True)
        for (name, x, _), gradient in zip(seen, gradients, strict=True):
            if gradient is not None:
                delta = gradient.reshape(-1, gradient.shape[-1])
                counts = delta.abs().amax(1) != 0  # also where it is NaN
                rows[name].append((delta[counts].numpy(), x.reshape(-1, x.shape[-1])[counts].numpy()))
    return rows


@contextmanager
def _probes(model: nn.Module, names: Sequence[str]) -> Iterator[list[tuple[str, torch.Tensor, torch.Tensor]]]:
    """Adds a zero to the output of some maps: the loss's gradient with respect to it is that of the output.

    Yields:
        A list that fills with (target, input, zero), one per call of a map.
    """
    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def probe(name: str, module: nn.Module, args: Sequence[Any], output: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros_like(output, requires_grad=True)
        seen.append((name, args[0].detach(), zero))
        return output + zero

    handles = [model.get_submodule(name).register_forward_hook(partial(probe, name)) for name in names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _sketch(target: TargetShape, rows: Rows, rank: int, num_examples: int) -> LowRank:
    n_out, n_in = target.out_features, target.in_features
    delta = np.concatenate([np.zeros((0, n_out)), *(d for d, _ in rows)], dtype=np.float64) / num_examples
    x = np.concatenate([np.zeros((0, n_in)), *(x for _, x in rows)], dtype=np.float64)
    if not (np.isfinite(delta).all() and np.isfinite(x).all()):
        raise ClientError(
            f"The gradient of {target.name} is not finite",
            where="gradient sketch",
            do="lower train.learning_rate, or look at this client's data",
        )
    if len(x) < min(n_out, n_in):
        svd = truncated_svd(LowRank(delta.T, x), rank)
        left, right = svd.u * svd.s, svd.vt
    else:
        with single_thread():
            u, s, vt = np.linalg.svd(delta.T @ x, full_matrices=False)
        left, right = fix_signs(u[:, :rank], vt[:rank])
        left = left * s[:rank]
    lacking = min(rank, n_out, n_in) - len(right)
    return LowRank(np.pad(left, ((0, 0), (0, lacking))), np.pad(right, ((0, lacking), (0, 0))))
