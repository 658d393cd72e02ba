"""The anchor scan: how deep each client trains so that nobody waits too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Depths:
    """Who trains how deep.

    Attributes:
        depths: k_i per client.
        target_s: T, the seconds that everyone should stay within.
        wait_ratio: mean_i(max_j t_j − t_i)/max_j t_j at these depths.
        anchor_depth: Depth of the slowest client that gave T; None if T was given.
        wait_target_met: Whether the wait is at most ε.
    """

    depths: Mapping[str, int]
    target_s: float
    wait_ratio: float
    anchor_depth: int | None
    wait_target_met: bool


def anchor_scan(
    times: Mapping[str, Sequence[float]],
    deepest: Mapping[str, int],
    *,
    min_depth: int = 1,
    max_wait: float = 0.2,
    target_s: float | None = None,
) -> Depths:
    """Chooses depths by the time of the slowest client.

    d is the client with the largest t(k_min) (the lowest id of several). For k_a = k_min, …, L: T = t_d(k_a), and
    k_i is the largest k in [k_min, k_max,i] with t_i(k) ≤ T(1 + 1e-9). Of all k_a with a wait of at most ε the largest
    wins; without one, the smallest wait (the largest such k_a).

    Args:
        times: t_i(k) per client for k = 0, …, L, not decreasing.
        deepest: k_max,i, the largest depth that the client's caps allow; at least `min_depth`.
        min_depth: k_min.
        max_wait: ε.
        target_s: T, fixed; a client that cannot keep it trains k_min.
    """
    clients = sorted(times)
    if target_s is not None:
        return _depths_within(target_s, times, deepest, min_depth, max_wait, None)
    slowest = max(clients, key=lambda c: times[c][min_depth])
    found = [
        _depths_within(times[slowest][depth], times, deepest, min_depth, max_wait, depth)
        for depth in range(min_depth, len(times[slowest]))
    ]
    good = [f for f in found if f.wait_target_met]
    return good[-1] if good else min(reversed(found), key=lambda f: f.wait_ratio)


def wait_ratio(times: Sequence[float]) -> float:
    """How long clients wait for the slowest, on average, as a share of its time.

    Example:
        >>> wait_ratio([1.0, 2.0])
        0.25
    """
    longest = max(times)
    return sum(longest - t for t in times) / len(times) / longest if longest > 0 else 0.0


def _depths_within(
    target_s: float,
    times: Mapping[str, Sequence[float]],
    deepest: Mapping[str, int],
    min_depth: int,
    max_wait: float,
    anchor_depth: int | None,
) -> Depths:
    limit = target_s * (1 + _TOLERANCE)
    depths = {}
    for client in sorted(times):
        able = [k for k in range(min_depth, deepest[client] + 1) if times[client][k] <= limit]
        depths[client] = max(able, default=min_depth)
    wait = wait_ratio([times[c][k] for c, k in depths.items()])
    return Depths(depths, target_s, wait, anchor_depth, wait <= max_wait)
