"""What a method has merged into the base model, as factors while those are small.

Merge m adds B_m·A_m to the weight of each of its targets. The sum is defined by a recursion in float32,

    D_m = float32(D_{m−1} + B_m·A_m),    D_0 = 0,    W = float32(W_0 + D_m),

so that its bits do not depend on when, where and in how many pieces the merges arrive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from fedstrata.core.linalg import single_thread
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.core.wire import Bytes
from fedstrata.errors import PayloadError

Factors: TypeAlias = tuple[np.ndarray, np.ndarray]
"""B [out, R] and A [R, in], float32."""

DENSE = -1


@dataclass(frozen=True, eq=False)
class Merge:
    """One merge, or the sum of all up to it for targets that are sent dense.

    Attributes:
        number: m, from 1.
        factors: B_m and A_m by target.
        dense: D_m [out, in], float32, by target.
    """

    number: int
    factors: Mapping[str, Factors] = field(default_factory=dict)
    dense: NamedTensors = field(default_factory=dict)

    @property
    def num_values(self) -> int:
        """How many numbers it holds."""
        pairs = sum(b.size + a.size for b, a in self.factors.values())
        return pairs + sum(d.size for d in self.dense.values())


@dataclass(frozen=True, eq=False)
class BaseLog:
    """All merges so far; old ones as dense sums, once their factors would need more numbers than those.

    Attributes:
        number: Of the last merge; 0 without one.
        snapshot_number: Merges up to here are in `snapshot`.
        snapshot: D of that number, by target.
        merges: The later ones, in order.
    """

    number: int = 0
    snapshot_number: int = 0
    snapshot: NamedTensors = field(default_factory=dict)
    merges: tuple[Merge, ...] = ()

    def append(self, factors: Mapping[str, Factors]) -> BaseLog:
        """The log with one more merge; an empty one changes nothing.

        The oldest merges become a dense sum while the factors need more numbers than the dense sums of their targets:
        the log never holds more than twice the dense numbers.
        """
        if not factors:
            return self
        return self.take(Merge(self.number + 1, factors))

    def take(self, merge: Merge) -> BaseLog:
        """The log with a merge that may be the next one, or may hold dense sums in place of what was missed.

        Raises:
            PayloadError: If merges are missing for a target that it has no dense sum of.
        """
        if merge.number <= self.number:
            return self
        snapshot_number, snapshot, merges = self.snapshot_number, dict(self.snapshot), list(self.merges)
        if merge.dense:  # everything becomes dense: what came before is in there
            snapshot = {**self.dense(), **merge.dense}
            for target, pair in merge.factors.items():
                snapshot[target] = add_product(snapshot.get(target), pair)
            return BaseLog(merge.number, merge.number, snapshot)
        merges.append(merge)
        limit = sum(math.prod((b.shape[0], a.shape[1])) for b, a in _largest(merges, snapshot).values())
        while merges and sum(m.num_values for m in merges) > limit:
            oldest = merges.pop(0)
            for target, pair in oldest.factors.items():
                snapshot[target] = add_product(snapshot.get(target), pair)
            snapshot_number = oldest.number
        return BaseLog(merge.number, snapshot_number, snapshot, tuple(merges))

    def dense(self) -> NamedTensors:
        """D [out, in] by target, float32."""
        sums = dict(self.snapshot)
        for merge in self.merges:
            for target, pair in merge.factors.items():
                sums[target] = add_product(sums.get(target), pair)
        return sums

    def since(self, known: int) -> tuple[Merge, ...]:
        """What someone at merge `known` needs to stand at `number`.

        A target's missing merges travel as factors; dense, as D of the last number, where R·(out + in) > out·in for
        the sum R of their ranks, or where the factors are gone.
        """
        if known >= self.number:
            return ()
        missing = [m for m in self.merges if m.number > known]
        ranks: dict[str, int] = {}
        for merge in missing:
            for target, (_, a) in merge.factors.items():
                ranks[target] = ranks.get(target, 0) + len(a)
        sizes = {t: (b.shape[0], a.shape[1]) for t, (b, a) in _largest(missing, {}).items()}
        heavy = {t for t, (n_out, n_in) in sizes.items() if ranks[t] * (n_out + n_in) > n_out * n_in}
        if known < self.snapshot_number:
            heavy |= set(self.snapshot)
        sums = self.dense() if heavy else {}
        parts = []
        for merge in missing:
            light = {t: pair for t, pair in merge.factors.items() if t not in heavy}
            last = merge.number == self.number
            parts.append(Merge(merge.number, light, {t: sums[t] for t in sorted(heavy)} if last else {}))
        if not missing:
            parts.append(Merge(self.number, {}, {t: sums[t] for t in sorted(heavy)}))
        return tuple(parts)

    def to_tensors(self) -> NamedTensors:
        """Snapshot and factors by name, for a checkpoint."""
        named: NamedTensors = {f"snapshot/{t}": d for t, d in self.snapshot.items()}
        for merge in self.merges:
            for target, (b, a) in merge.factors.items():
                named[f"{merge.number}/{target}/B"], named[f"{merge.number}/{target}/A"] = b, a
        return named

    @staticmethod
    def from_tensors(number: int, snapshot_number: int, named: Mapping[str, np.ndarray]) -> BaseLog:
        """What `to_tensors` gave, read again."""
        snapshot: NamedTensors = {}
        found: dict[int, dict[str, dict[str, np.ndarray]]] = {}
        for name, tensor in named.items():
            first, rest = name.split("/", 1)
            if first == "snapshot":
                snapshot[rest] = tensor
            else:
                target, factor = rest.rsplit("/", 1)
                found.setdefault(int(first), {}).setdefault(target, {})[factor] = tensor
        merges = tuple(Merge(m, {t: (p["B"], p["A"]) for t, p in found[m].items()}) for m in sorted(found))
        return BaseLog(number, snapshot_number, snapshot, merges)


def add_product(before: np.ndarray | None, pair: Factors) -> np.ndarray:
    """float32(before + B·A), the product in float64."""
    with single_thread():
        total = pair[0].astype(np.float64) @ pair[1].astype(np.float64)
    if before is not None:
        total += before
    return total.astype(np.float32)


def pack_merges(merges: Sequence[Merge], layout: Layout) -> tuple[list[list[Any]], bytes]:
    """Header entries and float32 bytes of merges.

    An entry is `[number, [R of every target in the layout's order]]`, with −1 for a dense sum and 0 for nothing; the
    bytes hold B and A, or D, in the same order.
    """
    entries, parts = [], []
    for merge in merges:
        ranks = []
        for target in layout.targets:
            if target in merge.dense:
                ranks.append(DENSE)
                parts.append(merge.dense[target])
            elif target in merge.factors:
                ranks.append(len(merge.factors[target][1]))
                parts.extend(merge.factors[target])
            else:
                ranks.append(0)
        entries.append([merge.number, ranks])
    return entries, b"".join(np.ascontiguousarray(p, "<f4").tobytes() for p in parts)


def unpack_merges(entries: Sequence[Any], values: Bytes, layout: Layout) -> tuple[list[Merge], Bytes]:
    """Merges and the bytes behind them.

    Raises:
        PayloadError: If the entries make no sense, the bytes are cut short or a value is not finite.
    """
    sizes = _map_sizes(layout)
    view, offset, merges = memoryview(values), 0, []

    def read(*shape: int) -> np.ndarray:
        nonlocal offset
        size = 4 * math.prod(shape)
        if offset + size > len(view):
            raise PayloadError("The merges are cut short", expected=f"{offset + size} bytes", got=str(len(view)))
        found = np.frombuffer(view[offset : offset + size], "<f4").reshape(shape)
        if not np.isfinite(found).all():
            raise PayloadError("A merge holds NaN or infinite values")
        offset += size
        return found

    before = 0
    for entry in entries:
        number, ranks = _checked_entry(entry, sizes, before)
        before = number
        factors: dict[str, Factors] = {}
        dense: NamedTensors = {}
        for (target, (n_out, n_in)), rank in zip(sizes.items(), ranks, strict=True):
            if rank == DENSE:
                dense[target] = read(n_out, n_in)
            elif rank:
                factors[target] = (read(n_out, rank), read(rank, n_in))
        merges.append(Merge(number, factors, dense))
    return merges, view[offset:]


def _map_sizes(layout: Layout) -> dict[str, tuple[int, int]]:
    """(out, in) of every target."""
    return {t: (layout[f"{t}.lora_B"].shape[0], layout[f"{t}.lora_A"].shape[1]) for t in layout.targets}


def _checked_entry(entry: Any, sizes: Mapping[str, tuple[int, int]], before: int) -> tuple[int, list[int]]:
    fits = (
        isinstance(entry, list)
        and len(entry) == 2
        and type(entry[0]) is int
        and entry[0] > before
        and isinstance(entry[1], list)
        and len(entry[1]) == len(sizes)
        and all(type(r) is int and DENSE <= r <= min(s) for r, s in zip(entry[1], sizes.values(), strict=True))
    )
    if not fits:
        raise PayloadError(
            "The header's merges make no sense",
            expected=f"ascending [number, [{len(sizes)} ranks]]",
            got=repr(entry)[:100],
        )
    return int(entry[0]), list(entry[1])


def _largest(merges: Sequence[Merge], snapshot: Mapping[str, np.ndarray]) -> dict[str, Factors]:
    """One pair per target, for its sizes."""
    known: dict[str, Factors] = {t: (d[:, :0], d[:0]) for t, d in snapshot.items()}
    for merge in merges:
        known.update(merge.factors)
    return known
