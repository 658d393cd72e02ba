"""Moved bases, left-out blocks, single factors: what a client's model is made of, without rebuilding a module."""

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

from fedstrata.core.merges import BaseLog
from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors
from fedstrata.errors import ModelError, PayloadError, PlanError
from fedstrata.message import Task
from fedstrata.train.adapter_folder import load_adapter, save_adapter
from fedstrata.train.batches import collate
from fedstrata.train.config import AdapterConfig, ModelConfig, TrainConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
from fedstrata.train.skip import can_skip_blocks
from fedstrata.train.strata import find_blocks
from fedstrata.train.trainer import TorchTrainer

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


def trainer_of(adapted: AdaptedModel) -> TorchTrainer:
    layout = layout_of(adapted, ALL)
    return TorchTrainer(
        adapted, layout, dict.fromkeys(layout.targets, 1.5), TEXTS,
        train_indices={"a": np.arange(6)}, validation_indices={"a": np.arange(6)}, splits={"test": np.arange(6)},
        seed=0, threads=1, eval_batch_size=6,
    )  # fmt: skip


def task_of(job: Any = "train", ranks: Any = None, **options: Any) -> Task:
    train = TrainConfig(local_steps=1, batch_size=6).model_dump(mode="json")
    ranks = {str(s): r for s, r in (ALL if ranks is None else ranks).items()}
    usual: dict[str, Any] = {"learning_rate": 0.01, "train": train, "objective": {"id": "task_loss"}}
    return Task(job, "a", 1, 0, ranks=ranks, **(usual | options))


def mean_loss(adapted: AdaptedModel) -> float:
    batch = collate(TEXTS, np.arange(6), 0)
    labels = batch.pop("labels")
    with torch.inference_mode():
        return float(functional.cross_entropy(adapted.logits(batch), labels))


def test_training_honours_left_out_blocks(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    trainer = trainer_of(adapted)
    losses = []
    for skips in (True, False):
        task = task_of(ranks={0: 2, 2: 3, HEAD: 1}, skip_blocks=skips)
        layouts = task.layouts(trainer.server_layout)
        work = trainer.train(task, layouts, draw(layouts.present))
        losses.append(work.loss)
        tensors, scaling = draw(layouts.present), dict.fromkeys(layouts.present.targets, 1.5)
        kept = {0, 2} if skips else None
        adapted.set_client(tensors, layouts.present, Layout(()), scaling, kept_blocks=kept)
        assert work.loss == pytest.approx(mean_loss(adapted), rel=1e-6)
        assert all(not np.array_equal(work.tensors[n], tensors[n]) for n in layouts.trained.names)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_after_a_client_without_some_blocks_the_whole_model_is_evaluated(tmp_path: Path) -> None:
    trainer = trainer_of(adapt(tmp_path))
    tensors = draw(trainer.server_layout)
    before = trainer.score(tensors, "test")
    task = task_of(ranks={1: 4}, skip_blocks=True)
    layouts = task.layouts(trainer.server_layout)
    trainer.train(task, layouts, draw(layouts.present))
    assert trainer.score(tensors, "test") == before


@pytest.mark.parametrize(("frozen", "trained"), [("lora_A", "lora_B"), ("lora_B", "lora_A")])
def test_one_factor_of_every_pair_is_trained_and_the_other_stays(tmp_path: Path, frozen: Any, trained: Any) -> None:
    adapted = adapt(tmp_path)
    trainer = trainer_of(adapted)
    task = task_of(frozen_kinds=[frozen])
    layouts = task.layouts(trainer.server_layout)
    start = draw(layouts.present)
    adapted.set_client(start, layouts.present, layouts.trained, dict.fromkeys(layouts.present.targets, 1.5))
    functional.cross_entropy(adapted.logits(BATCH), LABELS).backward()
    for target in layouts.present.targets:
        layer: Any = adapted.model.get_submodule(target)
        assert getattr(layer, frozen)["default"].weight.grad is None
        assert getattr(layer, trained)["default"].weight.grad is not None
    work = trainer.train(task, layouts, start)
    for spec in layouts.present:
        assert np.array_equal(work.tensors[spec.name], start[spec.name]) == (spec.kind == frozen)


@pytest.mark.parametrize(("power", "scaling"), [(0.0, 1.5), (0.5, 1.5 * 2**0.5), (1.0, 3.0)])
def test_training_and_evaluation_scale_a_smaller_rank_as_the_task_says(
    tmp_path: Path, power: float, scaling: float
) -> None:
    # s_k = s·(r/r_k)^p with s = 1.5, r = 4, r_k = 2
    adapted = adapt(tmp_path)
    trainer = trainer_of(adapted)
    task = task_of(ranks={1: 2, HEAD: 1}, scaling_power=power)
    layouts = task.layouts(trainer.server_layout)
    tensors = draw(layouts.present)
    adapted.set_client(tensors, layouts.present, Layout(()), dict.fromkeys(layouts.present.targets, scaling))
    expected = mean_loss(adapted)
    assert trainer.train(task, layouts, tensors).loss == pytest.approx(expected, rel=1e-6)
    asked = task_of("evaluate", ranks={}, reads={"1": 2, "head": 1}, scaling_power=power, split="client_validation")
    score = trainer.evaluate(asked, asked.layouts(trainer.server_layout), tensors)
    assert score.loss_sum / 6 == pytest.approx(expected, rel=1e-6)


def test_the_trainers_base_follows_a_log_there_and_back(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    trainer = trainer_of(adapted)
    first = weights(adapted)
    target = adapted.shape.targets[0]
    rng = np.random.default_rng(0)
    pair = (
        rng.normal(size=(target.out_features, 2)).astype(np.float32),
        rng.normal(size=(2, target.in_features)).astype(np.float32),
    )
    log = BaseLog().append({target.name: pair})
    trainer.stand_at(log)
    moved = weights(adapted)[f"{target.name}.base_layer.weight"]
    # float32(B·A in float64), added in float32
    product = (pair[0].astype(np.float64) @ pair[1].astype(np.float64)).astype(np.float32)
    assert np.array_equal(moved.numpy(), first[f"{target.name}.base_layer.weight"].numpy() + product)
    trainer.stand_at(BaseLog())
    assert all(torch.equal(now, first[name]) for name, now in weights(adapted).items())
