"""What comes out of a run: a standard PEFT folder, a whole model after full-parameter tuning, or bottleneck adapters.

Besides the standard files a folder holds `fedstrata.json`: label names, the base by the name that the user gave it,
and which tensor belongs to which stratum. The same tensors give the same bytes. PEFT knows no adapter behind a block:
a folder of bottleneck adapters holds `adapter.safetensors` and `fedstrata.json`, and is loaded by Fedstrata alone.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from safetensors import SafetensorError
from safetensors.numpy import load_file
from safetensors.torch import save

from fedstrata.core.shape import AdapterKind
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec, parse_stratum
from fedstrata.errors import FedstrataError, ModelError, RunFolderError
from fedstrata.record.files import (
    TEMPORARY_SUFFIX,
    atomic_write,
    plain_os_errors,
    read_json,
    replace_folder,
    write_json,
)
from fedstrata.train.fold import BaseUpdate, Pairs, as_pairs
from fedstrata.train.lora import AdaptedModel

SCHEMA_VERSION = 1
INFO_FILE = "fedstrata.json"
LORA_CONFIG_FILE = "adapter_config.json"
LORA_WEIGHTS_FILE = "adapter_model.safetensors"
MODEL_WEIGHTS_FILE = "model.safetensors"
BOTTLENECK_WEIGHTS_FILE = "adapter.safetensors"
WEIGHTS_FILES: Mapping[str, str] = MappingProxyType(
    {"lora": LORA_WEIGHTS_FILE, "full": MODEL_WEIGHTS_FILE, "bottleneck": BOTTLENECK_WEIGHTS_FILE}
)
"""The file of tensors by the kind that a folder holds."""
PREFIX = "base_model.model."


@dataclass(frozen=True)
class AdapterInfo:
    """What a folder says about its tensors.

    Attributes:
        kind: LoRA pairs with the head (`lora`, also where an R was trained between frozen factors), a whole model, or
            bottleneck adapters with the head.
        base: The base model as the user named it.
        revision: Of a hub model.
        identity: SHA-256 of the base's files when the folder was written.
        label_names: Class names by label number.
        max_length: Longest input in training, tokens.
        layout: The tensors, in order. Where a base moved, ranks may be larger than the server's, up to the smaller
            side of a map.
        scaling: The factor of B·A per target.
    """

    kind: AdapterKind
    base: str
    revision: str | None
    identity: str
    label_names: tuple[str, ...]
    max_length: int
    layout: Layout
    scaling: Mapping[str, float] = field(default_factory=dict)


def save_adapter(
    folder: Path,
    adapted: AdaptedModel,
    layout: Layout,
    tensors: Mapping[str, np.ndarray],
    scaling: Mapping[str, float],
    *,
    base: Mapping[str, BaseUpdate] = MappingProxyType({}),
) -> None:
    """Writes a folder, whole or not at all; an existing one is replaced.

    LoRA: `PeftModel.from_pretrained(base, folder)` predicts what this model predicts, the head included; targets
    that the layout lacks are left out. With frozen factors the same: lora_A = A, lora_B = B·R. Where a method moved the
    base, one pair per target holds that update and the server's pair, scaling folded in (scaling 1, alpha = r), equal
    to float32 rounding: the folder belongs to the base as loaded. Full parameters:
    `AutoModelFor….from_pretrained(folder)` does. Bottleneck adapters: PEFT has no such kind; `load_adapter` reads them.

    Args:
        folder: Where; its parents are made.
        adapted: The model; it is left at its base values.
        layout: What the tensors are; a head that it lacks is saved with its first values.
        tensors: The values, float32.
        scaling: The factor of B·A per target of the layout.
        base: What was merged into the base, by target: factors, or [out, in] float32.

    Raises:
        RunFolderError: If the folder cannot be written.
        ModelError: If the base moved where no LoRA pair can say so.
    """
    kind = adapted.adapter.kind
    stored = Pairs(layout, {s.name: tensors[s.name] for s in layout}, scaling)
    if base or kind == "square":
        if kind not in ("lora", "square"):
            raise ModelError(f'adapter.kind = "{kind}" has no pairs that could hold an update of the base')
        stored = as_pairs(adapted.shape.targets, layout, tensors, scaling, base=base, frames=adapted.frames)
    adapted.set_client(stored.tensors, stored.layout, Layout(()), stored.scaling)
    partial = folder.with_name(folder.name + ".new" + TEMPORARY_SUFFIX)
    try:
        with plain_os_errors(folder):
            if partial.exists():
                shutil.rmtree(partial)
            partial.mkdir(parents=True)
            if kind == "full":
                _write_model(partial, adapted)
            elif kind == "bottleneck":
                _write_bottlenecks(partial, adapted, stored.layout)
            else:
                _write_lora(partial, adapted, stored.layout, stored.scaling)
            _write_info(partial, adapted, stored)
        replace_folder(partial, folder)
    finally:
        adapted.reset()


def load_adapter(folder: Path) -> tuple[NamedTensors, AdapterInfo]:
    """Reads what `save_adapter` wrote.

    Returns:
        The tensors in the order of the layout, and what the folder says about them.

    Raises:
        RunFolderError: If the folder is missing or damaged.
    """
    info = _read_info(folder)
    path = folder / WEIGHTS_FILES[info.kind]
    try:
        stored = load_file(path)
    except FileNotFoundError as error:
        raise RunFolderError(f"{path} is missing") from error
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{path} cannot be read", got=str(error)) from error
    names = {s.name: _stored_name(s) if info.kind == "lora" else s.name for s in info.layout}
    missing = [n for n in names.values() if n not in stored]
    if missing:
        raise RunFolderError(f"{path} is damaged", expected=f"{len(names)} tensors", got=f"no {missing[0]}")
    tensors = {n: stored[key] for n, key in names.items()}
    info.layout.check(tensors, where=str(path))
    return tensors, info


def modules_to_save(head: Iterable[str], base_prefix: str) -> list[str]:
    """The modules that hold the head's parameters, as PEFT's `modules_to_save` names them, sorted.

    Outside the base model: its top modules (`classifier`). Inside: the modules that own a parameter that the
    checkpoint lacked (`bert.pooler.dense`). None of them lies inside another.

    Raises:
        ModelError: If a parameter stands directly on the model, so that no module can be named.
    """
    found: set[str] = set()
    for name in head:
        inside = name.startswith(base_prefix + ".")
        module = name.rpartition(".")[0] if inside else name.partition(".")[0]
        if module in ("", name, base_prefix):
            raise ModelError(f"PEFT cannot save {name}: no module of its own holds it")
        found.add(module)
    return sorted(m for m in found if not any(m.startswith(other + ".") for other in found))


def _write_lora(folder: Path, adapted: AdaptedModel, layout: Layout, scaling: Mapping[str, float]) -> None:
    shape, model = adapted.shape, adapted.model
    prefix = shape.targets[0].name.partition(".")[0]
    saved = modules_to_save((s.name for s in shape.head), prefix)
    pairs = {s.name: s for s in layout if s.kind != "weight"}
    values = adapted.read(Layout(tuple(pairs.values())))
    tensors = {_stored_name(pairs[n]): torch.from_numpy(v) for n, v in values.items()}
    ranks = {s.target: s.rank for s in pairs.values()}
    factors = {t: scaling[t] for t in ranks}
    if not ranks:  # PEFT wants a target: a pair of zeros adds exactly nothing
        last = shape.targets[-1]
        ranks, factors = {last.name: 1}, {last.name: 1.0}
        tensors[f"{PREFIX}{last.name}.lora_A.weight"] = torch.zeros(1, last.in_features)
        tensors[f"{PREFIX}{last.name}.lora_B.weight"] = torch.zeros(last.out_features, 1)
    for module in saved:
        for name, value in model.get_submodule(module).state_dict().items():
            tensors[f"{PREFIX}{module}.{name}"] = value.detach().clone().contiguous()
    atomic_write(folder / LORA_WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))
    write_json(folder / LORA_CONFIG_FILE, _lora_config(adapted, ranks, factors, saved))


def _lora_config(
    adapted: AdaptedModel, ranks: Mapping[str, int], factors: Mapping[str, float], saved: list[str]
) -> dict[str, Any]:
    """PEFT's configuration, keys and lists sorted; targets whose rank or alpha differ get a pattern."""
    alphas = {t: _alpha(factors[t], r) for t, r in ranks.items()}
    rank, alpha = max(ranks.values()), alphas[max(ranks, key=lambda t: ranks[t])]
    by_name = {t.name: t for t in adapted.shape.targets}
    is_image = adapted.loaded.is_image_model
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=adapted.adapter.dropout,
        target_modules=sorted(ranks),
        fan_in_fan_out=any(by_name[t].fan_in_fan_out for t in ranks),
        modules_to_save=saved or None,
        rank_pattern={t: r for t, r in ranks.items() if r != rank},
        alpha_pattern={t: a for t, a in alphas.items() if a != alpha},
        task_type=None if is_image else "SEQ_CLS",
        base_model_name_or_path=adapted.loaded.config.source,
        revision=adapted.loaded.config.revision,
        inference_mode=True,
    )
    values = config.to_dict()
    if is_image:
        owner = type(adapted.model)
        values["auto_mapping"] = {"base_model_class": owner.__name__, "parent_library": owner.__module__}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain, sort_keys=True))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(type(value).__name__)


def _alpha(scaling: float, rank: int) -> float | int:
    """The alpha whose quotient by the rank is exactly this scaling."""
    guess = scaling * rank
    steps = (guess, math.nextafter(guess, math.inf), math.nextafter(guess, -math.inf))
    alpha = next((a for a in steps if a / rank == scaling), guess)
    return int(alpha) if alpha.is_integer() else alpha


def _write_bottlenecks(folder: Path, adapted: AdaptedModel, layout: Layout) -> None:
    """The adapters and the whole head, each under its own name."""
    rest = Layout(tuple(s for s in adapted.shape.head if s.name not in layout))
    values = adapted.read(layout) | adapted.base_tensors(rest)
    tensors = {n: torch.from_numpy(v) for n, v in values.items()}
    atomic_write(folder / BOTTLENECK_WEIGHTS_FILE, save(tensors, metadata={"format": "pt"}))


def _write_model(folder: Path, adapted: AdaptedModel) -> None:
    model: Any = adapted.model
    own = {n for n, _ in model.named_parameters()} | {n for n, _ in model.named_buffers()}
    state = {n: v.detach().clone().contiguous() for n, v in model.state_dict().items() if n in own}
    atomic_write(folder / MODEL_WEIGHTS_FILE, save(state, metadata={"format": "pt"}))
    config = json.loads(model.config.to_json_string())
    config.pop("_name_or_path", None)
    config |= {"architectures": [type(model).__name__], "dtype": "float32"}
    write_json(folder / "config.json", dict(sorted(config.items())))


def _write_info(folder: Path, adapted: AdaptedModel, stored: Pairs) -> None:
    loaded, layout = adapted.loaded, stored.layout
    write_json(
        folder / INFO_FILE,
        {
            "schema_version": SCHEMA_VERSION,
            "kind": "lora" if adapted.adapter.kind == "square" else adapted.adapter.kind,
            "base": loaded.config.source,
            "revision": loaded.config.revision,
            "identity": loaded.identity,
            "architecture": loaded.shape.architecture,
            "label_names": list(loaded.label_names),
            "max_length": loaded.config.max_length,
            "scaling": {t: stored.scaling[t] for t in layout.targets},
            "tensors": [[s.name, list(s.shape), str(s.stratum), s.kind] for s in layout],
        },
    )


def _read_info(folder: Path) -> AdapterInfo:
    value = read_json(folder / INFO_FILE)
    if value.get("schema_version") != SCHEMA_VERSION:
        version = str(value.get("schema_version"))
        raise RunFolderError(f"{folder} was written by another version", expected=str(SCHEMA_VERSION), got=version)
    kind = str(value.get("kind"))
    if kind not in WEIGHTS_FILES:
        known = ", ".join(WEIGHTS_FILES)
        raise RunFolderError(f"{folder / INFO_FILE} is damaged", expected=f"a kind out of {known}", got=kind[:40])
    try:
        specs = tuple(TensorSpec(n, tuple(shape), parse_stratum(s), kind) for n, shape, s, kind in value["tensors"])
        return AdapterInfo(
            kind=value["kind"],
            base=value["base"],
            revision=value["revision"],
            identity=value["identity"],
            label_names=tuple(value["label_names"]),
            max_length=value["max_length"],
            layout=Layout(specs),
            scaling=dict(value["scaling"]),
        )
    except (KeyError, TypeError, ValueError, FedstrataError) as error:
        raise RunFolderError(f"{folder / INFO_FILE} is damaged", got=str(error)) from error


def _stored_name(spec: TensorSpec) -> str:
    return f"{PREFIX}{spec.name}" if spec.kind == "weight" else f"{PREFIX}{spec.name}.weight"
