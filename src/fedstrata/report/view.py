"""What the picture of a run shows: plain values, already counted and sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """A value of one round."""

    server_round: int
    value: float


@dataclass(frozen=True, slots=True)
class StratumCell:
    """How many clients trained a stratum (`"5"`, `"head"`) in one round."""

    server_round: int
    stratum: str
    num_clients: int


@dataclass(frozen=True, slots=True)
class ClientCell:
    """How many blocks a client trained in one round; None if it failed. Clients that were not drawn have no cell."""

    server_round: int
    client: str
    num_blocks: int | None


@dataclass(frozen=True)
class RunView:
    """A run as the picture shows it.

    Attributes:
        title: Method and result.
        subtitle: What was run, on what, and how it ended; two lines.
        num_rounds: The last finished round.
        num_blocks: L.
        num_clients: All clients, shown or not.
        strata: Rows of the map of strata, from the top.
        rounds: Columns of both maps, ascending; fewer than `num_rounds` in long runs.
        clients: Rows of the map of clients, from the top; fewer than `num_clients` in large fleets.
        loss: Mean training loss per round.
        accuracy: Validation accuracy per evaluated round.
        best_round: The round with the best validation metric; None without a validation set.
        test_accuracy: None before the end of the run.
        base_accuracy: Of the untouched model on the test set; None before the end of the run.
        accuracy_of: Whose accuracy it is.
        stratum_cells: One per row and column.
        client_cells: One per task that a shown client got.
        downlink: Bytes to the clients per round.
        uplink: Bytes from the clients per round.
    """

    title: str
    subtitle: list[str]
    num_rounds: int
    num_blocks: int
    num_clients: int
    strata: list[str]
    rounds: list[int]
    clients: list[str]
    loss: list[Point]
    accuracy: list[Point]
    best_round: int | None
    test_accuracy: float | None
    base_accuracy: float | None
    accuracy_of: str
    stratum_cells: list[StratumCell]
    client_cells: list[ClientCell]
    downlink: list[Point]
    uplink: list[Point]


def every_kth(values: Sequence[T], most: int) -> list[T]:
    """Every k-th value from the first on, with the smallest k that leaves at most `most`.

    Example:
        >>> every_kth([1, 2, 3, 4, 5], 3)
        [1, 3, 5]
    """
    return list(values[:: -(-len(values) // most) or 1])


def spread_sample(values: Sequence[T], most: int) -> list[T]:
    """At most `most` values, evenly spread over all, the first among them.

    Example:
        >>> spread_sample("abcdefgh", 3)
        ['a', 'c', 'f']
    """
    if len(values) <= most:
        return list(values)
    return [values[i * len(values) // most] for i in range(most)]


def round_ticks(values: Sequence[int], most: int = 12) -> list[int]:
    """Which rounds of an axis are labeled: all of a few, otherwise the first and round numbers.

    Where columns are left out, the first one at or after a round number stands for it.

    Example:
        >>> round_ticks(range(1, 5)), round_ticks(range(1, 101))
        ([1, 2, 3, 4], [1, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100])
        >>> round_ticks(range(1, 301, 2))
        [1, 51, 101, 151, 201, 251]
    """
    if len(values) <= most:
        return list(values)
    step = next(s * 10**e for e in range(9) for s in (2, 5, 10) if values[-1] / (s * 10**e) < most)
    ticks = [v for before, v in pairwise(values) if v // step > before // step]
    return [values[0], *ticks]
