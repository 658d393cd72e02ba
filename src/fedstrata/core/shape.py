"""Sizes of a model: everything that planning, costing and laying out need, without torch and without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from fedstrata.core.tensors import Kind, Layout, Stratum, TensorSpec, stratum_order
from fedstrata.errors import PlanError

AdapterKind: TypeAlias = Literal["lora", "full", "square", "bottleneck"]
"""Pairs of factors; every parameter; a square matrix between two frozen factors; a small network behind every block."""

BOTTLENECK_KINDS: tuple[Kind, ...] = ("adapter_down", "adapter_bias", "adapter_up")
"""The tensors of a bottleneck adapter, in the order of layouts."""


@dataclass(frozen=True, slots=True)
class TargetShape:
    """A linear map that carries a LoRA pair.

    Attributes:
        name: Full module path in the model.
        block: Number of its transformer block, from the input.
        in_features: Width of its input.
        out_features: Width of its output.
        fan_in_fan_out: Whether the stored weight is `[in, out]` (GPT-2's Conv1D).
    """

    name: str
    block: int
    in_features: int
    out_features: int
    fan_in_fan_out: bool = False


@dataclass(frozen=True)
class ModelShape:
    """Sizes only.

    Attributes:
        architecture: Class name of the model.
        num_blocks: L.
        hidden_size: Width of the residual stream.
        max_positions: Longest input, None without a limit.
        targets: Maps that carry LoRA pairs, in module order.
        head: Parameters of the head stratum with adapters: the task head and whatever the checkpoint lacked.
        parameters: Every parameter with its stratum in full-parameter tuning, in module order.
        base_bytes: Size of the base model at float32, assumed present on every client.
        block_class: Class name of one block.
    """

    architecture: str
    num_blocks: int
    hidden_size: int
    max_positions: int | None
    targets: tuple[TargetShape, ...]
    head: tuple[TensorSpec, ...]
    parameters: tuple[TensorSpec, ...]
    base_bytes: int
    block_class: str = ""

    @property
    def blocks(self) -> tuple[int, ...]:
        """Block numbers from the input."""
        return tuple(range(self.num_blocks))

    @property
    def num_parameters(self) -> int:
        """All parameters of the model, shared ones once."""
        return sum(p.num_values for p in self.parameters)

    @cached_property
    def block_paths(self) -> tuple[str, ...]:
        """Module path of every block, e.g. `bert.encoder.layer.1`; bottleneck adapters are named by it.

        Blocks are members of one list, so the names of targets of different blocks part exactly at the block's
        number. A single block is what all its parameters' names share, up to that number.

        Raises:
            PlanError: If a block has no target.
        """
        first: dict[int, list[str]] = {}
        for target in self.targets:
            first.setdefault(target.block, target.name.split("."))
        bare = [b for b in self.blocks if b not in first]
        if bare:
            raise PlanError(f"Block {bare[0]} has no linear map, so its place in the model is unknown")
        if self.num_blocks == 1:
            inside = [p.name.split(".") for p in self.parameters if p.stratum == 0]
            shared = first[0][: _num_shared([first[0], *inside])]
            last = max((i for i, part in enumerate(shared) if part == "0"), default=len(shared) - 1)
            return (".".join(shared[: last + 1]),)
        parting = _num_shared([first[b] for b in self.blocks])
        return tuple(".".join(first[b][: parting + 1]) for b in self.blocks)


def global_layout(shape: ModelShape, adapter: AdapterKind, ranks: Mapping[Stratum, int]) -> Layout:
    """The server's tensors.

    Args:
        shape: The model.
        adapter: `lora`: a pair per target at the stratum's rank, then the head. `square`: one `lora_R` per target at
            the stratum's rank, then the head. `bottleneck`: down, bias and up per block, the stratum's "rank" being
            the width, then the head. `full`: every parameter.
        ranks: Largest rank per stratum; 0 leaves a stratum out. For weights any rank above 0 means "in".

    Raises:
        PlanError: If a bottleneck adapter is asked for where the width of the blocks' outputs is unknown.
    """
    specs: list[TensorSpec] = []
    if adapter == "full":
        specs.extend(sorted(shape.parameters, key=lambda s: stratum_order(s.stratum)))
        return Layout(tuple(specs)).with_ranks(ranks)
    if adapter == "bottleneck":
        for block in shape.blocks:
            specs.extend(_bottleneck_specs(shape, block))
    for t in shape.targets:
        if adapter == "lora":
            specs.append(TensorSpec(f"{t.name}.lora_A", (1, t.in_features), t.block, "lora_A"))
            specs.append(TensorSpec(f"{t.name}.lora_B", (t.out_features, 1), t.block, "lora_B"))
        elif adapter == "square":
            specs.append(TensorSpec(f"{t.name}.lora_R", (1, 1), t.block, "lora_R"))
    specs.extend(shape.head)
    return Layout(tuple(specs)).with_ranks(ranks)


def _bottleneck_specs(shape: ModelShape, block: int) -> list[TensorSpec]:
    """One adapter of width 1: down [1, h], bias [1], up [h, 1]."""
    width = shape.hidden_size
    if width < 1:
        raise PlanError(
            "No bottleneck adapter fits behind a block: the width of its output is unknown",
            where=shape.architecture,
            expected="a hidden_size in the model's configuration",
            do='use adapter.kind = "lora"',
        )
    shapes: tuple[tuple[int, ...], ...] = ((1, width), (1,), (width, 1))
    path = shape.block_paths[block]
    return [TensorSpec(f"{path}.{k}", s, block, k) for k, s in zip(BOTTLENECK_KINDS, shapes, strict=True)]


def _num_shared(names: Sequence[Sequence[str]]) -> int:
    """How many leading parts all names share."""
    count = 0
    for parts in zip(*names, strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count
