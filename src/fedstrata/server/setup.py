"""What stays the same in all rounds of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from fedstrata.codec.base import Codec
from fedstrata.core.shape import AdapterKind, ModelShape, global_layout
from fedstrata.core.tensors import HEAD, Layout, Stratum
from fedstrata.device.fleet import Client, Fleet
from fedstrata.method.base import Method
from fedstrata.record.checkpoint import ServerState

POOLED_CLIENT = "central"


@dataclass(frozen=True)
class RoundSetup:
    """What stays the same in all rounds of a run.

    Attributes:
        method: The five choices.
        shape: Sizes of the model.
        fleet: Registered clients.
        layout: The server's tensors.
        scaling: LoRA scaling per target, one for server and clients.
        seed: The run's seed.
        num_rounds: R.
        clients_per_round: Cohort size; None invites everyone.
        min_replies: Fewest good replies that make a round.
        train: Options of local training.
        max_length: Longest input, for the cost estimate.
        downlink: Codec of the downlink.
        partial_downlink: Whether strata that a client holds in the current version are left out.
        head: What happens to the head.
        threads: CPU threads of a client.
        exactness_values: Memory for the exactness error, in numbers; 0 switches it off.
        scaling_power: p in a client's scaling s_k = s·(r/r_k)^p at rank r_k.
        kind: Which adapters clients train.
        reuse: Whether clients compute what enters their lowest trained block once per example.
        reuse_memory_bytes: What a process may keep of that.
        server_score: Validation accuracy and loss of a state, on examples of the server's; None where clients own them.
        server_probe: Answers a planner's probe with the server's own examples: the state and the probe's options give
            `{"sums": {block: number}, "count": examples}`.
        examples_of: Per set of examples beside the training ones (`client_heldout`, `client_validation`,
            `server_validation`, `test`) how many each client has of it; what is not there is not known.
    """

    method: Method
    shape: ModelShape
    fleet: Fleet
    layout: Layout
    scaling: Mapping[str, float]
    seed: int
    num_rounds: int
    clients_per_round: int | None
    min_replies: int
    train: Mapping[str, Any]
    max_length: int
    downlink: Codec
    partial_downlink: bool = False
    head: Literal["aggregate", "local", "frozen"] = "aggregate"
    threads: int = 1
    exactness_values: int = 1 << 26
    scaling_power: float = 0.0
    kind: AdapterKind | None = None
    reuse: Literal["off", "auto", "always"] = "off"
    reuse_memory_bytes: int = 0
    server_score: Callable[[ServerState], Mapping[str, float]] | None = None
    server_probe: Callable[[ServerState, Mapping[str, Any]], Mapping[str, Any]] | None = None
    examples_of: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @cached_property
    def adapter(self) -> AdapterKind:
        """Which adapters clients train; without a word about it, what the layout looks like."""
        return self.kind or ("lora" if self.layout.targets else "full")

    @cached_property
    def base_layout(self) -> Layout:
        """A pair per map: how updates of the base, or frozen factors around a square matrix, are written."""
        if self.adapter != "square":
            return self.layout
        ranks = {s.stratum: s.rank for s in self.layout if s.kind == "lora_R"}
        return global_layout(self.shape, "lora", ranks)

    @property
    def is_personal(self) -> bool:
        """Whether every client ends with a model of its own."""
        return bool(self.local_strata) or bool(self.method.pairs.local)

    @cached_property
    def workers(self) -> Fleet:
        """Who really trains: the fleet, or the one client that holds everybody's data (on the fastest device)."""
        if self.method.topology != "pooled":
            return self.fleet
        fastest = max((c.device for c in self.fleet.clients), key=lambda d: d.flop_per_s)
        return Fleet((Client(POOLED_CLIENT, fastest, sum(c.num_examples for c in self.fleet.clients)),))

    @cached_property
    def num_examples(self) -> int:
        """Training examples of everybody."""
        return sum(c.num_examples for c in self.workers.clients)

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """Of the uplink and of the downlink."""
        return self.method.codec, self.downlink

    @cached_property
    def server_ranks(self) -> dict[Stratum, int]:
        """Largest rank per stratum; 1 for strata of plain weights."""
        return {s: max(x.rank for x in self.layout.of(s)) or 1 for s in self.layout.strata}

    @cached_property
    def local_strata(self) -> frozenset[Stratum]:
        """Strata that never leave a client."""
        if self.method.topology == "alone":
            return frozenset(self.layout.strata)
        return frozenset({HEAD}) if self.head == "local" and HEAD in self.layout.strata else frozenset()
