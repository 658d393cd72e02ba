"""A trainer in parts that another process can have: small descriptions, and large arrays that all share.

The arrays are the base model's weights and the encoded examples. A worker builds the model without weights and puts the
shared ones in their place; nothing of them is copied until something is trained in full.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.core.merges import BaseLog
from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.data.task import EncodedDataset
from fedstrata.errors import EngineError
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import LoadedModel, quiet_transformers
from fedstrata.train.trainer import TorchTrainer

_PARTS = ("train", "validation", "proxy", "splits")


@dataclass(frozen=True, eq=False)
class ModelParts:
    """A loaded model without its numbers.

    Attributes:
        model_class: Its class in transformers.
        model_config: What transformers makes it from.
        shape: Its sizes.
        config: What was asked for.
        label_names: Class names by label number.
        missing: Parameters that the checkpoint did not contain.
        identity: SHA-256 over the files of the base.
        aliases: Names of shared parameters, and the name under which the array stands.
    """

    model_class: Any
    model_config: Any
    shape: ModelShape
    config: ModelConfig
    label_names: tuple[str, ...]
    missing: tuple[str, ...]
    identity: str
    aliases: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class TrainerParts:
    """A `TorchTrainer` without its arrays.

    Attributes:
        model: Of the base model.
        adapter: What is added to it.
        layout: The server's tensors.
        scaling: LoRA scaling per target.
        owners: Whose example indices stand behind each other, per kind of indices.
        num_truncated: Examples that were cut.
        max_length: Longest input.
        seed: The run's.
        threads: CPU threads.
        eval_batch_size: Examples per forward pass of an evaluation.
        reuse_memory_bytes: What a worker may keep of hidden states.
    """

    model: ModelParts
    adapter: AdapterConfig
    layout: Layout
    scaling: Mapping[str, float]
    owners: Mapping[str, tuple[str, ...]]
    num_truncated: int
    max_length: int
    seed: int
    threads: int
    eval_batch_size: int
    reuse_memory_bytes: int


def weights_of(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    """Every parameter and buffer as loaded, by name, not copied; call it before anything is added to the model."""
    model = loaded.model
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.data for name, tensor in named}


def model_parts(loaded: LoadedModel, weights: Mapping[str, torch.Tensor]) -> tuple[ModelParts, NamedTensors]:
    """A model's parts and arrays."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    aliases: dict[str, str] = {}
    arrays: NamedTensors = {}
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            arrays[f"weights/{name}"] = tensor.numpy()
    parts = ModelParts(
        type(loaded.model),
        loaded.model.config,
        loaded.shape,
        loaded.config,
        loaded.label_names,
        loaded.missing,
        loaded.identity,
        aliases,
    )
    return parts, arrays


def trainer_arrays(
    examples: EncodedDataset, indices: Mapping[str, Mapping[str, np.ndarray]]
) -> tuple[dict[str, tuple[str, ...]], NamedTensors]:
    """Whose indices there are, and the arrays of examples and indices."""
    arrays: NamedTensors = {"tokens": examples.tokens, "offsets": examples.offsets, "labels": examples.labels}
    if examples.type_ids is not None:
        arrays["type_ids"] = examples.type_ids
    owners = {}
    for part in _PARTS:
        lists = [np.asarray(i, np.int64) for i in indices[part].values()]
        owners[part] = tuple(indices[part])
        arrays[f"{part}/values"] = np.concatenate([*lists, np.empty(0, np.int64)])
        arrays[f"{part}/ends"] = np.cumsum([len(i) for i in lists], dtype=np.int64)
    return owners, arrays


def open_trainer(parts: TrainerParts, arrays: Mapping[str, np.ndarray]) -> TorchTrainer:
    """The trainer that parts and arrays make; it works on the arrays where they lie."""
    torch.set_num_threads(parts.threads)
    examples = EncodedDataset(
        arrays["tokens"],
        arrays["offsets"],
        arrays["labels"],
        arrays.get("type_ids"),
        parts.num_truncated,
        parts.max_length,
    )
    indices = {part: _split(parts.owners[part], arrays, part) for part in _PARTS}
    return TorchTrainer(
        AdaptedModel(_open_model(parts.model, arrays), parts.adapter),
        parts.layout,
        parts.scaling,
        examples,
        train_indices=indices["train"],
        validation_indices=indices["validation"],
        proxy_indices=indices["proxy"],
        splits=indices["splits"],
        seed=parts.seed,
        threads=parts.threads,
        eval_batch_size=parts.eval_batch_size,
        reuse_memory_bytes=parts.reuse_memory_bytes,
    )


def condensed(log: BaseLog, adapter: AdapterConfig) -> BaseLog:
    """What a trainer needs of a log to stand at its number: the sums, or the frozen factors around square matrices."""
    if adapter.kind == "square" or not log.number:
        return log
    return BaseLog(log.number, log.number, log.dense())


def _open_model(parts: ModelParts, arrays: Mapping[str, np.ndarray]) -> LoadedModel:
    with quiet_transformers(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = parts.model_class._from_config(parts.model_config, dtype=torch.float32)
    owners = dict(model.named_modules())
    parameters: dict[str, nn.Parameter] = {}
    names = [n.removeprefix("weights/") for n in arrays if n.startswith("weights/")]
    for name in [*names, *parts.aliases]:
        path, _, local = name.rpartition(".")
        owner, source = owners[path], parts.aliases.get(name, name)
        if local in owner._parameters:
            if source not in parameters:
                parameters[source] = nn.Parameter(_tensor(arrays[f"weights/{source}"]), requires_grad=False)
            owner._parameters[local] = parameters[source]
        else:
            owner._buffers[local] = _tensor(arrays[f"weights/{source}"])
    empty = [n for n, t in [*model.named_parameters(), *model.named_buffers()] if t.is_meta]
    if empty:
        raise EngineError(
            f"The weights of {', '.join(empty[:3])} did not reach the worker", do="run with --engine local"
        )
    model.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return LoadedModel(
        model, parts.shape, None, parts.config, parts.label_names, parts.missing, parts.identity, notes=()
    )


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor in the place of an array, which may be read-only: nobody writes to the base's weights."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def _split(owners: tuple[str, ...], arrays: Mapping[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    if not owners:
        return {}
    pieces = np.split(arrays[f"{part}/values"], arrays[f"{part}/ends"][:-1])
    return dict(zip(owners, pieces, strict=True))
