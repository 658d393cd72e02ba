"""Bottleneck adapters behind blocks: identity at the start, exact gradients, slices, what is on and what is off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn
from torch.nn import functional

from fedstrata.core.lora import init_lora
from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, slice_tensors
from fedstrata.errors import ModelError, PlanError
from fedstrata.train.bottleneck import Bottleneck, attach_bottlenecks
from fedstrata.train.config import AdapterConfig, ModelConfig, TrainConfig
from fedstrata.train.local import train_locally
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
from fedstrata.train.strata import find_blocks

NUM_BLOCKS = 3
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": NUM_BLOCKS, "num_attention_heads": 4}
COMMON: dict[str, Any] = {"vocab_size": 300, "initializer_range": 0.1}
CONFIGS: dict[str, Any] = {
    "bert": lambda: tf.BertConfig(**SIZES, intermediate_size=48, **COMMON),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=32, n_layer=NUM_BLOCKS, n_head=4, n_inner=48, bos_token_id=1, eos_token_id=2, **COMMON
    ),
    "llama": lambda: tf.LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=48, **COMMON),
}
BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}
LABELS = torch.tensor([0, 2])
WIDTHS: Any = {0: 2, 1: 4, 2: 3, HEAD: 1}


@dataclass
class Texts:
    input_ids: list[np.ndarray]
    labels: np.ndarray
    token_type_ids: None = None
    pixel_values: None = None


TEXTS = Texts([np.arange(5 + i, 8 + i + i % 3, dtype=np.int32) for i in range(9)], np.arange(9) % 3)


class Plain:
    is_plain = True


def load(folder: Path, architecture: str, adapter: AdapterConfig) -> Any:
    CONFIGS[architecture]().to_json_file(folder / f"{architecture}.json")
    source = ModelConfig(source=f"config:{architecture}.json")
    return load_model(source, adapter, label_names=["a", "b", "c"], seed=0, base_dir=folder)


def adapt(folder: Path, architecture: str = "bert", **options: Any) -> AdaptedModel:
    config = AdapterConfig(**({"kind": "bottleneck", "max_rank": 4} | options))
    return AdaptedModel(load(folder, architecture, config), config)


def layout_of(adapted: AdaptedModel, widths: Any) -> Layout:
    return global_layout(adapted.shape, "bottleneck", widths)


def draw(layout: Layout) -> NamedTensors:
    rng = np.random.default_rng(0)
    return {s.name: rng.normal(0, 0.3, s.shape).astype(np.float32) for s in layout}


def put(adapted: AdaptedModel, widths: Any, trained: Any, kept: Any = None) -> NamedTensors:
    layout = layout_of(adapted, widths)
    tensors = draw(layout)
    adapted.set_client(tensors, layout, layout_of(adapted, trained), {}, kept_blocks=kept)
    return tensors


def scores(adapted: AdaptedModel) -> torch.Tensor:
    with torch.inference_mode():
        return adapted.logits(BATCH)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    return list(find_blocks(model).modules)


@contextmanager
def by_hand(model: nn.Module, path: str, leaves: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """h + U gelu(D h + b) written into the blocks' own forward, with gelu(x) = x·(1 + erf(x/√2))/2."""

    def forward(index: int, plain: Any, *args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        if f"{path}.{index}.adapter_down" not in leaves:
            return output
        down, bias, up = (leaves[f"{path}.{index}.adapter_{k}"] for k in ("down", "bias", "up"))
        h = output[0] if isinstance(output, tuple) else output
        x = h @ down.T + bias
        h = h + (x * (1 + torch.erf(x / 2**0.5)) / 2) @ up.T
        return (h, *output[1:]) if isinstance(output, tuple) else h

    blocks = blocks_of(model)
    for i, block in enumerate(blocks):
        block.forward = partial(forward, i, block.forward)  # type: ignore[method-assign]
    yield
    for block in blocks:
        del block.__dict__["forward"]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_gradients_equal_autograd_of_adapters_written_by_hand(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    tensors = put(adapted, WIDTHS, WIDTHS)
    loss = functional.cross_entropy(adapted.logits(BATCH), LABELS)
    parameters = adapted.trained_parameters()
    found = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    plain = load(tmp_path, architecture, AdapterConfig()).model
    leaves = {n: torch.from_numpy(t).requires_grad_() for n, t in tensors.items() if "adapter_" in n}
    with torch.no_grad():
        for name in set(tensors) - set(leaves):
            plain.get_parameter(name).copy_(torch.from_numpy(tensors[name]))
    with by_hand(plain, adapted.shape.block_paths[0].rpartition(".")[0], leaves):
        expected_loss = functional.cross_entropy(plain(**BATCH).logits, LABELS)
        expected = torch.autograd.grad(expected_loss, list(leaves.values()))
    assert torch.allclose(loss, expected_loss, atol=1e-5)
    assert len(leaves) == 3 * NUM_BLOCKS
    for name, gradient in zip(leaves, expected, strict=True):
        assert float(gradient.abs().max()) > 1e-6
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_model_starts_as_its_base_and_goes_back_to_it(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    base, layout = scores(adapted), layout_of(adapted, WIDTHS)
    adapted.set_client(init_lora(0, layout) | adapted.base_tensors(layout), layout, layout, {})
    assert torch.equal(scores(adapted), base)
    put(adapted, WIDTHS, {})
    assert float((scores(adapted) - base).abs().max()) > 1e-2
    adapted.reset()
    assert torch.equal(scores(adapted), base)


def test_growing_in_width_or_depth_preserves_the_function(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    tensors = put(adapted, {2: 2}, {})
    small = scores(adapted)
    grown = layout_of(adapted, {0: 4, 2: 4})  # wider, and one block more: new rows of D, zeros elsewhere
    values = init_lora(0, grown)
    for name, tensor in tensors.items():
        corner = tuple(map(slice, tensor.shape))
        values[name][corner] = tensor
    adapted.set_client(values, grown, grown, {})
    assert values["bert.encoder.layer.2.adapter_down"][2:].any()
    assert torch.allclose(scores(adapted), small, atol=1e-5)


def test_a_narrower_client_has_the_leading_slices(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    server, mine = draw(layout_of(adapted, {1: 4})), layout_of(adapted, {1: 3})
    adapted.set_client(slice_tensors(server, mine), mine, mine, {})
    narrow = scores(adapted)
    wide = {n: t.copy() for n, t in server.items()}
    wide["bert.encoder.layer.1.adapter_up"][:, 3:] = 0
    layout = layout_of(adapted, {1: 4})
    adapted.set_client(wide, layout, layout, {})
    assert torch.allclose(scores(adapted), narrow, atol=1e-5)


def test_blocks_that_are_not_in_the_layout_are_off(tmp_path: Path) -> None:
    used, fresh = adapt(tmp_path), adapt(tmp_path)
    put(used, WIDTHS, WIDTHS)
    put(used, {1: 4}, {1: 4})
    put(fresh, {1: 4}, {1: 4})
    assert torch.equal(scores(used), scores(fresh))
    assert used.trained_set() == fresh.trained_set() == tuple(layout_of(used, {1: 4}).names)
    with pytest.raises(PlanError, match="not part of"):
        used.read(layout_of(used, {0: 2}))


@pytest.mark.parametrize("trained", [{2: 3}, {0: 2, 2: 3}, {HEAD: 1}, {1: 4, HEAD: 1}, {}])
def test_exactly_the_planned_tensors_require_gradients(tmp_path: Path, trained: Any) -> None:
    adapted = adapt(tmp_path)
    put(adapted, WIDTHS, trained)
    assert sorted(adapted.trained_set()) == sorted(layout_of(adapted, trained).names)
    assert list(adapted.trained_parameters()) == list(layout_of(adapted, trained).names)


def test_training_changes_exactly_what_was_planned_and_rebuilds_nothing(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    modules = [id(m) for m in adapted.model.modules()]
    hooks = [len(b._forward_hooks) for b in blocks_of(adapted.model)]
    base = {n: p.detach().clone() for n, p in adapted.model.named_parameters()}
    start = put(adapted, WIDTHS, {1: 4, HEAD: 1})
    train_locally(
        adapted, TEXTS, np.arange(9), config=TrainConfig(local_steps=3, batch_size=4), learning_rate=0.01,
        objective=Plain(), start=start, seed_path=(0, 1, "a"),
    )  # fmt: skip
    after = adapted.read(layout_of(adapted, WIDTHS))
    planned = layout_of(adapted, {1: 4, HEAD: 1})
    assert {n for n in after if not np.array_equal(after[n], start[n])} == set(planned.names)
    adapted.reset()
    assert all(torch.equal(p, base[n]) for n, p in adapted.model.named_parameters())
    assert [id(m) for m in adapted.model.modules()] == modules
    assert [len(b._forward_hooks) for b in blocks_of(adapted.model)] == hooks == [1] * NUM_BLOCKS


@pytest.mark.parametrize("architecture", CONFIGS)
def test_no_graph_is_kept_below_the_lowest_trained_adapter(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    put(adapted, WIDTHS, {1: 4})
    blocks, saved, inside = blocks_of(adapted.model), [0] * NUM_BLOCKS, []
    for i, block in enumerate(blocks):
        block.register_forward_pre_hook(lambda *_, i=i: inside.append(i))
        block.register_forward_hook(lambda *_: inside.append(-1))
    known = {p.data_ptr() for p in adapted.model.parameters()} | {
        p.data_ptr() for p in adapted.trained_parameters().values()
    }

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if inside and inside[-1] >= 0 and tensor.data_ptr() not in known:
            saved[inside[-1]] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        adapted.logits(BATCH)
    assert saved[0] == 0
    assert saved[1] == 3  # h and what gelu gets and gives: nothing of the block itself
    assert saved[2] > saved[1]


def test_a_block_that_is_left_out_takes_its_adapter_along(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    put(adapted, WIDTHS, WIDTHS)  # adapters of an earlier client must not disturb the look at the blocks
    tensors = put(adapted, WIDTHS, {1: 4}, kept=[1])
    alone = scores(adapted)
    assert all(np.array_equal(v, tensors[n]) for n, v in adapted.read(layout_of(adapted, WIDTHS)).items())
    layout = layout_of(adapted, {1: 4, HEAD: 1})
    adapted.set_client({s.name: tensors[s.name] for s in layout}, layout, layout, {}, kept_blocks=[1])
    assert torch.equal(scores(adapted), alone)
    with pytest.raises(PlanError, match="trained and left out"):
        put(adapted, WIDTHS, {0: 2}, kept=[1])


def test_dropout_works_on_the_input_from_the_lowest_trained_block_upwards_only(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, dropout=0.5)
    put(adapted, WIDTHS, {1: 4, HEAD: 1})
    still = scores(adapted)
    states: list[torch.Tensor] = []
    handles = [b.register_forward_hook(lambda m, a, out: states.append(out)) for b in blocks_of(adapted.model)]
    with adapted.dropout(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scores(adapted)
    scores(adapted)
    for handle in handles:
        handle.remove()
    first, second = ([o[0] if isinstance(o, tuple) else o for o in part] for part in (states[:3], states[3:]))
    assert [torch.equal(x, y) for x, y in zip(first, second, strict=True)] == [True, False, False]
    assert torch.equal(scores(adapted), still)


@pytest.mark.parametrize("make", [lambda h: h, lambda h: (h, None, 7), lambda h: [h, 7]])
def test_the_kind_of_a_blocks_output_is_kept(make: Any) -> None:
    class Block(nn.Module):
        def forward(self, states: torch.Tensor) -> Any:
            return make(states)

    block, states = Block(), torch.ones(1, 2, 3)
    adapter = Bottleneck(block, 0.0)
    assert block(states) is states or block(states)[0] is states
    values = {"adapter_down": torch.eye(3)[:2], "adapter_bias": torch.zeros(2), "adapter_up": torch.eye(3)[:, :2]}
    adapter.put(values, ["adapter_up"], is_on=True)
    output = block(states)
    assert type(output) is type(make(states))
    assert adapter.trained == ("adapter_up",)
    # 1 + gelu(1) with gelu(1) = (1 + erf(1/√2))/2 = 0.841345 in the two directions that D reads and U writes
    found = output if isinstance(output, torch.Tensor) else output[0]
    assert found[0, 0].tolist() == pytest.approx([1.841345, 1.841345, 1.0], abs=1e-6)
    if not isinstance(output, torch.Tensor):
        assert list(output[1:]) == list(make(states)[1:])


def test_impossible_plans_are_refused(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    layout = layout_of(adapted, {0: 2})
    half = layout.without(["adapter_bias"])
    with pytest.raises(PlanError, match="not complete"):
        adapted.set_client(draw(half), half, Layout(()), {})
    uneven = Layout((*half, layout_of(adapted, {0: 3}).of(0)[1]))
    with pytest.raises(PlanError, match="not complete"):
        adapted.set_client(draw(uneven), uneven, Layout(()), {})
    lora = adapt(tmp_path, kind="lora")
    with pytest.raises(ModelError, match="no bottleneck adapter"):
        lora.set_client(draw(layout), layout, Layout(()), {})
    pairs = global_layout(adapted.shape, "lora", {0: 2})
    with pytest.raises(ModelError, match="no LoRA pair"):
        adapted.set_client(draw(pairs), pairs, Layout(()), dict.fromkeys(pairs.targets, 1.0))
    other = adapt(tmp_path, "gpt2").shape
    with pytest.raises(ModelError, match="not the planned ones"):
        attach_bottlenecks(find_blocks(adapted.model), other, 0.0)
