"""Sizes of a model: everything that planning, costing and laying out need, without torch and without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedstrata.core.tensors import Layout, Stratum, TensorSpec, stratum_order

AdapterKind: TypeAlias = Literal["lora", "full"]


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


def global_layout(shape: ModelShape, adapter: AdapterKind, ranks: Mapping[Stratum, int]) -> Layout:
    """The server's tensors.

    Args:
        shape: The model.
        adapter: `lora`: a pair per target at the stratum's rank, then the head. `full`: every parameter.
        ranks: Largest rank per stratum; 0 leaves a stratum out. For weights any rank above 0 means "in".
    """
    specs: list[TensorSpec] = []
    if adapter == "lora":
        for t in shape.targets:
            specs.append(TensorSpec(f"{t.name}.lora_A", (1, t.in_features), t.block, "lora_A"))
            specs.append(TensorSpec(f"{t.name}.lora_B", (t.out_features, 1), t.block, "lora_B"))
        specs.extend(shape.head)
    else:
        specs.extend(sorted(shape.parameters, key=lambda s: stratum_order(s.stratum)))
    return Layout(tuple(specs)).with_ranks(ranks)
