"""Fisher scores: every example counts by itself, equal to a backward pass per example."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.client import FisherSums
from fedstrata.core.shape import TargetShape, global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, TensorSpec
from fedstrata.errors import ClientError, DataError, PlanError
from fedstrata.message import Task
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.fisher import FisherOptions, choose_examples, fisher_sums, outer_norms
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
from fedstrata.train.trainer import TorchTrainer

RANKS = {0: 2, 1: 4, 2: 3, HEAD: 1}
BLOCKS = (0, 1, 2)
CONFIGS: dict[str, Any] = {
    "bert": lambda: tf.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=300,
        initializer_range=0.1,
    ),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_inner=48, vocab_size=300, bos_token_id=1, eos_token_id=2,
        initializer_range=0.1,
    ),
    "llama": lambda: tf.LlamaConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        vocab_size=300, initializer_range=0.1,
    ),
}  # fmt: skip


@dataclass
class Texts:
    input_ids: list[np.ndarray]
    labels: np.ndarray
    token_type_ids: None = None
    pixel_values: None = None


def texts(num: int = 14, seed: int = 0) -> Texts:
    """Lengths 3, 6 and 9 in turn: several examples of each go together."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(5, 300, 3 * (1 + i % 3)).astype(np.int32) for i in range(num)]
    return Texts(ids, rng.integers(0, 3, num))


def adapt(folder: Path, architecture: str = "bert", **adapter: Any) -> AdaptedModel:
    CONFIGS[architecture]().to_json_file(folder / f"{architecture}.json")
    config = AdapterConfig(**({"max_rank": 4, "targets": "all-linear"} | adapter))
    source = ModelConfig(source=f"config:{architecture}.json")
    return AdaptedModel(load_model(source, config, label_names=["a", "b", "c"], seed=0, base_dir=folder), config)


def draw(layout: Layout, seed: int = 0) -> NamedTensors:
    rng = np.random.default_rng(seed)
    return {s.name: rng.normal(0, 0.2, s.shape).astype(np.float32) for s in layout}


def put_client(adapted: AdaptedModel) -> Layout:
    """A client with all strata present; what is scored."""
    layout = global_layout(adapted.shape, adapted.adapter.kind, RANKS)
    trained = layout.restrict(BLOCKS)
    tensors = draw(layout) if adapted.adapter.kind == "lora" else adapted.base_tensors(layout)
    adapted.set_client(tensors, layout, trained, dict.fromkeys(layout.targets, 1.5))
    return trained


def by_autograd(adapted: AdaptedModel, examples: Texts, indices: Any, parameters: dict[str, Any]) -> dict[int, float]:
    """Σ_i ‖∇ log softmax(logits(x_i))[y_i]‖² per block: one text, one backward pass, no batch at all."""
    sums = dict.fromkeys(BLOCKS, 0.0)
    for i in indices:
        ids = torch.from_numpy(examples.input_ids[i].astype(np.int64))[None]
        logits = adapted.logits({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        score = torch.log_softmax(logits[0], -1)[int(examples.labels[i])]
        for (block, _), gradient in zip(parameters, torch.autograd.grad(score, [*parameters.values()]), strict=True):
            sums[block] += float((gradient.double() ** 2).sum())
    return sums


def tensors_of(adapted: AdaptedModel, trained: Layout) -> dict[Any, Any]:
    found = adapted.trained_parameters()
    return {(s.stratum, s.name): found[s.name] for s in trained}


def weights_of(adapted: AdaptedModel) -> dict[Any, Any]:
    """The base weights of all targets, made to want a gradient."""
    found = {}
    for target in adapted.shape.targets:
        module: Any = adapted.model.get_submodule(target.name)
        weight = getattr(module, "base_layer", module).weight
        found[(target.block, target.name)] = weight.requires_grad_()
    return found


ROUNDING = 5e-6
"""Float32 gradients: on some processors GPT-2's differ by 1.2e-6 between a batch and single examples."""


@pytest.mark.parametrize("architecture", CONFIGS)
def test_factor_scores_equal_autograd_example_by_example(tmp_path: Path, architecture: str) -> None:
    adapted, examples = adapt(tmp_path, architecture), texts()
    trained = put_client(adapted)
    found = fisher_sums(adapted, examples, np.arange(14), trained=trained, fisher_on="factors")
    expected = by_autograd(adapted, examples, range(14), tensors_of(adapted, trained))
    assert found.count == 14
    assert found.sums == pytest.approx(expected, rel=ROUNDING)
    assert min(found.sums.values()) > 0


@pytest.mark.parametrize("architecture", CONFIGS)
def test_weight_scores_equal_autograd_on_the_whole_weights(tmp_path: Path, architecture: str) -> None:
    adapted, examples = adapt(tmp_path, architecture), texts()
    trained = put_client(adapted)
    found = fisher_sums(adapted, examples, np.arange(14), trained=trained, fisher_on="weight")
    expected = by_autograd(adapted, examples, range(14), weights_of(adapted))
    assert found.sums == pytest.approx(expected, rel=ROUNDING)
    assert min(found.sums.values()) > 0


def test_in_full_tuning_a_block_is_scored_by_all_its_own_weights(tmp_path: Path) -> None:
    adapted, examples = adapt(tmp_path, kind="full"), texts(5)
    trained = put_client(adapted)
    assert any(s.name.endswith("LayerNorm.bias") for s in trained)
    found = fisher_sums(adapted, examples, np.arange(5), trained=trained, fisher_on="factors")
    expected = by_autograd(adapted, examples, range(5), tensors_of(adapted, trained))
    assert found.sums == pytest.approx(expected, rel=1e-6)


def test_a_weight_score_does_not_depend_on_how_the_product_is_factored(tmp_path: Path) -> None:
    # (B·c)(A/c) = BA: the factors' gradients change, the weight's do not.
    adapted, examples = adapt(tmp_path), texts(6)
    layout = global_layout(adapted.shape, "lora", RANKS)
    trained, tensors = layout.restrict(BLOCKS), draw(layout)
    factor = {"lora_A": 0.25, "lora_B": 4.0}
    other = {s.name: tensors[s.name] * np.float32(factor.get(s.kind, 1.0)) for s in layout}
    found: dict[str, list[FisherSums]] = {"factors": [], "weight": []}
    for values in (tensors, other):
        adapted.set_client(values, layout, trained, dict.fromkeys(layout.targets, 1.5))
        found["factors"].append(fisher_sums(adapted, examples, np.arange(6), trained=trained, fisher_on="factors"))
        found["weight"].append(fisher_sums(adapted, examples, np.arange(6), trained=trained, fisher_on="weight"))
    assert found["weight"][0].sums == pytest.approx(found["weight"][1].sums, rel=1e-5)
    assert found["factors"][0].sums != pytest.approx(found["factors"][1].sums, rel=0.1)


def test_only_lora_B_counts_while_it_is_zero(tmp_path: Path) -> None:
    adapted, examples = adapt(tmp_path), texts(6)
    layout = global_layout(adapted.shape, "lora", RANKS)
    zero = {s.name: draw(layout)[s.name] * np.float32(s.kind != "lora_B") for s in layout}
    found = {}
    for kinds in (("lora_A", "lora_B"), ("lora_A",), ("lora_B",)):
        trained = Layout(tuple(s for s in layout if s.kind in kinds))
        adapted.set_client(zero, layout, trained, dict.fromkeys(layout.targets, 1.5))
        found[kinds] = fisher_sums(adapted, examples, np.arange(6), trained=trained, fisher_on="factors").sums
    assert found[("lora_A",)] == dict.fromkeys(BLOCKS, 0.0)
    assert found[("lora_A", "lora_B")] == found[("lora_B",)]
    assert min(found[("lora_B",)].values()) > 0


def test_clients_sums_add_to_the_pooled_score(tmp_path: Path) -> None:
    adapted, examples = adapt(tmp_path), texts(23)
    trained = put_client(adapted)
    for fisher_on in ("factors", "weight"):
        pooled = fisher_sums(adapted, examples, np.arange(23), trained=trained, fisher_on=fisher_on)
        parts = [
            fisher_sums(adapted, examples, rows, trained=trained, fisher_on=fisher_on)
            for rows in (np.arange(7), np.arange(7, 20), np.arange(20, 23))
        ]
        assert sum(p.count for p in parts) == pooled.count
        added = {b: sum(p.sums[b] for p in parts) for b in BLOCKS}
        assert added == pytest.approx(pooled.sums, rel=1e-6)


def test_pictures_are_scored_like_texts(tmp_path: Path) -> None:
    tf.ViTConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=8, patch_size=4,
        initializer_range=0.1,
    ).to_json_file(tmp_path / "vit.json")  # fmt: skip
    config = AdapterConfig(max_rank=4, targets="all-linear")
    source = ModelConfig(source="config:vit.json")
    adapted = AdaptedModel(load_model(source, config, label_names=["a", "b"], seed=0, base_dir=tmp_path), config)
    pixels = np.random.default_rng(0).normal(size=(11, 3, 8, 8)).astype(np.float32)
    pictures = SimpleNamespace(input_ids=None, token_type_ids=None, pixel_values=pixels, labels=np.arange(11) % 2)
    trained = put_client(adapted)
    found = fisher_sums(adapted, pictures, np.arange(11), trained=trained, fisher_on="factors")
    expected = dict.fromkeys(BLOCKS, 0.0)
    for i in range(11):
        logits = adapted.logits({"pixel_values": torch.from_numpy(pixels[i : i + 1])})
        score = torch.log_softmax(logits[0], -1)[i % 2]
        tensors = tensors_of(adapted, trained)
        for (block, _), gradient in zip(tensors, torch.autograd.grad(score, [*tensors.values()]), strict=True):
            expected[block] += float((gradient.double() ** 2).sum())
    assert found.sums == pytest.approx(expected, rel=1e-6)


class Shuffling(torch.nn.Module):
    """Calls its map with the tokens of all texts in one row, sorted by place, as mixtures of experts do by expert."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(3)
        self.table = torch.nn.Parameter(torch.from_numpy(rng.normal(size=(300, 6)).astype(np.float32)))
        self.map, self.head = torch.nn.Linear(6, 5), torch.nn.Linear(5, 3)
        for parameter in (*self.map.parameters(), *self.head.parameters()):
            parameter.data = torch.from_numpy(rng.normal(size=parameter.shape).astype(np.float32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        row = self.table[ids].transpose(0, 1).flatten(0, 1)
        scores: torch.Tensor = self.head(self.map(row).unflatten(0, ids.T.shape).tanh().mean(0))
        return scores


def test_examples_whose_tokens_the_model_mixes_go_alone() -> None:
    model, examples = Shuffling(), texts()
    adapted: Any = SimpleNamespace(
        model=model, pad_id=0, logits=lambda batch: model(batch["input_ids"]),
        shape=SimpleNamespace(targets=(TargetShape("map", 0, 6, 5),)),
    )  # fmt: skip
    trained = Layout((TensorSpec("map.weight", (5, 6), 0),))
    found = fisher_sums(adapted, examples, np.arange(14), trained=trained, fisher_on="weight")
    expected = by_autograd(adapted, examples, range(14), {(0, "map.weight"): model.map.weight})
    assert found.sums[0] == pytest.approx(expected[0], rel=1e-6)


@given(
    num=st.integers(1, 3), tokens=st.integers(1, 12), n_out=st.integers(1, 6), n_in=st.integers(1, 6),
    seed=st.integers(0, 999),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_both_ways_to_the_norm_of_a_sum_of_outer_products_agree(
    num: int, tokens: int, n_out: int, n_in: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    delta, x = rng.normal(size=(num, tokens, n_out)), rng.normal(size=(num, tokens, n_in))
    expected = [float((sum(np.outer(delta[i, t], x[i, t]) for t in range(tokens)) ** 2).sum()) for i in range(num)]
    assert outer_norms(torch.from_numpy(delta), torch.from_numpy(x)).tolist() == pytest.approx(expected, rel=1e-10)


def test_no_weight_sized_matrix_is_formed_per_example_where_texts_are_short() -> None:
    sizes: list[int] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                sizes.append(result[0].numel() if result.dim() > 1 else 1)
            return result

    with Watch():
        outer_norms(torch.ones(2, 4, 512), torch.ones(2, 4, 512))
    assert max(sizes) == 4 * 512  # not 512 · 512


def test_exactly_the_number_of_examples_asked_for_is_used() -> None:
    rows = np.array([3, 1, 8, 5, 9, 2])
    assert choose_examples(rows, None, 0, "a").tolist() == [1, 2, 3, 5, 8, 9]
    assert choose_examples(rows, 6, 0, "a").tolist() == choose_examples(rows, 99, 0, "a").tolist()
    for count in range(1, 6):
        chosen = choose_examples(rows, count, 0, "a").tolist()
        assert len(set(chosen)) == count
        assert set(chosen) <= set(rows.tolist())
        # the first of a permutation: more examples are more of the same
        assert set(chosen) < set(choose_examples(rows, count + 1, 0, "a").tolist())
    many = np.arange(1000)
    assert choose_examples(many, 10, 0, "a").tolist() != choose_examples(many, 10, 0, "b").tolist()
    assert choose_examples(many, 10, 0, "a").tolist() != choose_examples(many, 10, 1, "a").tolist()
    assert choose_examples(many, 10, 0, "a").tolist() == choose_examples(many[::-1], 10, 0, "a").tolist()


@pytest.mark.parametrize("fisher_on", ["factors", "weight"])
def test_scoring_leaves_the_model_as_it_was(tmp_path: Path, fisher_on: Any) -> None:
    adapted, examples = adapt(tmp_path), texts(4)
    trained = put_client(adapted)

    def state() -> list[Any]:
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in adapted.model.modules()]
        flags = [(p.requires_grad, p.grad is None) for p in adapted.model.parameters()]
        return [hooks, flags, [m.training for m in adapted.model.modules()], torch.is_grad_enabled()]

    values = [p.detach().clone() for p in adapted.model.parameters()]
    before = state()
    fisher_sums(adapted, examples, np.arange(4), trained=trained, fisher_on=fisher_on)
    assert state() == before
    assert all(torch.equal(a, b) for a, b in zip(values, adapted.model.parameters(), strict=True))


def test_nothing_to_score_with_is_an_error(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    trained = put_client(adapted)
    with pytest.raises(ClientError, match="no example"):
        fisher_sums(adapted, texts(1), np.empty(0, np.int64), trained=trained, fisher_on="factors")


def test_a_gradient_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    layout = global_layout(adapted.shape, "lora", RANKS)
    huge = {n: t * np.float32(1e20) for n, t in draw(layout).items()}
    adapted.set_client(huge, layout, layout.restrict(BLOCKS), dict.fromkeys(layout.targets, 1e10))
    with pytest.raises(ClientError, match="not finite"):
        fisher_sums(adapted, texts(2), np.arange(2), trained=layout.restrict(BLOCKS), fisher_on="factors")


def trainer_of(adapted: AdaptedModel, examples: Texts, **options: Any) -> TorchTrainer:
    layout = global_layout(adapted.shape, "lora", RANKS)
    return TorchTrainer(
        adapted, layout, dict.fromkeys(layout.targets, 1.5), examples,
        train_indices={"a": np.arange(4)}, validation_indices={}, splits={"test": np.arange(4)},
        seed=0, threads=1, eval_batch_size=4, **options,
    )  # fmt: skip


def probe(client: str = "a", **options: Any) -> Task:
    asked = {"source": "client_heldout", "fisher_on": "factors", "examples": None, "strata": [0, 1, 2]}
    return Task("fisher", client, 3, 0, ranks={}, reads={str(s): r for s, r in RANKS.items()}, options=asked | options)


def test_a_client_answers_with_its_held_out_examples_and_the_model_is_reset(tmp_path: Path) -> None:
    adapted, examples = adapt(tmp_path), texts()
    trainer = trainer_of(adapted, examples, proxy_indices={"a": np.array([4, 9, 11]), "b": np.array([5])})
    tensors, task = draw(trainer.server_layout), probe(strata=[0, 2])
    found = trainer.fisher(task, task.layouts(trainer.server_layout), tensors)
    assert adapted.trained_set() == ()
    trained = put_client(adapted)  # the same values
    everything = fisher_sums(adapted, examples, np.array([4, 9, 11]), trained=trained, fisher_on="factors")
    assert found.count == 3
    assert found.sums == {b: everything.sums[b] for b in (0, 2)}


def test_a_client_uses_no_more_examples_than_asked_for(tmp_path: Path) -> None:
    adapted, examples = adapt(tmp_path), texts()
    trainer = trainer_of(adapted, examples, proxy_indices={"a": np.arange(4, 14)})
    tensors = draw(trainer.server_layout)
    for count, used in ((1, 1), (7, 7), (10, 10), (32, 10), (None, 10)):
        task = probe(examples=count)
        assert trainer.fisher(task, task.layouts(trainer.server_layout), tensors).count == used


def test_a_clients_scaling_follows_its_rank_as_in_training(tmp_path: Path) -> None:
    # s_k = 1.5·(4/2)^1 = 3 for block 1, cut from rank 4 to 2
    adapted, examples = adapt(tmp_path), texts()
    trainer = trainer_of(adapted, examples, proxy_indices={"a": np.arange(4, 8)})
    reads = {"1": 2, "head": 1}
    task = Task("fisher", "a", 1, 0, ranks={}, reads=reads, scaling_power=1.0, options=probe(strata=[1]).options)
    layouts = task.layouts(trainer.server_layout)
    tensors = draw(layouts.present)
    found = trainer.fisher(task, layouts, tensors)
    trained = layouts.present.restrict([1])
    adapted.set_client(tensors, layouts.present, trained, dict.fromkeys(layouts.present.targets, 3.0))
    assert found == fisher_sums(adapted, examples, np.arange(4, 8), trained=trained, fisher_on="factors")


def test_the_server_scores_with_examples_of_its_own(tmp_path: Path) -> None:
    adapted, public = adapt(tmp_path), texts(9, seed=5)
    trainer = trainer_of(adapted, texts(), server_proxies={"public": public})
    tensors = draw(trainer.server_layout)
    found = trainer.fisher_of_server(tensors, probe(source="public", fisher_on="weight").options)
    trained = put_client(adapted)
    assert found == fisher_sums(adapted, public, np.arange(9), trained=trained, fisher_on="weight")
    assert trainer.fisher_of_server(tensors, probe(source="public", examples=4).options).count == 4
    with pytest.raises(DataError, match='no "other_domain" examples'):
        trainer.fisher_of_server(tensors, probe(source="other_domain").options)


def test_a_client_without_held_out_examples_or_asked_for_the_servers_fails(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    trainer = trainer_of(adapted, texts(), proxy_indices={"a": np.arange(3)})
    tensors = draw(trainer.server_layout)
    for task, message in ((probe("b"), "held out no examples"), (probe(source="public"), 'no "public" examples')):
        with pytest.raises(ClientError, match=message):
            trainer.fisher(task, task.layouts(trainer.server_layout), tensors)


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ("source", None), ("fisher_on", "all"), ("examples", 0), ("examples", True), ("examples", 2.5), ("strata", []),
        ("strata", [1]), ("strata", ["0"]), ("strata", [[0]]), ("strata", [True]), ("strata", None),
    ],
)  # fmt: skip
def test_a_question_that_makes_no_sense_names_what_is_wrong(wrong: str, value: Any) -> None:
    layout = Layout((TensorSpec("x.lora_B", (4, 2), 0, "lora_B"), TensorSpec("y.lora_B", (4, 2), 2, "lora_B")))
    right = {"source": "public", "fisher_on": "weight", "examples": 3, "strata": [2, 0]}
    assert FisherOptions.parse(right, layout) == FisherOptions("public", "weight", 3, (0, 2))
    with pytest.raises(PlanError, match=f"cannot be answered: {wrong}"):
        FisherOptions.parse(right | {wrong: value}, layout)
