"""What a run or a method owes to others, as citations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedstrata import __version__
from fedstrata.errors import ConfigError, FedstrataError
from fedstrata.experiment.plugins import KINDS, load_plugins
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.stored import read_run_record
from fedstrata.method import METHODS, MethodEntry
from fedstrata.method.citation import CITED_PARTS, LORA, Citation, fedstrata_citation

_PUBLISHED_WITH = {
    "depth_and_rank": "legend",
    "fedex": "fedex_lora",
    "fisher": "fed_hello",
    "hello": "fed_hello",
    "holders_mean": "fedavg",
    "krum": "krum",
    "lora_fair": "lora_fair",
    "median": "median",
    "norm_weighted_pad": "hetlora",
    "pattern": "fed_hello",
    "product_mean": "flexlora",
    "raflora": "raflora",
    "random_pattern": "fed_hello",
    "rank_decay": "hetlora",
    "sketch_mean": "fslora",
    "stack": "flora",
    "svd_mean": "fedsvd",
    "top_blocks": "fedtlu",
    "trimmed_mean": "trimmed_mean",
}
"""Parts that came with a method, by id: whoever puts them into another method cites that one too."""


def cite(target: str) -> tuple[list[Citation], list[str]]:
    """The publications behind a run folder or a method, the method's own first, each once.

    Args:
        target: A run folder, or a method's name.

    Returns:
        The citations, and names of what has no publication. A run also cites Fedstrata itself.

    Raises:
        ConfigError: If there is no such method.
        RunFolderError: If the folder is damaged.
    """
    folder = Path(target)
    if (folder / "run.json").is_file():
        return _of_run(folder)
    if folder.is_dir() and ("/" in target or target not in METHODS.entries):
        raise ConfigError(f"{folder} is neither a run folder nor a method", do="name a folder with run.json")
    entry = METHODS.find(target)
    try:
        method = METHODS.build(target, {})
    except FedstrataError:  # it needs options, and is cited without them
        return _collect(entry, {}, is_lora=False)
    return _collect(entry, method.to_config(), is_lora=method.adapters == {"lora"})


def _of_run(folder: Path) -> tuple[list[Citation], list[str]]:
    record = read_run_record(folder)
    spec = ExperimentSpec.model_validate(record["spec"])
    load_plugins(spec, Path(record["measured"].get("base_dir", ".")))
    is_lora = spec.adapter.kind == "lora"
    found, missing = _collect(METHODS.find(spec.method.name), record["parts"], is_lora=is_lora)
    return [*found, fedstrata_citation(record["measured"].get("fedstrata", __version__))], missing


def _collect(entry: MethodEntry, parts: Mapping[str, Any], *, is_lora: bool) -> tuple[list[Citation], list[str]]:
    own = entry.facts.citation
    found = [own] if own is not None else []
    for kind in KINDS.values():
        for part_id in _ids(parts.get(kind.table)):
            if part_id in CITED_PARTS:
                found.append(CITED_PARTS[part_id])
            elif part_id in _PUBLISHED_WITH:
                published = METHODS.find(_PUBLISHED_WITH[part_id]).facts.citation
                found += [published] if published is not None else []
            elif part_id in kind.registry.names:
                stated = getattr(kind.registry[part_id], "citation", None)
                found += [stated] if isinstance(stated, Citation) else []
    if is_lora:
        found.append(LORA)
    return list({c.key: c for c in found}.values()), [] if own is not None else [entry.name]


def _ids(config: Any) -> Iterable[str]:
    """The ids in a part's config, those of nested parts included."""
    if isinstance(config, Mapping):
        if isinstance(config.get("id"), str):
            yield config["id"]
        for value in config.values():
            yield from _ids(value)
