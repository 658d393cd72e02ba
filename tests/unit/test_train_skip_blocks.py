"""Models without some of their blocks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional

from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors
from fedstrata.errors import PlanError
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
from fedstrata.train.skip import can_skip_blocks
from fedstrata.train.strata import find_blocks

NUM_BLOCKS = 4
ALL = {0: 2, 1: 4, 2: 3, 3: 1, HEAD: 1}
CONFIGS: dict[str, Any] = {
    "bert": lambda: tf.BertConfig(
        hidden_size=32, num_hidden_layers=NUM_BLOCKS, num_attention_heads=4, intermediate_size=48, vocab_size=300,
        initializer_range=0.1,
    ),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=32, n_layer=NUM_BLOCKS, n_head=4, n_inner=48, vocab_size=300, bos_token_id=1, eos_token_id=2,
        initializer_range=0.1,
    ),
    "llama": lambda: tf.LlamaConfig(
        hidden_size=32, num_hidden_layers=NUM_BLOCKS, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=300, initializer_range=0.1,
    ),
}  # fmt: skip
BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}
LABELS = torch.tensor([0, 2])


@dataclass
class Texts:
    input_ids: list[np.ndarray]
    labels: np.ndarray
    token_type_ids: None = None
    pixel_values: None = None


TEXTS = Texts([np.array([5 + i, 6, 7 + i], np.int32) for i in range(6)], np.arange(6) % 3)


def adapt(folder: Path, architecture: str = "bert", **adapter: Any) -> AdaptedModel:
    CONFIGS[architecture]().to_json_file(folder / f"{architecture}.json")
    config = AdapterConfig(**({"max_rank": 4, "targets": "all-linear"} | adapter))
    source = ModelConfig(source=f"config:{architecture}.json")
    return AdaptedModel(load_model(source, config, label_names=["a", "b", "c"], seed=0, base_dir=folder), config)


def layout_of(adapted: AdaptedModel, ranks: Any) -> Layout:
    return global_layout(adapted.shape, adapted.adapter.kind, ranks)


def draw(layout: Layout, seed: int = 0) -> NamedTensors:
    rng = np.random.default_rng(seed)
    return {s.name: rng.normal(0, 0.2, s.shape).astype(np.float32) for s in layout}


def put(adapted: AdaptedModel, ranks: Any, trained: Any, kept: Any = None) -> NamedTensors:
    layout, whole = layout_of(adapted, ranks), draw(layout_of(adapted, ALL))
    tensors = {s.name: np.ascontiguousarray(whole[s.name][tuple(map(slice, s.shape))]) for s in layout}
    scaling = dict.fromkeys(layout.targets, 1.5)
    adapted.set_client(tensors, layout, layout_of(adapted, trained), scaling, kept_blocks=kept)
    return tensors


def scores(adapted: AdaptedModel) -> torch.Tensor:
    with torch.inference_mode():
        return adapted.logits(BATCH)


def move(adapted: AdaptedModel, seed: int, count: int | None = None) -> NamedTensors:
    """Deltas [out, in] for the first targets."""
    rng = np.random.default_rng(seed)
    targets = adapted.shape.targets[:count]
    return {t.name: rng.normal(0, 0.1, (t.out_features, t.in_features)).astype(np.float32) for t in targets}


def weights(adapted: AdaptedModel) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in adapted.model.named_parameters() if "lora_" not in n}


# The base


def without_blocks(model: nn.Module, kept: set[int]) -> Any:
    """A copy of a model whose other blocks are taken out of their list."""
    reference: Any = copy.deepcopy(model)
    layers: Any = reference.get_submodule(find_blocks(reference).path)
    for i in reversed(range(NUM_BLOCKS)):
        if i not in kept:
            del layers[i]
    reference.config.num_hidden_layers = len(kept)
    return reference


@pytest.mark.parametrize("architecture", CONFIGS)
@pytest.mark.parametrize("kept", [{0, 2}, {3}, {1, 2, 3}, set()])
def test_left_out_blocks_equal_a_model_without_them(tmp_path: Path, architecture: str, kept: set[int]) -> None:
    adapted = adapt(tmp_path, architecture)
    put(adapted, ALL, ALL)
    reference = without_blocks(adapted.model, kept)
    ranks = {s: r for s, r in ALL.items() if s == HEAD or s in kept}
    put(adapted, ranks, ranks, kept)
    found, expected = adapted.logits(BATCH), reference(**BATCH, use_cache=False).logits
    assert torch.equal(found, expected)
    functional.cross_entropy(found, LABELS).backward()
    functional.cross_entropy(expected, LABELS).backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    mine = [p.grad for p in adapted.model.parameters() if p.grad is not None]
    assert len(mine) == len(gradients) == len(layout_of(adapted, ranks))
    assert all(any(torch.equal(a, b) for b in gradients.values()) for a in mine if a is not None)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_next_client_has_its_blocks_again(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    put(adapted, ALL, {})
    whole = scores(adapted)
    put(adapted, {1: 4}, {}, {1})
    first = scores(adapted)
    put(adapted, {0: 2, 1: 4}, {}, {0, 1})
    assert not torch.equal(scores(adapted), first)
    put(adapted, {1: 4}, {}, {1})
    assert torch.equal(scores(adapted), first)
    put(adapted, ALL, {})
    assert torch.equal(scores(adapted), whole)
    assert not any("forward" in vars(m) for m in adapted.model.modules())


def test_a_block_that_is_to_be_trained_cannot_be_left_out(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    with pytest.raises(PlanError, match="Block 2 is to be trained and left out"):
        put(adapted, {1: 4, 2: 3}, {1: 4, 2: 3}, {1})
    with pytest.raises(PlanError, match="no block 7"):
        put(adapted, {1: 4}, {1: 4}, {1, 7})


@pytest.mark.parametrize("architecture", CONFIGS)
def test_usual_models_can_do_without_blocks_and_are_left_as_they_were(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    put(adapted, ALL, ALL)
    before = scores(adapted)
    assert can_skip_blocks(adapted.model) is None
    assert torch.equal(scores(adapted), before)
    assert not any("forward" in vars(m) or m._forward_hooks for m in adapted.model.modules())


def test_picture_models_can_do_without_blocks() -> None:
    config = tf.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert can_skip_blocks(tf.ViTForImageClassification(config).eval()) is None


class Toy(nn.Module):
    """Three maps behind an embedding table; subclasses misbehave."""

    def __init__(self, widths: tuple[int, ...] = (4, 4, 4, 4)) -> None:
        super().__init__()
        self.table = nn.Embedding(10, widths[0])
        self.layers = nn.ModuleList(Layer(a, b) for a, b in itertools.pairwise(widths))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.run(self.table(input_ids))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Layer(nn.Module):
    """Gives a tuple, as older blocks do."""

    def __init__(self, n_in: int, n_out: int) -> None:
        super().__init__()
        self.map = nn.Linear(n_in, n_out)

    def forward(self, hidden_states: torch.Tensor, carried: Any = 0) -> tuple[torch.Tensor, Any, Any]:
        return (self.map(hidden_states + carried), hidden_states.mean(), None)


def twice(model: Toy, x: torch.Tensor) -> torch.Tensor:
    for layer in (*model.layers, model.layers[0]):
        x = layer(x)[0]
    return x


def touched(model: Toy, x: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        x = layer(x)[0] * 2
    return x


def carried(model: Toy, x: torch.Tensor) -> torch.Tensor:
    extra: Any = torch.zeros(())
    for layer in model.layers:
        x, more, _ = layer(x, extra)
        extra = extra + more
    return x


def left_behind(model: Toy, x: torch.Tensor) -> torch.Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, shelf["mean"] if i else 0)[0]
    return x


shelf: dict[str, torch.Tensor] = {}


class Leaving(Layer):
    """Puts something on a shelf that the next block reads, and that stays there."""

    def forward(self, hidden_states: torch.Tensor, carried: Any = 0) -> tuple[torch.Tensor, Any, Any]:
        shelf["mean"] = hidden_states.mean()
        return super().forward(hidden_states, carried)


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (None, None),
        (twice, "its blocks do not run once each in their order"),
        (touched, "something happens to the states between blocks 0 and 1"),
        (carried, "beside the states something else passes from block to block (TypeError)"),
        (left_behind, "beside the states something else passes from block to block: block 2 needs it"),
    ],
)
def test_models_whose_blocks_depend_on_each_other_cannot_do_without_them(
    run: Callable[[Toy, torch.Tensor], torch.Tensor] | None, problem: str | None
) -> None:
    model = Toy()
    if run is left_behind:
        model.layers = nn.ModuleList(Leaving(4, 4) for _ in range(3))
    if run is not None:
        model.run = lambda x: run(model, x)  # type: ignore[method-assign]
    assert can_skip_blocks(model) == problem


def test_blocks_of_other_widths_cannot_be_left_out() -> None:
    assert can_skip_blocks(Toy((4, 4, 6, 6))) == "block 1 changes the width of its states"


def test_a_plan_that_leaves_out_what_cannot_be_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapted = adapt(tmp_path)
    block: Any = find_blocks(adapted.model).modules[1]
    inner = block.forward
    monkeypatch.setitem(vars(block), "forward", lambda *a, **k: torch.nn.functional.pad(inner(*a, **k), (0, 0, 0, 1)))
    with pytest.raises(PlanError, match="cannot be left out"):
        put(adapted, {0: 2}, {0: 2}, {0})


# Law: what is frozen below costs nothing, and nothing is built anew


@pytest.mark.parametrize("architecture", CONFIGS)
def test_below_the_first_trained_block_no_graph_is_kept(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    seen: dict[int, bool] = {}
    for i, block in enumerate(find_blocks(adapted.model).modules):
        block.register_forward_hook(lambda m, a, out, i=i: seen.__setitem__(i, out.grad_fn is not None))
    put(adapted, ALL, {2: 3, HEAD: 1})
    adapted.logits(BATCH)
    assert seen == {0: False, 1: False, 2: True, 3: True}
    seen.clear()
    put(adapted, {0: 2, 2: 3, HEAD: 1}, {2: 3}, {0, 2})
    adapted.logits(BATCH)
    assert seen == {0: False, 1: False, 2: True, 3: True}
    put(adapted, ALL, {HEAD: 1})
    adapted.logits(BATCH)
    assert not any(seen.values())


def test_with_left_out_blocks_only_trained_ones_save_tensors(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    saved: list[int] = []

    def count(ranks: Any, trained: Any, kept: Any) -> int:
        put(adapted, ranks, trained, kept)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):  # type: ignore[func-returns-value]
            adapted.logits(BATCH)
        return len(saved)

    alone = count({3: 1}, {3: 1}, {3})
    assert alone > 0
    assert count({0: 2, 1: 4, 3: 1}, {3: 1}, {0, 1, 3}) == alone
    assert count({0: 2, 1: 4, 3: 1}, {0: 2, 1: 4, 3: 1}, {0, 1, 3}) > 2 * alone


def test_no_module_is_rebuilt_for_a_client(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    before = [(name, id(module)) for name, module in adapted.model.named_modules()]
    put(adapted, ALL, ALL)
    put(adapted, {1: 2, HEAD: 1}, {1: 2}, {1})
    adapted.logits(BATCH)
    adapted.move_base(move(adapted, 1))
    put(adapted, {0: 1, 3: 1}, {3: 1}, {0, 3})
    adapted.reset()
    assert [(name, id(module)) for name, module in adapted.model.named_modules()] == before


# The trainer
