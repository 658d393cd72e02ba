"""The trainer with tasks of every kind: left-out blocks, single factors, scalings, a base that moves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch.nn import functional

from fedstrata.core.merges import BaseLog
from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors
from fedstrata.message import Task
from fedstrata.train.batches import collate
from fedstrata.train.config import AdapterConfig, ModelConfig, TrainConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
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
