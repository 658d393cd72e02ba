"""Finds a model's transformer blocks, its LoRA targets and the stratum of every parameter.

Blocks come from the model's own module list, by identity and position, never from a part of a name: block 1 cannot be
taken for block 10. Nothing here reads a weight, so a model on the meta device is enough.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers.pytorch_utils import Conv1D

from fedstrata.core.shape import ModelShape, TargetShape
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Stratum, TensorSpec
from fedstrata.errors import ModelError, did_you_mean
from fedstrata.train.config import AdapterConfig

ATTENTION_NAMES = frozenset(
    ("query", "value", "q_lin", "v_lin", "q_proj", "v_proj", "query_proj", "value_proj", "q", "v")
) | frozenset(("c_attn", "Wqkv", "qkv", "qkv_proj", "query_key_value"))
"""Last name parts of query and value maps; the second group holds maps that are fused with the key map."""

BYTES_PER_VALUE = 4  # the base stands in float32


@dataclass(frozen=True, eq=False)
class Blocks:
    """The transformer blocks of a model, from the input.

    Attributes:
        path: Module path of the list that holds them.
        modules: The blocks; their position is their number.
    """

    path: str
    modules: tuple[nn.Module, ...]

    @property
    def block_class(self) -> str:
        """Class name of one block."""
        return type(self.modules[0]).__name__


def find_blocks(model: nn.Module) -> Blocks:
    """Finds the list of transformer blocks.

    A candidate is a module list outside every other candidate whose children are of one class and hold linear maps.
    If the model's configuration states a number of layers, the list must have that length; otherwise the longest
    one is taken.

    Raises:
        ModelError: If no list or more than one qualifies; the message says what was found.
    """
    candidates = _outermost_lists(model)
    stated = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    wanted = stated if isinstance(stated, int) else max((len(b.modules) for b in candidates), default=0)
    fitting = [b for b in candidates if len(b.modules) == wanted]
    if len(fitting) != 1:
        found = "; ".join(f"{path}: {len(parts)} x {_classes(parts)}" for path, parts in _module_lists(model))
        raise ModelError(
            f"Cannot tell which modules of {type(model).__name__} are its transformer blocks",
            expected=f"exactly one list of {wanted or 'several'} blocks of one class that share no weights",
            got=found or "no module list at all",
            do="choose a model whose blocks stand in one torch.nn.ModuleList (BERT, RoBERTa, GPT-2, Llama, ViT, …)",
        )
    return fitting[0]


def assign_strata(model: nn.Module, blocks: Blocks, missing: Collection[str] = ()) -> dict[str, Stratum]:
    """The stratum of every parameter in full-parameter tuning, in module order, shared parameters once.

    Parameters of block i belong to it. Of the rest, the task head, whatever the checkpoint lacked (`missing`) and
    everything after the blocks except embedding tables (final norm, pooler) is the head; all others are the
    embeddings. A head that is tied to the input embeddings belongs to the embeddings.
    """
    block_of = {id(p): i for i, block in enumerate(blocks.modules) for p in block.parameters()}
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    task_head = {id(p) for p in task_head_parameters(model, blocks).values()}
    strata: dict[str, Stratum] = {}
    after_blocks = False
    for name, parameter in model.named_parameters():
        key = id(parameter)
        if key in block_of:
            strata[name] = block_of[key]
            after_blocks = True
        elif key in task_head or name in missing or (after_blocks and key not in tables):
            strata[name] = HEAD
        else:
            strata[name] = EMBEDDINGS
    return strata


def task_head_parameters(model: nn.Module, blocks: Blocks) -> dict[str, nn.Parameter]:
    """Parameters outside the base model, except those that are tied to an embedding table inside it."""
    prefix = base_prefix(model, blocks)
    inside = {id(p) for p in model.get_submodule(prefix).parameters()}
    return {n: p for n, p in model.named_parameters() if id(p) not in inside}


def base_prefix(model: nn.Module, blocks: Blocks) -> str:
    """Name of the child that is the model without its task head, e.g. `bert`."""
    return blocks.path.split(".", 1)[0]


def find_targets(model: nn.Module, blocks: Blocks, targets: str | Sequence[str]) -> tuple[TargetShape, ...]:
    """The linear maps that carry LoRA pairs, in module order.

    Args:
        model: The model.
        blocks: Its blocks.
        targets: `attention`, `all-linear`, or last parts of module names (`["query", "output.dense"]`).

    Raises:
        ModelError: If a name fits no map, or a block would have no target.
    """
    paths = {id(module): name for name, module in model.named_modules()}
    maps = [(paths[id(m)], i, m) for i, block in enumerate(blocks.modules) for m in block.modules() if _is_linear(m)]
    if targets == "all-linear":
        chosen = maps
    else:
        names = sorted(ATTENTION_NAMES) if targets == "attention" else list(targets)
        if targets != "attention":
            _check_names(names, [path for path, _, _ in maps])
        chosen = [(path, i, m) for path, i, m in maps if any(_ends_with(path, name) for name in names)]
    bare = sorted(set(range(len(blocks.modules))) - {i for _, i, _ in chosen})
    if bare:
        raise ModelError(
            f"No map of block {bare[0]} matches targets = {targets!r}",
            got=f"{blocks.block_class} holds {', '.join(_last_parts([path for path, _, _ in maps]))}",
            do='set adapter.targets to "all-linear" or to some of these names',
        )
    return tuple(TargetShape(path, i, *_sizes(m)) for path, i, m in chosen)


def shape_of(model: nn.Module, adapter: AdapterConfig, missing: Collection[str] = ()) -> ModelShape:
    """Sizes of a model: all that planning needs.

    Args:
        model: A transformers model, without LoRA pairs; the meta device will do.
        adapter: Which maps carry pairs.
        missing: Parameters that the checkpoint did not contain; they belong to the head.

    Raises:
        ModelError: If the blocks or the targets cannot be found, or a block's weights are missing.
    """
    blocks = find_blocks(model)
    strata = assign_strata(model, blocks, missing)
    lacking = [n for n in missing if isinstance(strata.get(n), int)]
    if lacking:
        raise ModelError(
            f"The checkpoint does not fit {type(model).__name__}",
            expected="weights for every transformer block",
            got=f"{len(lacking)} of their tensors are missing, the first is {sorted(lacking)[0]}",
            do="use the folder's own config.json, or another model",
        )
    parameters = {n: TensorSpec(n, tuple(p.shape), strata[n]) for n, p in model.named_parameters()}
    head = task_head_parameters(model, blocks).keys() | set(missing)
    config = getattr(model, "config", None)
    return ModelShape(
        architecture=type(model).__name__,
        num_blocks=len(blocks.modules),
        hidden_size=int(getattr(config, "hidden_size", 0) or 0),
        max_positions=_max_positions(model),
        targets=find_targets(model, blocks, adapter.targets),
        head=tuple(TensorSpec(n, s.shape, HEAD) for n, s in parameters.items() if n in head),
        parameters=tuple(parameters.values()),
        base_bytes=BYTES_PER_VALUE * sum(s.num_values for n, s in parameters.items() if n not in head),
        block_class=blocks.block_class,
    )


def _module_lists(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > 0:
            yield path, list(module)


def _outermost_lists(model: nn.Module) -> list[Blocks]:
    found: list[Blocks] = []
    inside: set[int] = set()
    for path, parts in _module_lists(model):
        if id(parts[0]) in inside or len({type(p) for p in parts}) > 1:
            continue
        if all(any(_is_linear(m) for m in part.modules()) for part in parts):
            found.append(Blocks(path, tuple(parts)))
            inside.update(id(m) for part in parts for m in part.modules())
    return found


def _classes(parts: list[nn.Module]) -> str:
    return "/".join(sorted({type(p).__name__ for p in parts}))


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _sizes(module: nn.Module) -> tuple[int, int, bool]:
    """in_features, out_features, and whether the weight is stored as `[in, out]`."""
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features, False
    weight = module.get_parameter("weight")  # Conv1D: [in, out]
    return int(weight.shape[0]), int(weight.shape[1]), True


def _ends_with(path: str, name: str) -> bool:
    wanted = name.split(".")
    return path.split(".")[-len(wanted) :] == wanted


def _last_parts(paths: list[str]) -> list[str]:
    return sorted({path.rsplit(".", 1)[-1] for path in paths})


def _check_names(names: list[str], paths: list[str]) -> None:
    for name in names:
        if not any(_ends_with(path, name) for path in paths):
            raise ModelError(
                f'No linear map of the blocks is called "{name}"',
                where="adapter.targets",
                do=did_you_mean(name, _last_parts(paths)),
            )


def _max_positions(model: nn.Module) -> int | None:
    """Longest input in tokens; models of the RoBERTa family lose the positions up to their padding index."""
    config = getattr(model, "config", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None
    for path, module in model.named_modules():
        if _ends_with(path, "position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx:
            return int(module.num_embeddings - module.padding_idx - 1)
    return limit
