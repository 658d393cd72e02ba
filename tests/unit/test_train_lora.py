"""One model, many clients: swapping ranks in and out, exactly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, Stratum
from fedstrata.errors import ModelError, PayloadError, PlanError
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model

NUM_BLOCKS = 3
CONFIGS: dict[str, Any] = {
    "bert": lambda: tf.BertConfig(
        hidden_size=32, num_hidden_layers=NUM_BLOCKS, num_attention_heads=4, intermediate_size=48, vocab_size=300
    ),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=32, n_layer=NUM_BLOCKS, n_head=4, n_inner=48, vocab_size=300, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: tf.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=300,
    ),
}
BATCH = {
    "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 11, 0]]),
    "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
}
Ranks = Mapping[Stratum, int]
ALL: Ranks = {0: 2, 1: 4, 2: 3, HEAD: 1}


def adapt(tmp_path: Path, architecture: str = "bert", **adapter: Any) -> AdaptedModel:
    folder = tmp_path / architecture
    if not folder.exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tf.AutoModel.from_config(CONFIGS[architecture]()).save_pretrained(folder)
    config = AdapterConfig(**({"max_rank": 4, "targets": "all-linear"} | adapter))
    loaded = load_model(ModelConfig(source=str(folder)), config, label_names=["a", "b", "c"], seed=0, base_dir=tmp_path)
    return AdaptedModel(loaded, config)


def layout_of(adapted: AdaptedModel, ranks: Ranks) -> Layout:
    return global_layout(adapted.shape, adapted.adapter.kind, ranks)


def draw(layout: Layout, seed: int = 0) -> NamedTensors:
    rng = np.random.default_rng(seed)
    return {s.name: rng.normal(0, 0.05, s.shape).astype(np.float32) for s in layout}


def set_client(adapted: AdaptedModel, ranks: Ranks, trained: Ranks, seed: int = 0) -> NamedTensors:
    present = layout_of(adapted, ranks)
    tensors = draw(present, seed)
    scaling = {t: 2.0 + 0.5 * i for i, t in enumerate(present.targets)}
    adapted.set_client(tensors, present, layout_of(adapted, trained), scaling)
    return tensors


def scores(adapted: AdaptedModel) -> torch.Tensor:
    with torch.inference_mode():
        return adapted.logits(BATCH)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_swapped_pairs_of_unequal_ranks_equal_hand_merged_weights(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    tensors = set_client(adapted, ALL, {})
    present = layout_of(adapted, ALL)
    auto = tf.AutoModelForSequenceClassification
    merged = auto.from_pretrained(tmp_path / architecture, num_labels=3, pad_token_id=adapted.pad_id).eval()
    with torch.no_grad():
        for i, target in enumerate(present.targets):
            # W + s B A, transposed where the map is stored as [in, out]
            delta = (2.0 + 0.5 * i) * tensors[f"{target}.lora_B"] @ tensors[f"{target}.lora_A"]
            fused = architecture == "gpt2"
            merged.get_submodule(target).weight += torch.from_numpy(delta.T if fused else delta)
        for spec in present.of(HEAD):
            merged.get_parameter(spec.name).copy_(torch.from_numpy(tensors[spec.name]))
        expected = merged(**BATCH).logits
    shift = (scores(adapted) - expected).abs().max()
    assert shift < 1e-6 * max(1.0, float(expected.abs().max()))


def test_a_rank_is_really_its_own_size_inside_the_model(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    set_client(adapted, ALL, ALL)
    for target in adapted.shape.targets:
        layer: Any = adapted.model.get_submodule(target.name)
        rank = ALL[target.block]
        assert layer.r["default"] == layer.lora_A["default"].out_features == layer.lora_B["default"].in_features == rank
        assert layer.lora_A["default"].weight.shape == (rank, target.in_features)
        assert layer.lora_B["default"].weight.shape == (target.out_features, rank)
        assert layer.lora_alpha["default"] == layer.scaling["default"] * rank


def test_a_pair_that_is_not_in_the_plan_is_exactly_off(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    untouched = adapt(tmp_path)
    base = scores(untouched)
    set_client(adapted, ALL, ALL)
    assert not torch.equal(scores(adapted), base)
    adapted.reset()
    assert torch.equal(scores(adapted), base)


def test_switching_clients_back_and_forth_leaves_nothing_behind(tmp_path: Path) -> None:
    used, fresh = adapt(tmp_path), adapt(tmp_path)
    for ranks, trained in ((ALL, ALL), ({2: 1}, {2: 1}), ({0: 4, HEAD: 1}, {HEAD: 1})):
        set_client(used, ranks, trained, seed=5)
        train_one_step(used)
    tensors = set_client(used, {1: 2, 2: 3}, {2: 3})
    set_client(fresh, {1: 2, 2: 3}, {2: 3})
    assert torch.equal(scores(used), scores(fresh))
    assert used.trained_set() == fresh.trained_set()
    back = used.read(layout_of(used, {1: 2, 2: 3}))
    assert all(np.array_equal(back[n], tensors[n]) for n in tensors)


def test_training_never_changes_the_base_or_the_callers_arrays(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    before = {n: p.detach().clone() for n, p in adapted.model.named_parameters() if "lora_" not in n}
    tensors = set_client(adapted, ALL, ALL)
    kept = {n: t.copy() for n, t in tensors.items()}
    train_one_step(adapted)
    assert all(np.array_equal(tensors[n], kept[n]) for n in kept)
    moved = adapted.read(layout_of(adapted, ALL))
    assert not any(np.array_equal(moved[n], kept[n]) for n in kept)
    adapted.reset()
    after = dict(adapted.model.named_parameters())
    assert all(torch.equal(after[n], before[n]) for n in before)


@pytest.mark.parametrize("trained", [{2: 3}, {0: 2, 2: 3}, {HEAD: 1}, {1: 4, HEAD: 1}, {}])
def test_exactly_the_planned_tensors_require_gradients(tmp_path: Path, trained: Ranks) -> None:
    adapted = adapt(tmp_path)
    set_client(adapted, ALL, trained)
    assert sorted(adapted.trained_set()) == sorted(layout_of(adapted, trained).names)
    assert list(adapted.trained_parameters()) == list(layout_of(adapted, trained).names)


def test_one_factor_of_a_pair_can_be_trained_alone(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    present = layout_of(adapted, {2: 2})
    only_b = Layout(tuple(s for s in present if s.kind == "lora_B"))
    adapted.set_client(draw(present), present, only_b, dict.fromkeys(present.targets, 1.0))
    assert set(adapted.trained_set()) == set(only_b.names)


def test_a_gradient_outside_the_plan_is_seen_in_the_trained_set(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    set_client(adapted, ALL, {2: 3})
    adapted.model.get_parameter("bert.embeddings.LayerNorm.weight").requires_grad_()
    assert "bert.embeddings.LayerNorm.weight" in adapted.trained_set()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_blocks_below_the_lowest_trained_stratum_save_nothing_for_the_backward_pass(
    tmp_path: Path, architecture: str
) -> None:
    adapted = adapt(tmp_path, architecture)
    set_client(adapted, ALL, {1: 4})
    assert saved_tensors_by_block(adapted) == [False, True, True]
    set_client(adapted, ALL, {HEAD: 1})
    assert saved_tensors_by_block(adapted) == [False, False, False]
    set_client(adapted, ALL, {0: 2})
    assert saved_tensors_by_block(adapted) == [True, True, True]


def test_lora_dropout_works_from_the_lowest_trained_block_upwards_only(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, dropout=0.5)
    set_client(adapted, ALL, {1: 4, HEAD: 1})
    with adapted.dropout():
        training = {n for n, m in adapted.model.named_modules() if m.training}
    assert training
    assert {n.split(".")[3] for n in training} == {"1", "2"}
    assert all("lora_dropout" in n for n in training)
    assert not any(m.training for m in adapted.model.modules())
    set_client(adapted, ALL, {HEAD: 1})
    with adapted.dropout():
        assert not any(m.training for m in adapted.model.modules())


def test_full_tuning_restores_the_base_between_clients(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, kind="full")
    base = scores(adapted)
    tensors = set_client(adapted, {2: 1, HEAD: 1}, {2: 1})
    assert set(adapted.trained_set()) == set(layout_of(adapted, {2: 1}).names)
    assert all(n.startswith("bert.encoder.layer.2.") for n in adapted.trained_set())
    train_one_step(adapted)
    moved = adapted.read(layout_of(adapted, {2: 1}))
    assert any(not np.array_equal(moved[n], tensors[n]) for n in moved)
    set_client(adapted, {HEAD: 1}, {HEAD: 1})
    adapted.reset()
    assert torch.equal(scores(adapted), base)
    assert adapted.trained_set() == ()


def test_first_values_of_the_head_can_be_read_while_a_client_is_in(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    layout = layout_of(adapted, {HEAD: 1})
    first = adapted.base_tensors(layout)
    set_client(adapted, ALL, ALL)
    assert first["classifier.weight"].any()
    assert all(np.array_equal(first[n], adapted.base_tensors(layout)[n]) for n in layout.names)


def test_impossible_plans_are_refused(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    present = layout_of(adapted, {2: 2})
    tensors, scaling = draw(present), dict.fromkeys(present.targets, 1.0)
    with pytest.raises(PlanError, match="does not stand"):
        adapted.set_client(tensors, present, layout_of(adapted, {1: 2}), scaling)
    with pytest.raises(PlanError, match="does not stand"):
        adapted.set_client(tensors, present, layout_of(adapted, {2: 1}), scaling)
    half = Layout(tuple(s for s in present if s.kind == "lora_A"))
    with pytest.raises(PlanError, match="not complete"):
        adapted.set_client({s.name: tensors[s.name] for s in half}, half, Layout(()), scaling)
    with pytest.raises(PlanError, match="no scaling"):
        adapted.set_client(tensors, present, present, {})
    with pytest.raises(PayloadError, match="wrong shape"):
        adapted.set_client(tensors | draw(layout_of(adapted, {2: 3})), present, present, scaling)
    with pytest.raises(PayloadError, match="missing"):
        adapted.set_client({}, present, present, scaling)
    with pytest.raises(PlanError, match="not part of"):
        adapted.read(layout_of(adapted, {0: 1}))
    with pytest.raises(ModelError, match="already"):
        AdaptedModel(adapted.loaded, adapted.adapter)


def train_one_step(adapted: AdaptedModel) -> None:
    parameters = list(adapted.trained_parameters().values())
    loss = nn.functional.cross_entropy(adapted.logits(BATCH), torch.tensor([0, 1]))
    loss.backward()
    torch.optim.SGD(parameters, lr=0.5).step()


def saved_tensors_by_block(adapted: AdaptedModel) -> list[bool]:
    """Whether the forward pass of each block saves a tensor for autograd; parameters do not count."""
    where: list[int] = []
    saving = [False] * NUM_BLOCKS
    handles = []
    prefix = adapted.shape.targets[0].name.split(".0.")[0]
    for i, block in enumerate(adapted.model.get_submodule(prefix).children()):
        handles.append(block.register_forward_pre_hook(lambda *_, i=i: where.append(i)))
        handles.append(block.register_forward_hook(lambda *_: where.append(-1)))
    parameters = {p.data_ptr() for p in adapted.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if where and where[-1] >= 0 and tensor.data_ptr() not in parameters:
            saving[where[-1]] = True
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        adapted.logits(BATCH)
    for handle in handles:
        handle.remove()
    return saving
