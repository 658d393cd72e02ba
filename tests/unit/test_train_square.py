"""R between frozen factors: the forward pass, its gradient, its slices, and gradients of whole weights as factors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch.func import functional_call
from torch.nn import functional

from fedstrata.core.frames import Frames, drawn_frames
from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors
from fedstrata.errors import ClientError, ModelError, PayloadError, PlanError
from fedstrata.train import frames as frames_module
from fedstrata.train.config import AdapterConfig, ModelConfig, TrainConfig
from fedstrata.train.frames import gradient_sketch
from fedstrata.train.local import train_locally
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model

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
RANKS: Any = {0: 4, 1: 2, 2: 3, HEAD: 1}
S = 1.5


@dataclass
class Texts:
    input_ids: list[np.ndarray]
    labels: np.ndarray
    token_type_ids: None = None
    pixel_values: None = None


TEXTS = Texts([np.arange(5 + i, 8 + i + i % 3, dtype=np.int32) for i in range(9)], np.arange(9) % 3)


def load(folder: Path, architecture: str, adapter: AdapterConfig) -> Any:
    CONFIGS[architecture]().to_json_file(folder / f"{architecture}.json")
    source = ModelConfig(source=f"config:{architecture}.json")
    return load_model(source, adapter, label_names=["a", "b", "c"], seed=0, base_dir=folder)


def adapt(folder: Path, architecture: str = "bert", **options: Any) -> AdaptedModel:
    config = AdapterConfig(**({"kind": "square", "max_rank": 4, "targets": "all-linear"} | options))
    adapted = AdaptedModel(load(folder, architecture, config), config)
    if config.kind == "square":
        adapted.set_frames(drawn_frames(0, adapted.shape.targets, dict.fromkeys(adapted.shape.blocks, 4)))
    return adapted


def layout_of(adapted: AdaptedModel, ranks: Any) -> Layout:
    return global_layout(adapted.shape, "square", ranks)


def put(adapted: AdaptedModel, ranks: Any, trained: Any, *, zero: bool = False) -> NamedTensors:
    """Slices of the same large tensors, whatever the ranks."""
    layout, rng = layout_of(adapted, ranks), np.random.default_rng(0)
    whole = {
        s.name: rng.normal(0, 0.3, s.shape).astype(np.float32)
        for s in layout_of(adapted, dict.fromkeys(adapted.shape.blocks, 4) | {HEAD: 1})
    }
    tensors = {s.name: np.ascontiguousarray(whole[s.name][tuple(map(slice, s.shape))]) for s in layout}
    if zero:
        tensors |= adapted.base_tensors(layout)
        tensors |= {s.name: np.zeros(s.shape, np.float32) for s in layout if s.kind == "lora_R"}
    adapted.set_client(tensors, layout, layout_of(adapted, trained), dict.fromkeys(layout.targets, S))
    return tensors


def scores(adapted: AdaptedModel) -> torch.Tensor:
    with torch.inference_mode():
        return adapted.logits(BATCH)


def plain_model(folder: Path, architecture: str) -> torch.nn.Module:
    """The same model as nobody adapted it."""
    return load(folder, architecture, AdapterConfig(targets="all-linear")).model


def plain_logits(
    model: torch.nn.Module, adapted: AdaptedModel, leaves: dict[str, torch.Tensor], frames: Frames
) -> torch.Tensor:
    """W + s B R A for every R in `leaves`, transposed for maps stored as [in, out]; other leaves as they are."""
    turned = {t.name: t.fan_in_fan_out for t in adapted.shape.targets}
    state = dict(model.named_parameters())
    for name, leaf in leaves.items():
        target = name.removesuffix(".lora_R")
        if name == target:
            state[name] = leaf
            continue
        left, right = (torch.from_numpy(np.ascontiguousarray(x)) for x in frames.of(target, len(leaf)))
        delta = S * left @ leaf @ right
        state[f"{target}.weight"] = state[f"{target}.weight"] + (delta.T if turned[target] else delta)
    return functional_call(model, state, kwargs=dict(BATCH)).logits


@pytest.mark.parametrize("architecture", CONFIGS)
def test_gradients_of_r_and_head_equal_autograd_of_merged_weights(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    tensors = put(adapted, RANKS, RANKS)
    loss = functional.cross_entropy(adapted.logits(BATCH), LABELS)
    parameters = adapted.trained_parameters()
    found = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    leaves = {n: torch.from_numpy(t).requires_grad_() for n, t in tensors.items()}
    assert adapted.frames is not None
    logits = plain_logits(plain_model(tmp_path, architecture), adapted, leaves, adapted.frames)
    expected_loss = functional.cross_entropy(logits, LABELS)
    expected = dict(zip(leaves, torch.autograd.grad(expected_loss, list(leaves.values())), strict=True))
    assert torch.allclose(loss, expected_loss, atol=1e-5)
    assert found.keys() == expected.keys()
    assert any(n.endswith("lora_R") for n in found)
    for name, gradient in expected.items():
        assert float(gradient.abs().max()) > 1e-7
        assert torch.allclose(found[name], gradient, rtol=1e-3, atol=1e-5), name


@pytest.mark.parametrize("architecture", CONFIGS)
def test_the_model_starts_as_its_base(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    base = scores(adapted)
    put(adapted, RANKS, RANKS, zero=True)
    assert torch.equal(scores(adapted), base)
    put(adapted, RANKS, {})
    assert float((scores(adapted) - base).abs().max()) > 1e-2
    adapted.reset()
    assert torch.equal(scores(adapted), base)


def test_a_client_of_smaller_rank_has_the_leading_slices_of_everything(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    tensors = put(adapted, {1: 2}, {})
    small = scores(adapted)
    layout = layout_of(adapted, {1: 4})
    wide = {s.name: np.zeros(s.shape, np.float32) for s in layout}
    for name, square in wide.items():  # R of rank 2 in the corner of an R of rank 4 is the same update
        square[:2, :2] = tensors[name]
    adapted.set_client(wide, layout, Layout(()), dict.fromkeys(layout.targets, S))
    assert torch.allclose(scores(adapted), small, atol=1e-5)


@pytest.mark.parametrize("trained", [{2: 3}, {0: 4, 2: 3}, {HEAD: 1}, {1: 2, HEAD: 1}, {}])
def test_exactly_the_planned_tensors_require_gradients(tmp_path: Path, trained: Any) -> None:
    adapted = adapt(tmp_path)
    put(adapted, RANKS, RANKS)
    put(adapted, RANKS, trained)
    assert sorted(adapted.trained_set()) == sorted(layout_of(adapted, trained).names)
    assert list(adapted.trained_parameters()) == list(layout_of(adapted, trained).names)


def test_training_changes_exactly_what_was_planned_and_never_the_frames(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    modules = [id(m) for m in adapted.model.modules()]
    frozen = {n: p.detach().clone() for n, p in adapted.model.named_parameters() if "classifier" not in n}
    start = put(adapted, RANKS, {1: 2, HEAD: 1})
    assert adapted.frames is not None
    before = {n: t.copy() for n, t in adapted.frames.to_tensors().items()}
    result = train_locally(
        adapted, TEXTS, np.arange(9), config=TrainConfig(local_steps=3, batch_size=4), learning_rate=0.01,
        objective=Plain(), start=start, seed_path=(0, 1, "a"),
    )  # fmt: skip
    assert result.num_steps == 3
    after = adapted.read(layout_of(adapted, RANKS))
    planned = layout_of(adapted, {1: 2, HEAD: 1})
    assert {n for n in after if not np.array_equal(after[n], start[n])} == set(planned.names)
    assert all(np.array_equal(t, before[n]) for n, t in adapted.frames.to_tensors().items())
    put(adapted, RANKS, {})
    adapted.reset()
    now = dict(adapted.model.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in frozen.items() if "lora_" not in n)
    assert [id(m) for m in adapted.model.modules()] == modules


class Plain:
    is_plain = True


@pytest.mark.parametrize("architecture", CONFIGS)
def test_no_graph_is_kept_below_the_lowest_trained_block(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    put(adapted, RANKS, {1: 2})
    path = adapted.shape.block_paths[0].rpartition(".")[0]
    graphs: list[bool] = []
    for block in adapted.model.get_submodule(path).children():
        block.register_forward_hook(
            lambda m, a, out: graphs.append((out[0] if isinstance(out, tuple | list) else out).requires_grad)
        )
    adapted.logits(BATCH)
    assert graphs == [False, True, True]


def test_a_pair_may_take_the_place_of_r(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    tensors = put(adapted, RANKS, {})
    expected = scores(adapted)
    layout = global_layout(adapted.shape, "lora", RANKS)
    assert adapted.frames is not None
    pairs = {}
    for spec in layout:
        if spec.kind == "weight":
            pairs[spec.name] = tensors[spec.name]
            continue
        left, right = adapted.frames.of(spec.target, spec.rank)
        value = right if spec.kind == "lora_A" else left @ tensors[f"{spec.target}.lora_R"]
        pairs[spec.name] = np.ascontiguousarray(value)
    adapted.set_client(pairs, layout, layout.restrict([0]), dict.fromkeys(layout.targets, S))
    assert torch.allclose(scores(adapted), expected, atol=1e-5)
    assert set(adapted.trained_set()) == set(layout.restrict([0]).names)


def test_frames_can_be_replaced_between_clients(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    put(adapted, RANKS, {})
    first = scores(adapted)
    adapted.set_frames(drawn_frames(1, adapted.shape.targets, dict.fromkeys(adapted.shape.blocks, 4)))
    assert torch.equal(scores(adapted), first)
    put(adapted, RANKS, {})
    assert not torch.allclose(scores(adapted), first, atol=1e-3)


def test_impossible_plans_are_refused(tmp_path: Path) -> None:
    lora = adapt(tmp_path, kind="lora")
    square = layout_of(lora, {0: 2})
    tensors = {s.name: np.zeros(s.shape, np.float32) for s in square}
    scaling = dict.fromkeys(square.targets, S)
    with pytest.raises(PlanError, match="no frozen factors"):
        lora.set_frames(Frames({}))
    with pytest.raises(PlanError, match="does not stand between"):
        lora.set_client(tensors, square, Layout(()), scaling)
    adapted = adapt(tmp_path)
    with pytest.raises(PlanError, match="no scaling"):
        adapted.set_client(tensors, square, Layout(()), {})
    wide = layout_of(adapted, {0: 5})
    with pytest.raises(PlanError, match="of rank 5"):
        adapted.set_client({s.name: np.zeros(s.shape, np.float32) for s in wide}, wide, Layout(()), scaling)
    both = Layout((*square, *global_layout(adapted.shape, "lora", {0: 2})))
    with pytest.raises(PlanError, match="no pair beside it"):
        adapted.set_client({s.name: np.zeros(s.shape, np.float32) for s in both}, both, Layout(()), scaling)
    target = adapted.shape.targets[0].name
    with pytest.raises(PayloadError, match="do not fit"):
        adapted.set_frames(Frames({target: (np.ones((32, 2), np.float32), np.ones((2, 32), np.float32))}))
    fresh = AdaptedModel(load(tmp_path, "bert", adapted.adapter), adapted.adapter)
    with pytest.raises(PlanError, match="not known yet"):
        fresh.set_client(tensors, square, Layout(()), scaling)


# Gradients of whole weights


def mean_gradients(folder: Path, adapted: AdaptedModel, architecture: str) -> dict[str, np.ndarray]:
    """∂/∂W of the mean loss by autograd, one example at a time, [out, in]."""
    model = plain_model(folder, architecture)
    totals: dict[str, torch.Tensor] = {}
    for ids, label in zip(TEXTS.input_ids, TEXTS.labels, strict=True):
        weights = {t.name: model.get_parameter(f"{t.name}.weight").requires_grad_() for t in adapted.shape.targets}
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits
        loss = functional.cross_entropy(logits, torch.tensor([int(label)])) / len(TEXTS.labels)
        for name, gradient in zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True):
            totals[name] = totals.get(name, torch.zeros(())) + gradient
    turned = {t.name: t.fan_in_fan_out for t in adapted.shape.targets}
    return {n: (g.T if turned[n] else g).double().numpy() for n, g in totals.items()}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_sketches_are_the_best_factors_of_the_mean_gradient(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    expected = mean_gradients(tmp_path, adapted, architecture)
    ranks = {t.name: 1 + i % 3 for i, t in enumerate(adapted.shape.targets)}
    modules = {n: len(m._forward_hooks) for n, m in adapted.model.named_modules()}
    found = gradient_sketch(adapted, TEXTS, np.arange(9)[::-1], ranks, batch_size=4)
    assert {n: len(m._forward_hooks) for n, m in adapted.model.named_modules()} == modules
    assert all(p.grad is None and not p.requires_grad for p in adapted.model.parameters())
    assert list(found) == [t.name for t in adapted.shape.targets]
    for name, sketch in found.items():
        u, s, vt = np.linalg.svd(expected[name])
        best = (u[:, : ranks[name]] * s[: ranks[name]]) @ vt[: ranks[name]]
        assert sketch.rank == ranks[name]
        assert np.abs(sketch.dense() - best).max() < 1e-4 * s[0] + 1e-8, name


def test_sketches_do_not_depend_on_memory_or_on_how_they_are_factored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapted = adapt(tmp_path)
    put(adapted, RANKS, {2: 3})
    ranks = {t.name: 32 for t in adapted.shape.targets}
    few = gradient_sketch(adapted, TEXTS, np.arange(4), ranks)  # 16 tokens: fewer than any side of a map
    passes = []
    rows = frames_module._token_rows
    monkeypatch.setattr(frames_module, "VALUES_AT_ONCE", 1)
    monkeypatch.setattr(frames_module, "_token_rows", lambda *args: passes.append(args[3]) or rows(*args))
    again = gradient_sketch(adapted, TEXTS, np.arange(4), ranks, batch_size=3)
    assert passes == [[t.name] for t in adapted.shape.targets]
    many = Texts(TEXTS.input_ids[:4] * 8, np.tile(TEXTS.labels[:4], 8))  # the mean of copies is the same mean
    copies = gradient_sketch(adapted, many, np.arange(32), ranks)
    for name, sketch in few.items():
        size = np.abs(sketch.dense()).max()
        assert size > 0
        assert np.abs(again[name].dense() - sketch.dense()).max() < 1e-5 * size + 1e-9
        assert np.abs(copies[name].dense() - sketch.dense()).max() < 1e-5 * size + 1e-9


def test_a_sketch_has_the_planned_rank_even_where_the_gradient_has_not(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    one = Texts([np.array([5], np.int32)], np.array([1]))
    ranks = {t.name: 3 for t in adapted.shape.targets}
    found = gradient_sketch(adapted, one, np.arange(1), ranks)
    assert all(m.left.shape[1] == m.right.shape[0] == 3 for m in found.values())
    # one token: a value map's gradient has one direction, a query map's none (softmax over one token is constant)
    value = next(n for n in found if n.endswith("2.attention.self.value"))
    query = next(n for n in found if n.endswith("2.attention.self.query"))
    assert found[value].left[:, 0].any()
    assert not found[value].left[:, 1:].any()
    assert found[query].norm() < 1e-6 * found[value].norm()


def test_wrong_questions_about_gradients_are_refused(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    with pytest.raises(ClientError, match="no example"):
        gradient_sketch(adapted, TEXTS, np.arange(0), {})
    with pytest.raises(ModelError, match="no map"):
        gradient_sketch(adapted, TEXTS, np.arange(2), {"nowhere": 1})
    layout, draws = layout_of(adapted, {HEAD: 1}), np.random.default_rng(0)
    first = adapted.base_tensors(layout)
    broken = {n: np.sign(draws.normal(size=t.shape)).astype(np.float32) * 1e38 for n, t in first.items()}
    adapted.set_client(broken, layout, Layout(()), {})
    with pytest.raises(ClientError, match="not finite"):
        gradient_sketch(adapted, TEXTS, np.arange(2), {adapted.shape.targets[0].name: 1})
