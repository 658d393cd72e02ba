"""A published method is five choices in one short function, and a few words on what travels."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from fedstrata.aggregate.base import Aggregator
from fedstrata.codec.base import Codec
from fedstrata.core.tensors import Kind
from fedstrata.objective.base import Objective
from fedstrata.optimize.base import ServerOptimizer
from fedstrata.optimize.optimizers import NoOptimizer
from fedstrata.plan.base import Planner
from fedstrata.registry import to_config
from fedstrata.select.base import Selector

Choice: TypeAlias = Literal["plan", "objective", "codec", "aggregate", "select", "optimize"]
ScalingOf: TypeAlias = Literal["shared", "by_rank", "by_sketch"] | float


@dataclass(frozen=True)
class PairRule:
    """What happens to the two factors of a LoRA pair.

    Attributes:
        trained: Kinds that are trained, per round: round t takes entry (t − 1) mod length.
        local: Kinds that stay on their client: neither sent nor received.
        drawn: Kinds that both sides draw from a named stream instead of sending them.
        redrawn: Whether the drawn ones are drawn anew in every round.
        start: First values of A: `uniform` (PEFT's), or `orthonormal` rows.
        slices: Which rank slices a client with a smaller rank has: the leading ones, or `drawn` anew in every round.
    """

    trained: tuple[tuple[Kind, ...], ...] = (("lora_A", "lora_B"),)
    local: tuple[Kind, ...] = ()
    drawn: tuple[Kind, ...] = ()
    redrawn: bool = False
    start: Literal["uniform", "orthonormal"] = "uniform"
    slices: Literal["leading", "drawn"] = "leading"

    def trained_in(self, server_round: int) -> tuple[Kind, ...]:
        """Kinds that are trained in a round, from 1."""
        return self.trained[(server_round - 1) % len(self.trained)]


@dataclass(frozen=True)
class Method:
    """Five parts, and what the method says about the world around them.

    Attributes:
        planner: Who trains which strata, at which rank.
        objective: What a client minimises.
        codec: How the uplink becomes bytes.
        aggregator: How updates become one.
        selector: Which strata the server may change.
        send: What the uplink holds.
        open_choices: Choices that the experiment file may replace; the others *are* the method.
        topology: `federated`; `pooled`: one client holds everybody's data; `alone`: clients train and share nothing.
        adapters: Adapter kinds that it is defined for.
        pairs: What happens to the factors of a LoRA pair.
        scaling: `shared`: one s = alpha/r per target at the server's rank r; `by_rank`: a client of rank r_k has
            s_k = alpha/r_k; `by_sketch`: s_k = s·r/r_k; a number: s itself, whatever the rank.
        head: What happens to the head; None leaves it to the experiment.
        optimizer: What the server does with the accepted mean.
        skips_blocks: Whether a client's model consists of its trained blocks only.
        held_out: Share of every client's training examples that all arms of the method leave out of training, whether
            or not they score blocks with them: arms are only comparable on the same training data.
        notes: What must be said wherever results are shown, e.g. that an option is not the published method.
    """

    planner: Planner
    objective: Objective
    codec: Codec
    aggregator: Aggregator[Any]
    selector: Selector
    send: Literal["delta", "weights"] = "delta"
    open_choices: frozenset[Choice] = frozenset({"codec"})
    topology: Literal["federated", "pooled", "alone"] = "federated"
    adapters: frozenset[str] = frozenset({"lora", "full"})
    pairs: PairRule = field(default_factory=PairRule)
    scaling: ScalingOf = "shared"
    head: Literal["aggregate", "local"] | None = None
    optimizer: ServerOptimizer = field(default_factory=NoOptimizer)
    skips_blocks: bool = False
    held_out: float = 0.0
    notes: tuple[str, ...] = ()

    def to_config(self) -> dict[str, Any]:
        """The resolved parts, for the record."""
        return {
            "plan": to_config(self.planner),
            "objective": to_config(self.objective),
            "codec": to_config(self.codec),
            "aggregate": to_config(self.aggregator),
            "select": to_config(self.selector),
            "optimize": to_config(self.optimizer),
            "pairs": asdict(self.pairs),
            "scaling": self.scaling,
            "head": self.head,
            "skips_blocks": self.skips_blocks,
            "send": self.send,
            "topology": self.topology,
            **({"held_out": self.held_out} if self.held_out else {}),
        }

    def with_parts(self, **parts: Any) -> Method:
        """The same method with some parts replaced."""
        return replace(self, **parts)
