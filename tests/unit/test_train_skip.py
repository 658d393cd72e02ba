"""Moved bases, left-out blocks, single factors: what a client's model is made of, without rebuilding a module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch.nn import functional

from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors
from fedstrata.errors import ModelError, PayloadError
from fedstrata.train.adapter_folder import load_adapter, save_adapter
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model

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


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_moved_base_is_the_original_plus_the_delta(tmp_path: Path, architecture: str) -> None:
    # W + D in float32, D transposed where the map is stored as [in, out]
    adapted = adapt(tmp_path, architecture)
    before, deltas = weights(adapted), move(adapted, 1, 3)
    adapted.move_base(deltas)
    turned = {t.name: t.fan_in_fan_out for t in adapted.shape.targets}
    for name, now in weights(adapted).items():
        target = name.replace(".base_layer.weight", "")
        if target in deltas:
            delta = torch.from_numpy(deltas[target])
            assert torch.equal(now, before[name] + (delta.T if turned[target] else delta))
            assert now.is_contiguous()
        else:
            assert torch.equal(now, before[name])
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(5, adapted.shape.targets[0].in_features))).float()
    target = adapted.shape.targets[0].name
    layer: Any = adapted.model.get_submodule(target)
    expected = x @ torch.from_numpy(deltas[target]).T + (x @ _as_out_in(before, target, turned).T)
    bias = layer.base_layer.bias
    with torch.no_grad():
        assert torch.allclose(layer(x) - (0 if bias is None else bias), expected, atol=1e-5)


def _as_out_in(before: dict[str, torch.Tensor], target: str, turned: dict[str, bool]) -> torch.Tensor:
    weight = before[f"{target}.base_layer.weight"]
    return weight.T if turned[target] else weight


def test_the_bits_of_a_moved_base_do_not_depend_on_what_stood_there_before(tmp_path: Path) -> None:
    direct, detour = adapt(tmp_path), adapt(tmp_path)
    deltas = move(direct, 1, 2)
    direct.move_base(deltas)
    for seed in range(5):
        detour.move_base(move(detour, 10 + seed, 4 + seed))
    detour.move_base(deltas)
    assert all(torch.equal(a, b) for a, b in zip(weights(direct).values(), weights(detour).values(), strict=True))


def test_an_empty_move_brings_the_original_back(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    before, base = weights(adapted), scores(adapted)
    adapted.move_base(move(adapted, 1))
    assert not torch.equal(scores(adapted), base)
    adapted.move_base({})
    assert all(torch.equal(now, before[name]) for name, now in weights(adapted).items())
    assert torch.equal(scores(adapted), base)


def test_clients_and_resets_leave_the_base_where_it_stands(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    adapted.move_base(move(adapted, 1))
    moved, base = weights(adapted), scores(adapted)
    put(adapted, ALL, ALL)
    functional.cross_entropy(adapted.logits(BATCH), LABELS).backward()
    torch.optim.SGD(adapted.trained_parameters().values(), lr=0.5).step()
    adapted.reset()
    assert torch.equal(scores(adapted), base)
    assert all(torch.equal(now, moved[name]) for name, now in weights(adapted).items())


def test_the_callers_deltas_are_copied(tmp_path: Path) -> None:
    adapted, deltas = adapt(tmp_path), None
    deltas = move(adapted, 1)
    adapted.move_base(deltas)
    moved = weights(adapted)
    for delta in deltas.values():
        delta += 1
    assert all(torch.equal(now, moved[name]) for name, now in weights(adapted).items())


def test_a_saved_adapter_holds_no_trace_of_the_move(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    layout = layout_of(adapted, ALL)
    tensors, scaling = draw(layout), dict.fromkeys(layout.targets, 1.5)
    save_adapter(tmp_path / "before", adapted, layout, tensors, scaling)
    adapted.move_base(move(adapted, 1))
    save_adapter(tmp_path / "after", adapted, layout, tensors, scaling)
    before, after = (load_adapter(tmp_path / name)[0] for name in ("before", "after"))
    assert all(np.array_equal(before[n], after[n]) for n in layout.names)


def test_an_impossible_move_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, targets=["query"])
    before, (target, *_) = weights(adapted), adapted.shape.targets
    good = np.zeros((target.out_features, target.in_features), np.float32)
    for deltas, error, message in (
        ({"bert.encoder.layer.0.attention.self.key": good}, ModelError, "no LoRA pair"),
        ({target.name: good[:1]}, PayloadError, "does not fit"),
        ({target.name: good.astype(np.float64)}, PayloadError, "does not fit"),
        ({target.name: good + np.float32(np.nan)}, PayloadError, "does not fit"),
        (move(adapted, 1) | {target.name: good[:1]}, PayloadError, "does not fit"),
    ):
        with pytest.raises(error, match=message):
            adapted.move_base(deltas)
    assert all(torch.equal(now, before[name]) for name, now in weights(adapted).items())
    with pytest.raises(ModelError, match="no LoRA pair"):
        adapt(tmp_path, kind="full").move_base({target.name: good})


# Blocks that are left out
