"""Loading models: sources, task heads from named streams, padding, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from fedstrata.core.rng import generator
from fedstrata.errors import AssetError, ModelError
from fedstrata.train.byte_tokenizer import byte_tokenizer
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.model import LoadedModel, load_model
from fedstrata.train.source import resolve_source

LABELS = ("business", "sport", "tech")
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.1,
}


def write_config(folder: Path, **changes: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BERT | changes))
    return "config:config.json"


def load(base_dir: Path, source: str, *, seed: int = 0, labels: tuple[str, ...] = LABELS) -> LoadedModel:
    return load_model(ModelConfig(source=source), AdapterConfig(), label_names=labels, seed=seed, base_dir=base_dir)


def weights(loaded: LoadedModel) -> dict[str, np.ndarray]:
    return {n: p.detach().numpy().copy() for n, p in loaded.model.named_parameters()}


def save_bert(folder: Path, *, pooler: bool = True) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = tf.BertModel(tf.BertConfig.from_dict(BERT), add_pooling_layer=pooler)
    model.save_pretrained(folder)
    return str(folder)


def test_a_configuration_gives_the_same_weights_for_the_same_seed_whatever_torch_does(tmp_path: Path) -> None:
    source = write_config(tmp_path)
    torch.manual_seed(5)
    first = weights(load(tmp_path, source))
    torch.manual_seed(6)
    second = weights(load(tmp_path, source))
    other = weights(load(tmp_path, source, seed=1))
    assert all(np.array_equal(first[n], second[n]) for n in first)
    assert not np.array_equal(
        first["bert.encoder.layer.0.output.dense.weight"], other["bert.encoder.layer.0.output.dense.weight"]
    )


def test_loading_leaves_torchs_random_state_alone(tmp_path: Path) -> None:
    source = write_config(tmp_path)
    before = torch.random.get_rng_state()
    load(tmp_path, source)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_head_is_drawn_from_its_named_stream(tmp_path: Path) -> None:
    loaded = load(tmp_path, save_bert(tmp_path / "base"), seed=3)
    head = weights(loaded)["classifier.weight"]
    expected = generator(3, "head_init", "classifier.weight").standard_normal((3, 32), dtype=np.float32)
    assert np.array_equal(head, expected * np.float32(0.02))  # N(0, initializer_range)
    assert not weights(loaded)["classifier.bias"].any()


def test_what_the_checkpoint_lacks_belongs_to_the_head(tmp_path: Path) -> None:
    whole = load(tmp_path, save_bert(tmp_path / "whole"))
    assert [s.name for s in whole.shape.head] == ["classifier.weight", "classifier.bias"]
    bare = load(tmp_path, save_bert(tmp_path / "bare", pooler=False))
    pooler = ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    assert [s.name for s in bare.shape.head] == [*pooler, "classifier.weight", "classifier.bias"]
    assert set(pooler) < set(bare.missing)
    expected = generator(0, "head_init", pooler[0]).standard_normal((32, 32), dtype=np.float32) * np.float32(0.02)
    assert np.array_equal(weights(bare)[pooler[0]], expected)


def test_the_base_of_a_checkpoint_is_loaded_unchanged(tmp_path: Path) -> None:
    folder = save_bert(tmp_path / "base")
    loaded = weights(load(tmp_path, folder))
    for name, value in tf.BertModel.from_pretrained(folder).named_parameters():
        assert np.array_equal(loaded[f"bert.{name}"], value.detach().numpy())


def test_a_trained_head_is_kept_for_the_same_labels_and_drawn_afresh_for_others(tmp_path: Path) -> None:
    names = dict(enumerate(LABELS))
    config = tf.BertConfig.from_dict(BERT | {"id2label": names, "label2id": {n: i for i, n in names.items()}})
    model = tf.BertForSequenceClassification(config)
    model.save_pretrained(tmp_path / "tuned")
    kept = load(tmp_path, "tuned")
    assert torch.equal(kept.model.get_parameter("classifier.weight"), model.classifier.weight)
    for labels in (("a", "b", "c"), ("a", "b")):
        fresh = load(tmp_path, "tuned", labels=labels)
        drawn = generator(0, "head_init", "classifier.weight").standard_normal((len(labels), 32), dtype=np.float32)
        assert np.array_equal(weights(fresh)["classifier.weight"], drawn * np.float32(0.02))


def test_the_model_is_deterministic_float32_and_frozen(tmp_path: Path) -> None:
    model = load(tmp_path, write_config(tmp_path)).model
    assert not any(m.training for m in model.modules())
    assert all(m.p == 0.0 for m in model.modules() if isinstance(m, torch.nn.Dropout))
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.float32, False)}


def test_a_configuration_comes_with_a_byte_tokenizer_that_fits(tmp_path: Path) -> None:
    loaded = load(tmp_path, write_config(tmp_path))
    encoded = loaded.tokenizer(["é!", "long enough"], padding=True)
    assert len(encoded["input_ids"][0]) == len(encoded["input_ids"][1]) == 2 + len("long enough")
    assert sum(encoded["attention_mask"][0]) == 2 + len("é!".encode())  # [CLS], three bytes, [SEP]
    assert max(loaded.tokenizer.get_vocab().values()) < 300
    assert loaded.tokenizer.decode(encoded["input_ids"][0], skip_special_tokens=True) == "é!"
    assert loaded.pad_id == loaded.tokenizer.pad_token_id == encoded["input_ids"][0][-1]


def test_the_byte_tokenizer_takes_the_padding_id_that_the_model_fixes() -> None:
    tokenizer = byte_tokenizer(260, pad_id=1)
    vocab = tokenizer.get_vocab()
    assert tokenizer.pad_token_id == 1
    assert sorted(vocab.values()) == list(range(260))
    with pytest.raises(ModelError, match="at least 260"):
        byte_tokenizer(259)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_a_decoder_without_a_padding_token_gets_one_and_scores_a_batch(tmp_path: Path, model_type: str) -> None:
    common = {"vocab_size": 300, "bos_token_id": 1, "eos_token_id": 2}
    config = (
        tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, **common)
        if model_type == "gpt2"
        else tf.LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **common)
    )
    tf.AutoModel.from_config(config).save_pretrained(tmp_path / "decoder")
    loaded = load(tmp_path, "decoder")
    assert loaded.pad_id == 2
    assert any("padded" in note for note in loaded.notes)
    batch = torch.tensor([[5, 6, 7], [5, 2, 2]])
    with torch.inference_mode():
        both = loaded.model(input_ids=batch, attention_mask=(batch != 2).long()).logits
        alone = loaded.model(input_ids=batch[1:, :1]).logits
    assert torch.allclose(both[1], alone[0], atol=1e-6)


def test_the_identity_follows_the_files_of_the_base(tmp_path: Path) -> None:
    folder = Path(save_bert(tmp_path / "base"))
    first = load(tmp_path, "base").identity
    assert first == load(tmp_path, str(folder), seed=9).identity
    path = folder / "config.json"
    path.write_text(path.read_text() + "\n")
    assert load(tmp_path, "base").identity != first


def test_sources_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "org").mkdir()
    assert resolve_source("org/name", tmp_path, "v1").kind == "hub"
    save_bert(tmp_path / "org" / "name")
    found = resolve_source("org/name", tmp_path)
    assert (found.kind, found.location) == ("folder", str(tmp_path / "org" / "name"))
    write_config(tmp_path / "sub")
    assert resolve_source("config:sub/config.json", tmp_path).kind == "config"


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("./nowhere", AssetError, "is missing"),
        ("config:nowhere.json", AssetError, "is missing"),
        ("package:nothing", AssetError, "nothing"),
        ("two words", ModelError, "names no model"),
        ("empty", AssetError, "no config.json"),
    ],
)
def test_a_source_that_cannot_be_found_says_so(tmp_path: Path, source: str, error: type[Exception], words: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(error, match=words):
        load(tmp_path, source)


def test_models_that_are_no_classifiers_of_one_stack_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path / "t5", model_type="t5")
    with pytest.raises(ModelError, match="encoder-decoder"):
        load(tmp_path / "t5", "config:config.json")
    write_config(tmp_path / "clip", model_type="whisper_like_nothing")
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path / "clip", "config:config.json")
    write_config(tmp_path)
    with pytest.raises(ModelError, match="at least two labels"):
        load(tmp_path, "config:config.json", labels=("one",))


def test_a_folder_without_weights_names_what_to_do(tmp_path: Path) -> None:
    write_config(tmp_path / "bare")
    with pytest.raises(AssetError, match="safetensors"):
        load(tmp_path, "bare")


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    path = Path(save_bert(tmp_path / "base")) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ModelError, match=r"weights of .* cannot be loaded"):
        load(tmp_path, "base")
