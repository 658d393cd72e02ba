"""Folders of the newer adapters and of moved bases, and the trainer that scores them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from peft import PeftModel
from safetensors.numpy import load_file

from fedstrata.core.frames import drawn_frames
from fedstrata.core.linalg import LowRank
from fedstrata.core.merges import BaseLog
from fedstrata.core.shape import TargetShape, global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, TensorSpec
from fedstrata.errors import ModelError, PayloadError, PlanError, RunFolderError
from fedstrata.message import Task
from fedstrata.train.adapter_folder import load_adapter, save_adapter
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.fold import as_pairs
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
from fedstrata.train.trainer import TorchTrainer

LABELS = ("a", "b", "c")
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
TEXT: dict[str, Any] = SMALL | {"vocab_size": 300, "initializer_range": 0.1}
CONFIGS: dict[str, Any] = {
    "bert": lambda: tf.BertConfig(**TEXT),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=32,
        n_head=4,
        n_inner=48,
        vocab_size=300,
        n_layer=3,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    ),
    "llama": lambda: tf.LlamaConfig(**TEXT, num_key_value_heads=2),
}
RANKS: Mapping[Any, int] = {0: 2, 2: 4, HEAD: 1}  # block 1: none


@dataclass
class Texts:
    input_ids: list[np.ndarray]
    labels: np.ndarray
    token_type_ids: None = None
    pixel_values: None = None


def adapt(tmp_path: Path, architecture: str = "bert", **adapter: Any) -> AdaptedModel:
    if not (tmp_path / architecture).exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tf.AutoModel.from_config(CONFIGS[architecture]()).save_pretrained(tmp_path / architecture)
    config = AdapterConfig(**({"max_rank": 4, "targets": "all-linear"} | adapter))
    loaded = load_model(ModelConfig(source=architecture), config, label_names=LABELS, seed=0, base_dir=tmp_path)
    adapted = AdaptedModel(loaded, config)
    if config.kind == "square":
        adapted.set_frames(drawn_frames(0, adapted.shape.targets, dict.fromkeys(adapted.shape.blocks, 4)))
    return adapted


def draw(adapted: AdaptedModel, ranks: Mapping[Any, int] = RANKS) -> tuple[Layout, NamedTensors, dict[str, float]]:
    layout = global_layout(adapted.shape, adapted.adapter.kind, ranks)
    rng = np.random.default_rng(0)
    tensors = {s.name: rng.normal(0, 0.2, s.shape).astype(np.float32) for s in layout}
    return layout, tensors, {t: 1.3 + 0.1 * i for i, t in enumerate(layout.targets)}


def batch_for(adapted: AdaptedModel) -> dict[str, torch.Tensor]:
    ids = torch.from_numpy(np.random.default_rng(1).integers(3, 300, (3, 9)))
    ids[1, 5:] = adapted.pad_id
    return {"input_ids": ids, "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 9])}


def predict(adapted: AdaptedModel) -> torch.Tensor:
    with torch.inference_mode():
        return adapted.logits(batch_for(adapted))


def predict_by_peft(tmp_path: Path, adapted: AdaptedModel, architecture: str) -> torch.Tensor:
    """What someone with the standard libraries gets from the base and the folder."""
    auto = tf.AutoModelForSequenceClassification
    base = auto.from_pretrained(tmp_path / architecture, num_labels=len(LABELS), pad_token_id=adapted.pad_id)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.inference_mode():
        return model(**batch_for(adapted)).logits


def merged(adapted: AdaptedModel, rank: int = 3) -> dict[str, LowRank]:
    """Updates of the base, also where no pair is: all targets but the first."""
    rng = np.random.default_rng(2)
    return {
        t.name: LowRank(rng.normal(0, 0.2, (t.out_features, rank)), rng.normal(0, 0.2, (rank, t.in_features)))
        for t in adapted.shape.targets[1:]
    }


def dense(base: Mapping[str, LowRank]) -> NamedTensors:
    return {t: m.dense().astype(np.float32) for t, m in base.items()}


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) < 1e-5 * max(1.0, float(expected.abs().max()))


def rank_of(info_layout: Layout, target: str) -> int:
    return info_layout[f"{target}.lora_A"].rank


# R between frozen factors


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_square_folder_is_a_standard_pair_per_target(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture, kind="square")
    layout, tensors, scaling = draw(adapted)
    base = predict(adapted)
    adapted.set_client(tensors, layout, layout, scaling)
    expected = predict(adapted)
    save_adapter(tmp_path / "adapter", adapted, layout, tensors, scaling)
    assert torch.equal(predict(adapted), base)
    assert close(predict_by_peft(tmp_path, adapted, architecture), expected)
    assert not close(base, expected)
    back, info = load_adapter(tmp_path / "adapter")
    assert (info.kind, info.scaling) == ("lora", scaling)
    assert info.layout == global_layout(adapted.shape, "lora", RANKS)
    assert adapted.frames is not None
    for target in layout.targets:
        left, right = adapted.frames.of(target, rank_of(info.layout, target))
        assert np.array_equal(back[f"{target}.lora_A"], right)
        assert np.allclose(back[f"{target}.lora_B"], left @ tensors[f"{target}.lora_R"], atol=1e-6)
    adapted.set_client(back, info.layout, Layout(()), info.scaling)
    assert close(predict(adapted), expected)


# Bottleneck adapters


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_bottleneck_folder_gives_back_its_tensors_and_predictions(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture, kind="bottleneck")
    layout, tensors, scaling = draw(adapted)
    adapted.set_client(tensors, layout, layout, scaling)
    expected = predict(adapted)
    save_adapter(tmp_path / "adapter", adapted, layout, tensors, scaling)
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == ["adapter.safetensors", "fedstrata.json"]
    back, info = load_adapter(tmp_path / "adapter")
    assert (info.kind, info.layout, info.scaling, info.label_names) == ("bottleneck", layout, {}, LABELS)
    assert list(back) == list(tensors)
    assert all(np.array_equal(back[n], tensors[n]) for n in tensors)
    again = adapt(tmp_path, architecture, kind="bottleneck")
    again.set_client(back, info.layout, Layout(()), info.scaling)
    assert torch.equal(predict(again), expected)


def test_a_bottleneck_folder_holds_the_whole_head_even_if_it_was_not_trained(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, kind="bottleneck")
    save_adapter(tmp_path / "adapter", adapted, *draw(adapted, {1: 2}))
    stored = load_file(tmp_path / "adapter" / "adapter.safetensors")
    assert set(stored) - {s.name for s in adapted.shape.head} == set(draw(adapted, {1: 2})[1])
    first = adapted.base_tensors(Layout(adapted.shape.head))
    assert all(np.array_equal(stored[n], v) for n, v in first.items())


def test_a_folder_of_an_unknown_kind_is_damaged(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, kind="bottleneck")
    save_adapter(tmp_path / "adapter", adapted, *draw(adapted))
    path = tmp_path / "adapter" / "fedstrata.json"
    path.write_text(path.read_text().replace('"bottleneck"', '"prompt"'))
    with pytest.raises(RunFolderError, match="damaged"):
        load_adapter(tmp_path / "adapter")


# Moved bases


@pytest.mark.parametrize("form", ["factors", "dense"])
@pytest.mark.parametrize(("architecture", "kind"), [(a, "lora") for a in CONFIGS] + [("bert", "square")])
def test_a_moved_base_and_its_pairs_are_one_standard_pair_per_target(
    tmp_path: Path, architecture: str, kind: str, form: str
) -> None:
    adapted = adapt(tmp_path, architecture, kind=kind)
    layout, tensors, scaling = draw(adapted)
    factors = merged(adapted)
    adapted.move_base(dense(factors))
    adapted.set_client(tensors, layout, layout, scaling)
    expected = predict(adapted)
    adapted.move_base({})
    base: Any = factors if form == "factors" else dense(factors)
    save_adapter(tmp_path / "adapter", adapted, layout, tensors, scaling, base=base)
    assert close(predict_by_peft(tmp_path, adapted, architecture), expected)
    back, info = load_adapter(tmp_path / "adapter")
    adapted.set_client(back, info.layout, Layout(()), info.scaling)
    assert close(predict(adapted), expected)
    # as many directions as base and pair have together, in module order, and the pair of the unmoved target unchanged
    ranks = {t.name: RANKS.get(t.block, 0) + 3 for t in adapted.shape.targets} | {adapted.shape.targets[0].name: 2}
    assert {t: rank_of(info.layout, t) for t in info.layout.targets} == ranks
    first = adapted.shape.targets[0].name
    assert dict(info.scaling) == dict.fromkeys(ranks, 1.0) | {first: scaling[first]}
    if kind == "lora":
        assert np.array_equal(back[f"{first}.lora_B"], tensors[f"{first}.lora_B"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert {t: config["rank_pattern"].get(t, config["r"]) for t in ranks} == ranks
    alphas = {t: config["alpha_pattern"].get(t, config["lora_alpha"]) for t in ranks}
    assert {t: a for t, a in alphas.items() if t != first} == {t: r for t, r in ranks.items() if t != first}


def test_pairs_without_an_update_add_no_directions_to_a_moved_base(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    layout, tensors, scaling = draw(adapted)
    tensors |= {s.name: np.zeros(s.shape, np.float32) for s in layout if s.kind == "lora_B"}
    save_adapter(tmp_path / "adapter", adapted, layout, tensors, scaling, base=merged(adapted))
    info = load_adapter(tmp_path / "adapter")[1]
    assert {rank_of(info.layout, t.name) for t in adapted.shape.targets[1:]} == {3}


def test_many_merges_need_no_more_directions_than_the_map_has() -> None:
    target = TargetShape("t", 0, 6, 9)
    rng = np.random.default_rng(0)
    update = LowRank(rng.normal(size=(9, 40)), rng.normal(size=(40, 6)))
    layout = Layout((TensorSpec("t.lora_A", (2, 6), 0, "lora_A"), TensorSpec("t.lora_B", (9, 2), 0, "lora_B")))
    tensors = {s.name: rng.normal(size=s.shape).astype(np.float32) for s in layout}
    expected = update.dense() + 2.5 * tensors["t.lora_B"] @ tensors["t.lora_A"]
    for base in (update, update.dense().astype(np.float32)):
        pairs = as_pairs([target], layout, tensors, {"t": 2.5}, base={"t": base})
        found = pairs.tensors["t.lora_B"] @ pairs.tensors["t.lora_A"]
        assert pairs.layout["t.lora_A"].shape == (6, 6)
        assert pairs.scaling == {"t": 1.0}
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_dense_update_of_zeros_is_a_pair_of_zeros() -> None:
    pairs = as_pairs([TargetShape("t", 4, 6, 9)], Layout(()), {}, {}, base={"t": np.zeros((9, 6), np.float32)})
    assert {s.name: (s.shape, s.stratum) for s in pairs.layout} == {"t.lora_A": ((1, 6), 4), "t.lora_B": ((9, 1), 4)}
    assert not (pairs.tensors["t.lora_B"] @ pairs.tensors["t.lora_A"]).any()


def test_updates_that_cannot_be_saved_are_refused(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, kind="bottleneck")
    with pytest.raises(ModelError, match="no pairs that could hold"):
        save_adapter(tmp_path / "adapter", adapted, *draw(adapted), base=merged(adapted))
    assert not (tmp_path / "adapter").exists()
    target, empty = TargetShape("t", 0, 6, 9), Layout(())
    with pytest.raises(ModelError, match="carries no LoRA pair"):
        as_pairs([target], empty, {}, {}, base={"u": np.zeros((9, 6), np.float32)})
    for wrong in (np.zeros((6, 9), np.float32), np.full((9, 6), np.nan), LowRank(np.ones((9, 2)), np.ones((3, 6)))):
        with pytest.raises(PayloadError, match="does not fit"):
            as_pairs([target], empty, {}, {}, base={"t": wrong})
    square = Layout((TensorSpec("t.lora_R", (2, 2), 0, "lora_R"),))
    with pytest.raises(PlanError, match="not known yet"):
        as_pairs([target], square, square.zeros(), {"t": 1.0}, base={})


# The trainer


def make_trainer(adapted: AdaptedModel, layout: Layout, scaling: Mapping[str, float], seed: int = 5) -> TorchTrainer:
    rng = np.random.default_rng(3)
    texts = Texts([rng.integers(3, 300, 6).astype(np.int32) for _ in range(12)], np.arange(12) % 3)
    return TorchTrainer(
        adapted,
        layout,
        scaling,
        texts,
        train_indices={"a": np.arange(8)},
        validation_indices={},
        splits={"test": np.arange(12)},
        seed=seed,
        threads=1,
        eval_batch_size=4,
    )


def test_the_trainer_scores_a_stored_adapter_on_the_base_as_loaded(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    layout, tensors, scaling = draw(adapted)
    trainer = make_trainer(adapted, layout, scaling)
    factors = {t: (m.left.astype(np.float32), m.right.astype(np.float32)) for t, m in merged(adapted).items()}
    log = BaseLog().append(factors)
    trainer.stand_at(log)
    moved = trainer.score(tensors, "test")
    trainer.stand_at(BaseLog())
    unmoved = trainer.score(tensors, "test")
    save_adapter(tmp_path / "adapter", adapted, layout, tensors, scaling, base=log.dense())
    back, info = load_adapter(tmp_path / "adapter")
    for base in (log, BaseLog()):  # wherever the base stands
        trainer.stand_at(base)
        stored = trainer.score_adapter(back, info.layout, info.scaling, "test")
        assert stored.loss_sum == pytest.approx(moved.loss_sum, rel=1e-5)
        assert (stored.num_examples, stored.num_correct) == (12, moved.num_correct)
    assert abs(unmoved.loss_sum - moved.loss_sum) > 1e-2


@pytest.mark.parametrize("kind", ["square", "bottleneck"])
def test_the_trainer_trains_and_scores_both_kinds(tmp_path: Path, kind: str) -> None:
    config = AdapterConfig(kind=kind, max_rank=4)
    adapt(tmp_path)  # writes the base
    loaded = load_model(ModelConfig(source="bert"), config, label_names=LABELS, seed=0, base_dir=tmp_path)
    adapted = AdaptedModel(loaded, config)
    layout = global_layout(adapted.shape, adapted.adapter.kind, RANKS)
    trainer = make_trainer(adapted, layout, dict.fromkeys(layout.targets, 2.0))
    if kind == "square":  # every side draws the same frames from the run's seed
        expected = drawn_frames(5, adapted.shape.targets, RANKS).to_tensors()
        assert adapted.frames is not None
        assert {n: v.tobytes() for n, v in adapted.frames.to_tensors().items()} == {
            n: v.tobytes() for n, v in expected.items()
        }
    first = trainer.initial(layout)
    assert tuple(first) == layout.names
    before = trainer.score(first, "test")
    task = Task(
        "train", "a", 1, 5, {"0": 1, "2": 3, "head": 1}, learning_rate=0.02,
        train={"local_steps": 8, "batch_size": 4}, objective={"id": "task_loss"}, scaling_power=1.0,
    )  # fmt: skip
    layouts = task.layouts(layout)
    start = {s.name: np.ascontiguousarray(first[s.name][tuple(map(slice, s.shape))]) for s in layouts.present}
    work = trainer.train(task, layouts, start)
    assert tuple(work.tensors) == layouts.present.names
    assert all(np.isfinite(t).all() for t in work.tensors.values())
    moved = {n for n, t in work.tensors.items() if not np.array_equal(t, start[n])}
    # U = 0 at the start: in the first step D has no gradient, afterwards everything has one
    assert moved == set(layouts.trained.names)
    after = trainer.score_adapter(work.tensors, layouts.present, dict.fromkeys(layout.targets, 4.0), "test")
    assert after.loss_sum < before.loss_sum - 0.5
