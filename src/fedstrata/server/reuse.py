"""Whether a client computes what enters its lowest trained block once per example; from plan and spec alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fedstrata.core.tensors import Stratum, lowest_block
from fedstrata.server.setup import RoundSetup

VISITS_IN_A_ROUND = 1.5
"""Mean visits per example in one round from which reuse pays: clearly above one."""

VISITS_OVER_ROUNDS = 0.25
"""Mean visits per example and round, absent clients counted, from which states that can never change pay: within
six rounds at the latest. The number of rounds does not count, so that a run can be extended."""

BYTES_PER_VALUE = 4


def reuse_of(
    setup: RoundSetup, trained: Iterable[Stratum], train: Mapping[str, Any]
) -> Literal["off", "auto", "always"]:
    """What a task says about reuse.

    `auto` holds for every client of a round that has frozen blocks below its trained ones, if either

        v ≥ 1.5               v: the local epochs, or K·steps·batch / Σ_k n_k: visits per example in a round; or
        v·cohort/K ≥ 0.25     and no plan ever trains a block below this client's lowest one, and the states of all
                              K clients fit into the memory: Σ_k n_k·max_length·width·4 bytes

    The fleet's mean counts, not the client's own number, so that clients of one run are computed alike.

    Args:
        setup: What all rounds share.
        trained: The client's trained strata.
        train: Options of its local training.
    """
    block = lowest_block(trained, setup.shape.num_blocks)
    if setup.reuse == "off" or block == 0 or setup.method.skips_blocks:
        return "off"
    if setup.reuse == "always":
        return "always"
    num_clients, num_examples = len(setup.workers.clients), setup.num_examples
    steps = num_clients * int(train.get("local_steps") or 0)
    visits = train.get("local_epochs") or steps * int(train["batch_size"]) / max(num_examples, 1)
    if visits >= VISITS_IN_A_ROUND:
        return "auto"
    share = min(1.0, (setup.clients_per_round or num_clients) / num_clients)
    state_bytes = num_examples * setup.max_length * setup.shape.hidden_size * BYTES_PER_VALUE
    lasts = setup.method.planner.lowest_block(setup.shape, setup.workers) >= block
    pays = visits * share >= VISITS_OVER_ROUNDS and state_bytes <= setup.reuse_memory_bytes
    return "auto" if lasts and pays else "off"
