"""A federation of one client is plain fine-tuning with PEFT."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from fedstrata.record.checkpoint import load_checkpoint
from fedstrata.train.batches import collate, lengths_of, training_batches
from fedstrata.train.model import load_model

CONFIGS: dict[str, dict[str, Any]] = {
    "bert": {},
    "gpt2": {
        "model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"], "vocab_size": 300, "n_embd": 32,
        "n_layer": 3, "n_head": 2, "n_positions": 64, "initializer_range": 0.1,
    },
    "llama": {
        "model_type": "llama", "architectures": ["LlamaForSequenceClassification"], "vocab_size": 300,
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 64, "initializer_range": 0.1,
    },
}  # fmt: skip
ROUNDS, STEPS, RATE, ALPHA = 3, 4, 0.02, 8


def plain_peft(built: Any, folder: Any) -> dict[str, np.ndarray]:
    """The same training in a loop that knows nothing of federations; returns the trained tensors by our names."""
    spec, start = built.spec, built.initial.tensors
    labels = json.loads((folder / "run.json").read_text())["labels"]
    loaded = load_model(spec.model, spec.adapter, label_names=labels, seed=spec.run.seed, base_dir=folder.parent)
    heads = [s.name for s in loaded.shape.head]
    targets = [t.name for t in loaded.shape.targets]
    config = LoraConfig(
        r=spec.adapter.max_rank,
        lora_alpha=ALPHA,
        target_modules=targets,
        modules_to_save=sorted({n.split(".")[0] for n in heads}),
        fan_in_fan_out=any(t.fan_in_fan_out for t in loaded.shape.targets),
    )
    model = get_peft_model(loaded.model, config).eval()
    named = dict(model.named_parameters())
    ours = {
        f"{t}.{f}": named[f"base_model.model.{t}.{f}.default.weight"] for t in targets for f in ("lora_A", "lora_B")
    }
    for name in heads:
        module, _, rest = name.partition(".")
        ours[name] = named[f"base_model.model.{module}.modules_to_save.default.{rest}"]
    assert {id(p) for p in ours.values()} == {id(p) for p in named.values() if p.requires_grad}
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(torch.from_numpy(start[name].copy()))
    examples = built.trainer.examples
    (client,) = built.setup.fleet.clients
    indices = built.trainer._train[client.id]
    for server_round in range(1, ROUNDS + 1):
        optimizer = torch.optim.AdamW(ours.values(), lr=RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
        batches = training_batches(indices, lengths_of(examples, indices), 8, (spec.run.seed, server_round, client.id))
        for _, chosen in zip(range(STEPS), batches, strict=False):
            batch = collate(examples, chosen, loaded.pad_id)
            answers = batch.pop("labels")
            functional.cross_entropy(model(**batch).logits, answers).backward()
            torch.nn.utils.clip_grad_norm_(list(ours.values()), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return {n: p.detach().numpy() for n, p in ours.items()}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_federation_of_one_client_equals_a_plain_peft_loop(runs: Any, architecture: str) -> None:
    if CONFIGS[architecture]:
        (runs.world / "tiny_bert.json").write_text(json.dumps(CONFIGS[architecture]))
    folder = runs(
        "run",
        simulation={"devices": {"laptop-16gb": 1}},
        rounds={"count": ROUNDS},
        train={"local_steps": STEPS, "batch_size": 8, "learning_rate": RATE},
        adapter={"max_rank": 4, "alpha": ALPHA},
    )
    built = runs.built(folder)
    expected = plain_peft(built, folder)
    ours = load_checkpoint(folder / "checkpoint" / "state.safetensors")[0].tensors
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=1e-5, atol=1e-5)
        assert np.abs(tensor - built.initial.tensors[name]).max() > 1e-2  # and something was learnt
