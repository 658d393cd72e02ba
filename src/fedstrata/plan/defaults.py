"""What devices of different speed train where nobody said so."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedstrata.core.shape import ModelShape
from fedstrata.device.fleet import Fleet


def kinds_by_speed(fleet: Fleet) -> list[str]:
    """Device kinds from the slowest to the fastest; equally fast ones by name."""
    speed = {c.device.name: c.device.flop_per_s for c in fleet.clients}
    return sorted(speed, key=lambda kind: (speed[kind], kind))


def counts_of(given: int | Mapping[str, int] | None, shape: ModelShape, fleet: Fleet) -> dict[str, int]:
    """The number of blocks per device kind.

    One number counts for all kinds. Without one, the g-th of G kinds, from the slowest on, trains

        c_g = ⌈L·(½ + ½·(g − 1)/(G − 1))⌉,    or ⌈L/2⌉ where there is one kind only

    of the L blocks with an adapted map: half of them on the slowest, all of them on the fastest (12 blocks and three
    kinds: 6, 9, 12).
    """
    kinds = kinds_by_speed(fleet)
    if isinstance(given, int):
        return dict.fromkeys(kinds, given)
    if given is not None:
        return dict(given)
    num_blocks = len({t.block for t in shape.targets}) or shape.num_blocks
    steps = max(len(kinds) - 1, 1)
    return {kind: math.ceil(num_blocks * (steps + g) / (2 * steps)) for g, kind in enumerate(kinds)}


def ranks_of(given: Mapping[str, int] | None, fleet: Fleet, max_rank: int) -> dict[str, int]:
    """The rank per device kind: as given, or `max_rank` on the fastest and half as much on each slower one (≥ 1)."""
    if given is not None:
        return dict(given)
    return {kind: max(1, max_rank >> g) for g, kind in enumerate(reversed(kinds_by_speed(fleet)))}
