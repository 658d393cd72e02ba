"""How much each block matters: squared gradients of the log-likelihood, example by example."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedstrata.client import FisherSums
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout
from fedstrata.errors import ClientError, PlanError
from fedstrata.train.batches import Examples, collate, lengths_of
from fedstrata.train.lora import ADAPTER, AdaptedModel
from fedstrata.train.threads import torch_threads

TOKENS_PER_PASS = 512
"""Examples of one length go through the model together up to this many tokens; more is hardly faster."""
PICTURES_PER_PASS = 8

Norms = Iterator[tuple[int, float]]
"""Pairs of a block and a squared norm that counts for it."""


@dataclass(frozen=True)
class FisherOptions:
    """What a probe asks for.

    Attributes:
        source: Whose examples.
        fisher_on: Gradients of the adapter's tensors (`factors`; in full tuning the block's own weights), or of the
            whole weight of every target (`weight`).
        examples: Most examples; None: all.
        strata: Blocks to score.
    """

    source: str
    fisher_on: Literal["factors", "weight"]
    examples: int | None
    strata: tuple[int, ...]

    @classmethod
    def parse(cls, options: Mapping[str, Any], layout: Layout) -> FisherOptions:
        """The options of a probe, checked against the model.

        Raises:
            PlanError: If one is missing or makes no sense, or a block has nothing to score.
        """
        source, fisher_on = options.get("source"), options.get("fisher_on")
        examples, strata = options.get("examples"), options.get("strata")
        known = {s for s in layout.strata if isinstance(s, int)}
        fits = {
            "source": isinstance(source, str),
            "fisher_on": fisher_on in ("factors", "weight"),
            "examples": examples is None or (type(examples) is int and examples >= 1),
            "strata": isinstance(strata, list | tuple)
            and len(strata) > 0
            and all(type(s) is int and s in known for s in strata),
        }
        wrong = [name for name, is_good in fits.items() if not is_good]
        if wrong:
            raise PlanError(
                f"This question about blocks cannot be answered: {', '.join(wrong)}",
                where="Fisher scores",
                expected=f"source, fisher_on = factors or weight, examples ≥ 1 or none, blocks of {sorted(known)}",
                got=str({name: options.get(name) for name in wrong})[:200],
            )
        return cls(str(source), "weight" if fisher_on == "weight" else "factors", examples, tuple(sorted(strata or ())))


def choose_examples(indices: np.ndarray, count: int | None, seed: int, whose: str) -> np.ndarray:
    """The first `count` of a permutation from generator(seed, "fisher", whose), ascending; all if there are no more.

    The stream has no round, so that scores of two rounds differ by the model and not by the draw.
    """
    ordered = np.sort(np.asarray(indices, np.int64))
    if count is None or count >= len(ordered):
        return ordered
    return np.sort(generator(seed, "fisher", whose).permutation(ordered)[:count])


def fisher_sums(
    adapted: AdaptedModel,
    examples: Examples,
    indices: np.ndarray,
    *,
    trained: Layout,
    fisher_on: Literal["factors", "weight"],
    threads: int = 1,
) -> FisherSums:
    """Sums of the empirical Fisher information over examples, per block.

    For block l, with p the model in eval mode and (x_i, y_i) the examples:

        factors    S_l = Σ_i Σ_{θ of block l} ‖∇_θ log p(y_i | x_i)‖²      θ: the tensors of `trained`
        weight     S_l = Σ_i Σ_{W of block l} ‖∇_W log p(y_i | x_i)‖²_F    W: the block's targets, frozen or not

    The norms are those of every single example, never of a batch. The gradient of a linear map is Σ_t δ_t x_tᵀ over the
    tokens, with x its input and δ the gradient of its output: both are kept apart by example where several go through
    the model together. They are of one length, so that nothing is padded. Tensors of other kinds than LoRA factors
    take one backward pass per example. Gradients are float32, squares and sums float64. The model is left as it was:
    no gradient stays, no hook.

    Args:
        adapted: The model as `set_client` left it.
        examples: Encoded examples.
        indices: Which of them, each once, `[n]`.
        trained: What `set_client` made trainable; its blocks are scored.
        fisher_on: See above.
        threads: Torch threads.

    Returns:
        S_l by block, and n. Sums and counts of several sets add.

    Raises:
        ClientError: Without examples, or if a sum is not finite.

    References:
        Fed-HeLLo's FIM-HLA. Differs in: examples are counted, not batches; sums, so that clients' answers add;
        `weight` is ours: it does not depend on how the product is factored, nor on how long a block was trained.
    """
    if len(indices) == 0:
        raise ClientError("There is no example to score blocks with", where="Fisher scores")
    blocks = {s.name: s.stratum for s in trained if isinstance(s.stratum, int)}
    parts: dict[int, list[float]] = {b: [] for b in blocks.values()}
    maps = _maps(adapted, trained, set(parts), fisher_on)
    with torch_threads(threads), torch.enable_grad():
        for chosen in _passes(examples, np.asarray(indices, np.int64), single=maps is None):
            norms = (
                _tensor_norms(adapted, examples, chosen, blocks)
                if maps is None
                else _map_norms(adapted, examples, chosen, maps)
            )
            for block, norm in norms:
                parts[block].append(norm)
    if not all(math.isfinite(x) for found in parts.values() for x in found):
        raise ClientError(
            "The gradient of an example is not finite",
            where="Fisher scores",
            do="lower train.learning_rate, or look at this data",
        )
    return FisherSums({block: math.fsum(found) for block, found in parts.items()}, len(indices))


def outer_norms(gradients: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """‖Σ_t δ_t x_tᵀ‖²_F of each example in float64, the cheaper of two ways.

        Σ_{t,t'} (δ_t·δ_t')(x_t·x_t')    where T·(out + in) < out·in: no [out, in] matrix is formed
        ‖δᵀ x‖²_F                        otherwise

    Args:
        gradients: δ, `[batch, T, out]`.
        inputs: x, `[batch, T, in]`.

    Returns:
        `[batch]`.

    Example:
        >>> outer_norms(torch.tensor([[[1.0, 2.0]]]), torch.tensor([[[3.0]]])).tolist()  # (1² + 2²)·3²
        [45.0]
    """
    delta, x = gradients.double(), inputs.double()
    num_tokens, n_out, n_in = delta.shape[1], delta.shape[2], x.shape[2]
    if num_tokens * (n_out + n_in) < n_out * n_in:
        return ((delta @ delta.mT) * (x @ x.mT)).sum((1, 2))
    return (delta.mT @ x).square().sum((1, 2))


def _maps(
    adapted: AdaptedModel, trained: Layout, blocks: set[int], fisher_on: Literal["factors", "weight"]
) -> dict[str, int] | None:
    """The linear maps whose gradients count, and their blocks; None where other tensors than maps' weights count."""
    if fisher_on == "weight":
        return {t.name: t.block for t in adapted.shape.targets if t.block in blocks}
    factors = {f"{s.target}.{s.kind}.{ADAPTER}": s for s in trained if s.stratum in blocks}
    if any(s.kind not in ("lora_A", "lora_B") for s in factors.values()):
        return None
    return {path: s.stratum for path, s in factors.items() if isinstance(s.stratum, int)}


def _passes(examples: Examples, indices: np.ndarray, *, single: bool) -> Iterable[np.ndarray]:
    """Examples that go through the model together: of one length, in ascending order of length and index."""
    lengths = lengths_of(examples, indices)
    ordered = indices[np.lexsort((indices, lengths))]
    for length in np.unique(lengths):
        same = ordered[np.sort(lengths) == length]
        together = max(1, TOKENS_PER_PASS // int(length)) if length else PICTURES_PER_PASS
        size = 1 if single else together
        yield from (same[i : i + size] for i in range(0, len(same), size))


def _loss(adapted: AdaptedModel, examples: Examples, chosen: np.ndarray) -> torch.Tensor:
    """−Σ log p(label), so that every example's gradient is its own."""
    batch = collate(examples, chosen, adapted.pad_id)
    labels = batch.pop("labels")
    return functional.cross_entropy(adapted.logits(batch), labels, reduction="sum")


def _tensor_norms(adapted: AdaptedModel, examples: Examples, chosen: np.ndarray, blocks: Mapping[str, int]) -> Norms:
    """Norms of one example by autograd, whatever the tensors are."""
    parameters = {n: p for n, p in adapted.trained_parameters().items() if n in blocks}
    loss = _loss(adapted, examples, chosen)
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            yield blocks[name], float(gradient.double().square().sum())


def _map_norms(adapted: AdaptedModel, examples: Examples, chosen: np.ndarray, maps: Mapping[str, int]) -> Norms:
    """Norms of some examples at linear maps."""
    seen: list[tuple[str, torch.Tensor, torch.Tensor]] = []
    with _watching(adapted.model, maps, seen):
        loss = _loss(adapted, examples, chosen)
    outputs = [output for _, _, output in seen]
    if len(chosen) > 1 and any(o.dim() < 3 or len(o) != len(chosen) for o in outputs):
        for index in chosen:  # the model mixes the examples' tokens: each goes alone
            yield from _map_norms(adapted, examples, np.array([index]), maps)
        return
    calls: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for (path, x, _), gradient in zip(seen, torch.autograd.grad(loss, outputs, allow_unused=True), strict=True):
        if gradient is not None:
            calls.setdefault(path, []).append((_by_example(gradient, len(chosen)), _by_example(x, len(chosen))))
    for path, pairs in calls.items():
        delta, x = (torch.cat(side, 1) for side in zip(*pairs, strict=True))
        yield from ((maps[path], float(norm)) for norm in outer_norms(delta, x))


def _by_example(tensor: torch.Tensor, num_examples: int) -> torch.Tensor:
    """`[examples, tokens, features]`."""
    return tensor.reshape(num_examples, -1, tensor.shape[-1])


@contextmanager
def _watching(
    model: nn.Module, paths: Iterable[str], seen: list[tuple[str, torch.Tensor, torch.Tensor]]
) -> Iterator[None]:
    """Notes the input and the output of every call of some maps."""

    def note(path: str, module: nn.Module, args: Sequence[Any], output: torch.Tensor) -> None:
        seen.append((path, args[0].detach(), output))

    handles = [model.get_submodule(p).register_forward_hook(partial(note, p)) for p in paths]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
