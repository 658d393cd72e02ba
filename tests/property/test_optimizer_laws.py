"""Server optimizers in a round, for every method that may have one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedstrata.errors import PlanError
from fedstrata.optimize import OPTIMIZERS, Momentum, NoOptimizer, check_coordinates

Case = tuple[str, str]
SIZES = {"a": 30, "b": 7, "c": 12, "d": 1}


def test_momentum_without_momentum_is_no_optimizer(lab: Any, case: Case) -> None:
    """β = 0, η = 1: W − (W − W̄), the difference in float64; others are refused before a run."""
    method = lab.method(case[0])
    if not method.aggregator.fixed_coordinates:
        with pytest.raises(PlanError, match="cannot follow"):
            check_coordinates(Momentum(1.0, 0.0), method.aggregator)
        return
    worlds = [
        lab.world(method.with_parts(optimizer=o), case[1], sizes=SIZES, num_blocks=3, clients_per_round=3)
        for o in (NoOptimizer(), Momentum(1.0, 0.0))
    ]
    for _ in range(2):
        records = [world.round()[0] for world in worlds]
        assert records[0]["holders"] == records[1]["holders"]
    for name, tensor in worlds[0].state.tensors.items():
        np.testing.assert_allclose(worlds[1].state.tensors[name], tensor, rtol=1e-5, atol=1e-6)
    assert worlds[0].state.versions == worlds[1].state.versions


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - {"none"}))
def test_weights_moments_and_steps_rest_while_nobody_holds_a_block(lab: Any, optimizer: str) -> None:
    """Each client trains one drawn block of twelve; what it did not train stays to the bit, momentum or not."""
    method = lab.method("fedra_freeze", strata=1).with_parts(optimizer=OPTIMIZERS.build(optimizer))
    world = lab.world(method, sizes=SIZES, clients_per_round=2, trained_before=False)
    rested = 0
    for _ in range(6):
        record, _ = world.round()
        for spec in world.setup.layout:
            held = str(spec.stratum) in record["holders"]
            same = world.before.tensors[spec.name].tobytes() == world.state.tensors[spec.name].tobytes()
            before, after = world.before, world.state
            steps = [s.optimizer_steps.get(spec.name, 0) for s in (before, after)]
            assert steps[1] - steps[0] == held
            keys = [k for k in after.moments if k.split("/", 1)[1] == spec.name]
            if not held:
                assert same
                assert all(after.moments[k].tobytes() == before.moments[k].tobytes() for k in keys)
                rested += bool(keys)
            else:
                assert not same
                assert keys
    assert rested > 0
    assert world.state.versions["head"] == 6
