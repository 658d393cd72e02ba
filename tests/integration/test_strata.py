"""Blocks, strata and targets of real architectures, with random weights or none at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from fedstrata.core.shape import global_layout
from fedstrata.errors import ModelError
from fedstrata.method import METHODS
from fedstrata.train.config import AdapterConfig
from fedstrata.train.strata import find_blocks, shape_of

SENDS = ("delta", "weights")
SMALL = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = SMALL | {"vocab_size": 300}
CONFIGS: dict[str, Any] = {
    "bert": lambda n: tf.BertConfig(**TEXT, num_hidden_layers=n),
    "roberta": lambda n: tf.RobertaConfig(**TEXT, num_hidden_layers=n, max_position_embeddings=40),
    "distilbert": lambda n: tf.DistilBertConfig(dim=32, n_heads=4, hidden_dim=48, vocab_size=300, n_layers=n),
    "gpt2": lambda n: tf.GPT2Config(
        n_embd=32, n_head=4, vocab_size=300, n_layer=n, bos_token_id=1, eos_token_id=2, pad_token_id=2
    ),
    "llama": lambda n: tf.LlamaConfig(**TEXT, num_hidden_layers=n, num_key_value_heads=2, pad_token_id=2),
    "vit": lambda n: tf.ViTConfig(**SMALL, num_hidden_layers=n, image_size=16, patch_size=8),
    "electra": lambda n: tf.ElectraConfig(**TEXT, num_hidden_layers=n, embedding_size=16),
    "mpnet": lambda n: tf.MPNetConfig(**TEXT, num_hidden_layers=n),
}
# list of blocks; attention maps of one block; number of linear maps of one block; head in full tuning (prefixes)
EXPECTED: dict[str, tuple[str, list[str], int, tuple[str, ...]]] = {
    "bert": (
        "bert.encoder.layer",
        ["attention.self.query", "attention.self.value"],
        6,
        ("bert.pooler", "classifier"),
    ),
    "roberta": ("roberta.encoder.layer", ["attention.self.query", "attention.self.value"], 6, ("classifier",)),
    "distilbert": (
        "distilbert.transformer.layer",
        ["attention.q_lin", "attention.v_lin"],
        6,
        ("pre_classifier", "classifier"),
    ),
    "gpt2": ("transformer.h", ["attn.c_attn"], 4, ("transformer.ln_f", "score")),
    "llama": ("model.layers", ["self_attn.q_proj", "self_attn.v_proj"], 7, ("model.norm", "score")),
    "vit": ("vit.layers", ["attention.q_proj", "attention.v_proj"], 6, ("vit.layernorm", "classifier")),
    "electra": ("electra.encoder.layer", ["attention.self.query", "attention.self.value"], 6, ("classifier",)),
    "mpnet": ("mpnet.encoder.layer", ["attention.attn.q", "attention.attn.v"], 6, ("classifier",)),
}


def build(architecture: str, num_blocks: int = 2) -> Any:
    config = CONFIGS[architecture](num_blocks)
    auto = tf.AutoModelForImageClassification if architecture == "vit" else tf.AutoModelForSequenceClassification
    with torch.device("meta"):
        return auto.from_config(config)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_parameter_belongs_to_the_stratum_that_its_module_path_says(architecture: str) -> None:
    model = build(architecture, 3)
    path, _, _, head = EXPECTED[architecture]
    shape = shape_of(model, AdapterConfig())
    assert [p.name for p in shape.parameters] == [n for n, _ in model.named_parameters()]
    for spec in shape.parameters:
        if spec.name.startswith(path + "."):
            expected: Any = int(spec.name.removeprefix(path + ".").split(".")[0])
        else:
            expected = "head" if spec.name.startswith(head) else "embeddings"
        assert spec.stratum == expected, spec.name


@pytest.mark.parametrize("architecture", CONFIGS)
def test_attention_targets_are_the_query_and_value_maps_of_every_block(architecture: str) -> None:
    path, maps, _, _ = EXPECTED[architecture]
    shape = shape_of(build(architecture, 2), AdapterConfig())
    assert [(t.name, t.block) for t in shape.targets] == [(f"{path}.{i}.{m}", i) for i in range(2) for m in maps]


@pytest.mark.parametrize("architecture", CONFIGS)
def test_all_linear_takes_every_linear_map_of_the_blocks_and_none_outside(architecture: str) -> None:
    path, _, per_block, _ = EXPECTED[architecture]
    shape = shape_of(build(architecture, 2), AdapterConfig(targets="all-linear"))
    assert len(shape.targets) == 2 * per_block
    assert all(t.name.startswith(f"{path}.{t.block}.") for t in shape.targets)


def test_block_1_of_12_is_not_block_10_or_11() -> None:
    shape = shape_of(build("bert", 12), AdapterConfig(max_rank=4))
    assert shape.num_blocks == 12
    layout = global_layout(shape, "lora", {1: 4})
    assert {s.target.split(".")[3] for s in layout} == {"1"}
    assert len(layout) == 4  # A and B of query and value
    assert {t.block for t in shape.targets} == set(range(12))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_parameters_of_12_blocks_are_told_apart_by_position(architecture: str) -> None:
    """In full tuning, too: freezing block 1 must leave 10 and 11 alone."""
    path = EXPECTED[architecture][0]
    shape = shape_of(build(architecture, 12), AdapterConfig())
    assert shape.num_blocks == 12
    for spec in shape.parameters:
        if isinstance(spec.stratum, int):
            assert spec.name.startswith(f"{path}.{spec.stratum}."), spec.name
    assert len({sum(p.stratum == b for p in shape.parameters) for b in range(12)}) == 1
    one = global_layout(shape, "full", {1: 1})
    assert {s.name.removeprefix(path + ".").split(".")[0] for s in one if s.stratum == 1} == {"1"}
    assert all(s.stratum == 1 for s in one if s.name.startswith(path))


def test_a_published_size_of_an_adapter_is_ours() -> None:
    """Llama-2-7B, rank 64 on all seven maps: 159.9 million numbers, as many in a difference as in the weights."""
    with torch.device("meta"):
        model = tf.LlamaForSequenceClassification(
            tf.LlamaConfig(
                vocab_size=32000,
                hidden_size=4096,
                intermediate_size=11008,
                num_hidden_layers=32,
                num_attention_heads=32,
            )
        )
    shape = shape_of(model, AdapterConfig(max_rank=64, targets="all-linear"))
    layout = global_layout(shape, "lora", {b: 64 for b in range(32)})
    assert len(shape.targets) == 32 * 7
    assert layout.num_values == 159_907_840
    delta, weights = (METHODS.build("gradualdiff", {"send": send}).codec.max_bytes(layout) for send in SENDS)
    assert delta == weights == (4 * 159_907_840 // 64, 159_907_840 // 2)


def test_conv1d_and_grouped_heads_have_their_true_sizes() -> None:
    fused = shape_of(build("gpt2"), AdapterConfig()).targets[0]
    assert (fused.in_features, fused.out_features, fused.fan_in_fan_out) == (32, 96, True)  # 3 * 32: query, key, value
    value = shape_of(build("llama"), AdapterConfig()).targets[1]
    assert (value.in_features, value.out_features, value.fan_in_fan_out) == (32, 16, False)  # 2 of 4 heads of 8


def test_sizes_of_the_model_are_its_own() -> None:
    model = build("bert")
    shape = shape_of(model, AdapterConfig(), missing={"bert.pooler.dense.weight", "bert.pooler.dense.bias"})
    assert (shape.architecture, shape.block_class, shape.hidden_size) == (
        "BertForSequenceClassification",
        "BertLayer",
        32,
    )
    assert shape.num_parameters == sum(p.numel() for p in model.parameters())
    head_values = (32 * 32 + 32) + (2 * 32 + 2)  # pooler and classifier
    assert sum(s.num_values for s in shape.head) == head_values
    assert shape.base_bytes == 4 * (shape.num_parameters - head_values)


def test_positions_before_the_padding_index_do_not_count() -> None:
    assert shape_of(build("roberta"), AdapterConfig()).max_positions == 38  # 40 - padding index 1 - 1
    assert shape_of(build("bert"), AdapterConfig()).max_positions == 512
    assert shape_of(build("vit"), AdapterConfig()).max_positions is None


def test_named_targets_are_matched_by_their_last_parts() -> None:
    shape = shape_of(build("bert"), AdapterConfig(targets=["key", "attention.output.dense"]))
    assert [t.name.split(".", 4)[4] for t in shape.targets] == ["attention.self.key", "attention.output.dense"] * 2


def test_an_unknown_target_gets_the_nearest_name() -> None:
    with pytest.raises(ModelError, match='did you mean "query"'):
        shape_of(build("bert"), AdapterConfig(targets=["quary"]))


def test_a_model_without_query_maps_says_what_its_blocks_hold() -> None:
    with pytest.raises(ModelError, match="holds dense, down, up"):
        shape_of(Toy(["up", "down", "dense"]), AdapterConfig())


def test_shared_blocks_are_refused_with_what_was_found() -> None:
    config = tf.AlbertConfig(**TEXT, num_hidden_layers=12, embedding_size=16)
    with torch.device("meta"):
        model = tf.AutoModelForSequenceClassification.from_config(config)
    with pytest.raises(ModelError, match=r"albert_layer_groups: 1 x AlbertLayerGroup") as caught:
        shape_of(model, AdapterConfig())
    assert "12 blocks" in str(caught.value)


def test_lists_inside_a_block_are_not_taken_for_the_blocks() -> None:
    assert find_blocks(Toy(["query", "value"], num_experts=8)).path == "base.blocks"


def test_two_stacks_of_equal_length_are_refused() -> None:
    model = Toy(["query", "value"])
    model.base.others = nn.ModuleList(nn.Linear(4, 4) for _ in model.base.blocks)
    with pytest.raises(ModelError, match=r"base\.others: 3 x Linear"):
        find_blocks(model)


def test_a_head_tied_to_the_embeddings_is_no_head() -> None:
    model = Toy(["query", "value"])
    assert [s.name for s in shape_of(model, AdapterConfig()).head] == ["score.weight"]
    model.score.weight = model.base.words.weight
    shape = shape_of(model, AdapterConfig())
    assert shape.head == ()
    assert {s.name: s.stratum for s in shape.parameters}["base.words.weight"] == "embeddings"


def test_a_checkpoint_without_a_blocks_weights_is_refused() -> None:
    with pytest.raises(ModelError, match="does not fit BertForSequenceClassification"):
        shape_of(build("bert"), AdapterConfig(), missing={"bert.encoder.layer.1.output.dense.weight"})


class Toy(nn.Module):
    """Three blocks with maps of the given names, each with a list of experts."""

    def __init__(self, names: list[str], num_experts: int = 0) -> None:
        super().__init__()
        self.base: Any = nn.Module()
        self.base.words = nn.Embedding(5, 4)
        self.base.blocks = nn.ModuleList()
        for _ in range(3):
            block: Any = nn.ModuleDict({n: nn.Linear(4, 4) for n in names})
            if num_experts:
                block["experts"] = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_experts))
            self.base.blocks.append(block)
        self.score: Any = nn.Linear(4, 5, bias=False)
