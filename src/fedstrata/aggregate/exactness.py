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

Pair = tuple[np.ndarray | None, np.ndarray | None]
"""A and B; None where a factor was not sent: it is the server's own."""

_IDENTITY = "identity"
_KEYS = ("exactness_error", "exactness_error_update")
_ROBUST_KEYS = ("distance_to_mean", "distance_to_mean_update")


@dataclass(frozen=True, eq=False)
class _Start:
    """Where clients began at one target, and how they looked at it."""

    pair: Pair
    rank: int
    scaling: float
    slices: tuple[int, ...] | None

    def equals(self, other: _Start) -> bool:
        """Whether it is the same start, bit for bit."""
        if (self.rank, self.scaling, self.slices) != (other.rank, other.scaling, other.slices):
            return False
        return all(
            a is b or (a is not None and b is not None and np.array_equal(a, b))
            for a, b in zip(self.pair, other.pair, strict=True)
        )

    def filled(self, own: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """A and B in float64, with the server's own factors where clients were sent none."""
        which: Any = slice(self.rank) if self.slices is None else list(self.slices)
        lora_A = own[0][which] if self.pair[0] is None else self.pair[0]
        lora_B = own[1][:, which] if self.pair[1] is None else self.pair[1]
        return lora_A.astype(np.float64), lora_B.astype(np.float64)


@dataclass(frozen=True, eq=False)
class _Held:
    """One client's pair of one target as it arrived; `start` is an index into the target's distinct starts."""

    client: str
    num_examples: int
    values: Pair
    start: int
    is_delta: bool

    def local(self, start: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """A and B after training, in float64."""
        a, b = (self._factor(v, s) for v, s in zip(self.values, start, strict=True))
        return a, b

    def _factor(self, sent: np.ndarray | None, start: np.ndarray) -> np.ndarray:
        if sent is None:
            return start
        return sent + start if self.is_delta else sent.astype(np.float64)


@dataclass
class _Target:
    """What the cohort sent for one target."""

    held: list[_Held] = field(default_factory=list)
    starts: list[_Start] = field(default_factory=list)

    def start_index(self, start: _Start) -> int:
        """Where this start stands among the distinct ones; it is appended if it is new."""
        for i, known in enumerate(self.starts):
            if known.equals(start):
                return i
        self.starts.append(start)
        return len(self.starts) - 1


class ExactnessProbe:
    """Keeps the LoRA factors of one round's replies until the proposal is known.

    With q_k the weights of the method at a target (`Proposal.weights`, else `Aggregator.weights`), D_k = s_k·B_k·A_k
    as decoded, with the client's own scaling s_k, and D_s the sum of the server's s·B·A and its base update:

        exactness_error = ‖D_s − Σ q_k·D_k‖_F / ‖Σ q_k·D_k‖_F

    Robust means are meant to differ from the mean: their number is called `distance_to_mean`. A factor that clients
    do not send is the one in the update's start, if it is there, else the server's.

    Args:
        layout: The server's.
        scaling: s per target, the server's; a client's own comes with its update.
        aggregator: Whose weights q_k count.
        max_values: How many numbers may be kept; beyond that the error is not measured. 0 switches it off.
        personal: Whether every client ends with a model of its own; there is no error then.
    """

    def __init__(
        self,
        layout: Layout,
        scaling: Mapping[str, float],
        aggregator: Aggregator[Any],
        *,
        max_values: int = 1 << 26,
        personal: bool = False,
    ) -> None:
        self._layout, self._scaling, self._aggregator, self._max_values = layout, scaling, aggregator, max_values
        self._targets: dict[str, _Target] = {}
        self._num_values = 0
        self._reason: str | None = None
        if not max_values:
            self._reason = "switched off"
        elif personal or aggregator.personal:
            self._reason = "every client has a model of its own"
        elif not layout.targets:
            self._reason = "there are no LoRA pairs"

    def add(self, update: ClientUpdate) -> None:
        """Keeps the pairs of one update, by reference; nothing once the budget is spent."""
        if self._reason is not None:
            return
        for target in update.layout.targets:
            names = _factors(self._layout, target)
            specs = [update.layout[n] for n in names if n in update.layout]
            here = self._targets.setdefault(target, _Target())
            num_starts = len(here.starts)
            values = (self._sent(update, names[0]), self._sent(update, names[1]))
            scaling = update.scaling.get(target, self._scaling[target])
            begin = (update.start.get(names[0]), update.start.get(names[1]))
            if names[1] == _IDENTITY:
                begin = (begin[0], np.eye(specs[0].rank, dtype=np.float32))
            start = here.start_index(_Start(begin, specs[0].rank, scaling, update.slices.get(specs[0].stratum)))
            here.held.append(_Held(update.client, update.num_examples, values, start, update.send == "delta"))
            copies = 1 + len(here.starts) - num_starts
            self._num_values += copies * sum(s.num_values for s in specs)
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
            the `reason` where they are null; for robust means also `distance_to_mean` and `distance_to_mean_update`,
            which then hold the numbers. A single number is null where it is not finite (zero divisor).
        """
        if self._reason is None and not self._targets:
            self._reason = "no reply holds a LoRA pair"
        robust = self._aggregator.robust
        nothing = dict.fromkeys(_KEYS + (_ROBUST_KEYS if robust else ()))
        if self._reason is not None:
            return {**nothing, "per_target": {}, "reason": self._reason}
        found = {t: self._measure(t, proposal, current) for t in self._layout.targets if t in self._targets}
        keys = _ROBUST_KEYS if robust else _KEYS
        return {
            **nothing,
            **_numbers(combine_exactness(list(found.values())), keys),
            "per_target": {target: _numbers(e, keys) for target, e in found.items()},
            "reason": "a robust mean is meant to differ from the mean" if robust else None,
        }

    @staticmethod
    def _sent(update: ClientUpdate, name: str) -> np.ndarray | None:
        return update.values[name] if name in update.layout else None

    def _measure(self, target: str, proposal: Proposal, current: Mapping[str, np.ndarray]) -> Exactness:
        here, names = self._targets[target], _factors(self._layout, target)
        if names[1] == _IDENTITY:
            current = {**current, _IDENTITY: np.eye(len(current[names[0]]), dtype=np.float32)}
        begins = [s.filled((current[names[0]], current[names[1]])) for s in here.starts]
        shares = proposal.weights.get(target) or self._aggregator.weights({h.client: h.num_examples for h in here.held})
        start_shares = [0.0] * len(begins)
        clients = []
        for h in here.held:
            start_shares[h.start] += shares[h.client]
            clients.append(LoraTerm(*h.local(begins[h.start]), here.starts[h.start].scaling, shares[h.client]))
        starts = [
            LoraTerm(*pair, start.scaling, q) for pair, start, q in zip(begins, here.starts, start_shares, strict=True)
        ]
        a, b = (proposal.tensors.get(n, current[n]) for n in names)
        server = LoraTerm(a, b, self._scaling[target])
        if target in proposal.base_update:
            base_B, base_A = proposal.base_update[target]
            server = LoraTerm(
                np.concatenate([base_A, server.scaling * a.astype(np.float64)]), np.concatenate([base_B, b], axis=1)
            )
        return exactness_error(server, clients, starts)


def _factors(layout: Layout, target: str) -> tuple[str, str]:
    """The names of A and B; between two frozen orthonormal factors ‖B·R·A‖ = ‖R‖, so that R stands with an identity."""
    square = f"{target}.lora_R"
    return (square, _IDENTITY) if square in layout else (f"{target}.lora_A", f"{target}.lora_B")


def _numbers(exactness: Exactness, keys: tuple[str, str]) -> dict[str, float | None]:
    values = dict(zip(keys, (exactness.relative, exactness.relative_to_update), strict=True))
    return {key: value if math.isfinite(value) else None for key, value in values.items()}
