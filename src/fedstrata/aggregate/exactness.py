"""Law 7: how far the server's product is from the mean of the clients' products, measured in every round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedstrata.aggregate.base import Aggregator, ClientUpdate, Proposal
from fedstrata.core.lora import Exactness, LoraTerm, combine_exactness, exactness_error
from fedstrata.core.tensors import Layout

Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class _Held:
    """One client's pair of one target as it arrived; `start` is an index into the target's distinct starts."""

    client: str
    num_examples: int
    values: Pair
    start: int
    is_delta: bool


@dataclass
class _Target:
    """What the cohort sent for one target."""

    held: list[_Held] = field(default_factory=list)
    starts: list[Pair] = field(default_factory=list)

    def start_index(self, pair: Pair) -> int:
        """Where this start stands among the distinct ones; it is appended if it is new."""
        for i, known in enumerate(self.starts):
            if all(a is b or np.array_equal(a, b) for a, b in zip(known, pair, strict=True)):
                return i
        self.starts.append(pair)
        return len(self.starts) - 1


class ExactnessProbe:
    """Keeps the LoRA factors of one round's replies until the proposal is known.

    Args:
        layout: The server's.
        scaling: One number per target, for server and clients alike.
        aggregator: Whose weights q_k count.
        max_values: How many numbers may be kept; beyond that the error is not measured. 0 switches it off.
    """

    def __init__(
        self, layout: Layout, scaling: Mapping[str, float], aggregator: Aggregator[Any], *, max_values: int = 1 << 26
    ) -> None:
        self._layout, self._scaling, self._aggregator, self._max_values = layout, scaling, aggregator, max_values
        self._targets: dict[str, _Target] = {}
        self._num_values = 0
        self._reason: str | None = None
        if not max_values:
            self._reason = "switched off"
        elif not layout.targets:
            self._reason = "there are no LoRA pairs"

    def add(self, update: ClientUpdate) -> None:
        """Keeps the pairs of one update, by reference; nothing once the budget is spent."""
        if self._reason is not None:
            return
        for target in update.layout.targets:
            names = (f"{target}.lora_A", f"{target}.lora_B")
            if any(n not in update.layout for n in names):
                continue
            here = self._targets.setdefault(target, _Target())
            num_starts = len(here.starts)
            values = (update.values[names[0]], update.values[names[1]])
            start = here.start_index((update.start[names[0]], update.start[names[1]]))
            here.held.append(_Held(update.client, update.num_examples, values, start, update.send == "delta"))
            copies = 1 + len(here.starts) - num_starts
            self._num_values += copies * sum(v.size for v in values)
            if self._num_values > self._max_values:
                self._targets.clear()
                self._reason = f"the replies' LoRA factors need more than {self._max_values} numbers of memory"
                return

    def finish(self, proposal: Proposal, current: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The errors, JSON-ready.

        Args:
            proposal: What the aggregator proposes, before selection.
            current: The server's tensors before this round; a factor that is not in the proposal is taken from here.

        Returns:
            `exactness_error` and `exactness_error_update` over all targets with holders, the same per target, and
            the `reason` where they are null. A single number is null where it is not finite (zero divisor).
        """
        if self._reason is None and not self._targets:
            self._reason = "no reply holds a LoRA pair"
        if self._reason is not None:
            return {
                "exactness_error": None,
                "exactness_error_update": None,
                "per_target": {},
                "reason": self._reason,
            }
        found: dict[str, Exactness] = {}
        for target in self._layout.targets:
            if target in self._targets:
                a, b = (proposal.tensors.get(n, current[n]) for n in (f"{target}.lora_A", f"{target}.lora_B"))
                found[target] = self._measure(self._targets[target], LoraTerm(a, b, self._scaling[target]))
        return {
            **_numbers(combine_exactness(list(found.values()))),
            "per_target": {target: _numbers(e) for target, e in found.items()},
            "reason": None,
        }

    def _measure(self, target: _Target, server: LoraTerm) -> Exactness:
        shares = self._aggregator.weights({h.client: h.num_examples for h in target.held})
        clients, start_shares = [], [0.0] * len(target.starts)
        for h in target.held:
            share = shares[h.client]
            start_shares[h.start] += share
            a, b = (v.astype(np.float64) for v in h.values)
            if h.is_delta:
                a, b = a + target.starts[h.start][0], b + target.starts[h.start][1]
            clients.append(LoraTerm(a, b, server.scaling, share))
        starts = [LoraTerm(a, b, server.scaling, q) for (a, b), q in zip(target.starts, start_shares, strict=True)]
        return exactness_error(server, clients, starts)


def _numbers(exactness: Exactness) -> dict[str, float | None]:
    values = {"exactness_error": exactness.relative, "exactness_error_update": exactness.relative_to_update}
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
