"""A published method is five choices in one short function, and a few words on what travels."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias, get_args

from fedstrata.aggregate.base import Aggregator
from fedstrata.codec.base import Codec
from fedstrata.core.shape import AdapterKind
from fedstrata.core.tensors import Kind
from fedstrata.errors import ConfigError
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

    def __post_init__(self) -> None:
        known = get_args(Kind)
        named = {"trained": [k for kinds in self.trained for k in kinds], "local": self.local, "drawn": self.drawn}
        problems = [
            f"{n} names {k!r}: {', '.join(known)}" for n, kinds in named.items() for k in kinds if k not in known
        ]
        problems += [] if self.trained else ["trained is empty: name the kinds that are trained"]
        problems += [] if self.start in ("uniform", "orthonormal") else [f"start = {self.start!r}"]
        problems += [] if self.slices in ("leading", "drawn") else [f"slices = {self.slices!r}"]
        if problems:
            raise ConfigError("This is no rule for pairs", problems=problems)

    def trained_in(self, server_round: int) -> tuple[Kind, ...]:
        """Kinds that are trained in a round, from 1."""
        return self.trained[(server_round - 1) % len(self.trained)]


_BASES: dict[str, type] = {
    "planner": Planner,
    "objective": Objective,
    "codec": Codec,
    "aggregator": Aggregator,
    "selector": Selector,
    "optimizer": ServerOptimizer,
}
_KNOWN: dict[str, tuple[Any, ...]] = {
    "send": ("delta", "weights"),
    "topology": ("federated", "pooled", "alone"),
    "head": (None, "aggregate", "local"),
    "skips_blocks": (False, True),
}
_SCALINGS = ("shared", "by_rank", "by_sketch")


def _part_problem(name: str, part: Any, base: type) -> str:
    """What keeps a value from being a part of a method; empty if nothing does."""
    if not isinstance(part, base):
        article = "an" if base.__name__[0] in "AO" else "a"
        what = ", not its class" if isinstance(part, type) and issubclass(part, base) else ""
        return f"{name} = {part!r:.100}: {article} {base.__name__}{what}"
    frozen = getattr(getattr(type(part), "__dataclass_params__", None), "frozen", False)
    if not frozen or not isinstance(getattr(part, "id", None), str):
        return f'{name} = {part!r:.100}: its class must be a frozen dataclass with a class attribute `id = "…"`'
    return ""


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

    Raises:
        ConfigError: With every part that is none and every unknown word.
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

    def __post_init__(self) -> None:
        problems = [p for f, base in _BASES.items() if (p := _part_problem(f, getattr(self, f), base))]
        problems += [
            f"{name} = {getattr(self, name)!r}: {' or '.join(map(repr, known))}"
            for name, known in _KNOWN.items()
            if getattr(self, name) not in known
        ]
        for name, all_of in (("open_choices", get_args(Choice)), ("adapters", get_args(AdapterKind))):
            wrong = sorted(map(str, set(getattr(self, name)) - set(all_of)))
            if wrong or (name == "adapters" and not self.adapters):
                problems.append(f"{name} = {sorted(map(str, getattr(self, name)))}: some of {', '.join(all_of)}")
        scaling: Any = self.scaling
        is_number = isinstance(scaling, int | float) and not isinstance(scaling, bool) and math.isfinite(scaling)
        if scaling not in _SCALINGS and not (is_number and scaling > 0):
            problems.append(f"scaling = {scaling!r}: a number above 0, or {' or '.join(map(repr, _SCALINGS))}")
        if not isinstance(self.pairs, PairRule):
            problems.append(f"pairs = {self.pairs!r}: a PairRule")
        if problems:
            raise ConfigError("These parts make no method", problems=problems)

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
