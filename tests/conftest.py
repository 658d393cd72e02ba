"""What all tests share: an offline world, one thread, a tiny model and tiny data that learn in a second."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

LOOPBACK = ("127.", "::1", "localhost")

TINY_BERT = {
    "model_type": "bert",
    "architectures": ["BertForSequenceClassification"],
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}

WORDS = {
    "animals": ["dog", "cat", "cow", "hen"],
    "colors": ["red", "blue", "pink", "teal"],
    "metals": ["iron", "zinc", "lead", "tin"],
}

TINY_EXPERIMENT: dict[str, Any] = {
    "name": "tiny",
    "model": {"source": "config:tiny_bert.json", "max_length": 24},
    "data": {"source": "tiny.jsonl", "validation_fraction": 0.2},
    "adapter": {"max_rank": 4, "alpha": 8},
    "method": {"name": "fedavg"},
    "rounds": {"count": 3, "clients_per_round": 3},
    "train": {"local_steps": 2, "batch_size": 8, "learning_rate": 0.02},
    "simulation": {
        "devices": {"laptop-16gb": 2, "jetson-nx": 2, "jetson-tx2": 2},
        "partition": {"kind": "dirichlet", "alpha": 1.0},
    },
}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection that leaves this machine is an error."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if isinstance(address, tuple) and not str(address[0]).startswith(LOOPBACK):
            raise AssertionError(f"a test reached for the network: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Torch on one thread: results depend on it, and workers run side by side."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_tiny_world(folder: Path) -> None:
    """A three-block BERT's config and 180 texts of three classes."""
    rng = np.random.default_rng(0)
    (folder / "tiny_bert.json").write_text(json.dumps(TINY_BERT))
    lines = []
    for i in range(180):
        label = sorted(WORDS)[i % 3]
        text = " ".join(rng.choice(WORDS[label], 3)) + f" {i}"
        lines.append(json.dumps({"text": text, "label": label, "client": f"site {i % 6}"}))
    (folder / "tiny.jsonl").write_text("\n".join(lines) + "\n")


def tiny_values(**changes: Any) -> dict[str, Any]:
    """The tiny experiment with changes by dotted key (`__` for dots)."""
    values = copy.deepcopy(TINY_EXPERIMENT)
    for key, value in changes.items():
        *tables, last = key.split("__")
        table = values
        for name in tables:
            table = table.setdefault(name, {})
        table[last] = value
    return values


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tiny model and data, and the current folder."""
    write_tiny_world(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny() -> Callable[..., dict[str, Any]]:
    """Makes tiny experiments."""
    return tiny_values


@pytest.fixture
def make_world() -> Callable[[Path], None]:
    """Writes the tiny world into a folder."""
    return write_tiny_world
