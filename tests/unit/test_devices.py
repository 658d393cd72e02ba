"""Profiles, fleets, and the cost of a plan by hand."""

from __future__ import annotations

import pytest

from fedstrata.core.shape import ModelShape, TargetShape
from fedstrata.core.tensors import EMBEDDINGS, HEAD, TensorSpec
from fedstrata.device import (
    DeviceProfile,
    PlanCost,
    build_fleet,
    count_flop_per_step,
    count_step_flop,
    device_profile,
    predict_client_seconds,
    profile_names,
)
from fedstrata.errors import PlanError

KNOWN = {
    "laptop-8gb",
    "laptop-16gb",
    "jetson-tx2",
    "jetson-nx",
    "jetson-agx",
    "phone-8gb",
    "rtx4060-8gb",
    "rtx4090-24gb",
    "a100-40gb",
    "raspberry-pi5-8gb",
}


# ---- profiles


def test_the_known_kinds_are_there():
    assert set(profile_names()) >= KNOWN


@pytest.mark.parametrize("name", profile_names())
def test_profiles_are_complete_and_say_where_they_come_from(name):
    profile = device_profile(name)
    assert profile.name == name
    assert isinstance(profile.memory_bytes, int)
    rates = (profile.memory_bytes, profile.flop_per_s, profile.down_bytes_per_s, profile.up_bytes_per_s)
    assert min(rates) > 0
    assert profile.basis in {"vendor", "assumed"}
    assert len(profile.source) > 20
    if profile.basis == "vendor":
        assert "% of it" in profile.source


def test_no_profile_has_more_memory_than_its_name_says():
    for name in KNOWN - {"jetson-tx2", "jetson-nx", "jetson-agx"}:
        installed = int(name.rsplit("-", 1)[1].removesuffix("gb")) * 10**9
        assert installed // 2 <= device_profile(name).memory_bytes <= installed


def test_unknown_kinds_get_a_hint():
    with pytest.raises(PlanError, match='did you mean "jetson-tx2"'):
        device_profile("jetson-tx")


# ---- fleets


def test_ascending_clients_take_the_kinds_in_order():
    fleet = build_fleet({"jetson-nx": 1, "laptop-8gb": 2}, {"c10": 1, "c2": 2, "c1": 3})
    assert [(c.id, c.device.name, c.num_examples) for c in fleet.clients] == [
        ("c1", "jetson-nx", 3),
        ("c10", "laptop-8gb", 1),
        ("c2", "laptop-8gb", 2),
    ]
    assert fleet.kinds == {"jetson-nx": 1, "laptop-8gb": 2}


def test_all_mistakes_of_a_fleet_come_at_once():
    with pytest.raises(PlanError) as error:
        build_fleet({"jetson-mx": 2, "laptop-8gb": -1}, {"a": 1, "b": 1})
    text = str(error.value)
    assert 'unknown device kind "jetson-mx": did you mean "jetson-nx"' in text
    assert '"laptop-8gb" = -1' in text
    assert "1 devices for 2 clients" in text


# ---- cost

BLOCKS = 3
SHAPE = ModelShape(
    architecture="Tiny",
    num_blocks=BLOCKS,
    hidden_size=10,
    max_positions=None,
    targets=tuple(TargetShape(f"b.{b}.q", b, 10, 5) for b in range(BLOCKS)),
    head=(TensorSpec("classifier", (7,), HEAD),),
    parameters=(
        TensorSpec("words", (1000,), EMBEDDINGS),
        *(TensorSpec(f"b.{b}.w", (100,), b) for b in range(BLOCKS)),
        TensorSpec("norm", (3,), HEAD),
        TensorSpec("classifier", (7,), HEAD),
    ),
    base_bytes=0,
)
T = 2
"""Tokens per step: every parameter that is passed once costs 2·T = 4."""


def test_a_forward_pass_alone_counts_blocks_and_head():
    """3·100 + 10 parameters; embeddings are looked up."""
    assert count_flop_per_step(SHAPE, {}, T) == 4 * 310
    assert count_flop_per_step(SHAPE, {1: 0}, T) == 4 * 310


def test_cost_of_adapters_in_the_last_block_and_head():
    """N = 2·(10 + 5) = 30: forward 310 + 30, backward 100 + 10 + 30, weights 30 + 7."""
    assert count_flop_per_step(SHAPE, {2: 2, HEAD: 1}, T) == 4 * (340 + 140 + 37)


def test_blocks_that_are_left_out_cost_nothing_in_either_direction():
    """Block 1 and the head are all of the model: N = 30; forward 110 + 30, backward the same, weights 30 + 7."""
    flop = count_step_flop(SHAPE, {1: 2, HEAD: 1}, T, skips_blocks=True)
    assert (flop.forward, flop.backward) == (4 * 140, 4 * (140 + 37))
    assert count_step_flop(SHAPE, {HEAD: 1}, T, skips_blocks=True).total == 4 * (10 + 10 + 7)
    everything = {0: 1, 1: 1, 2: 1, HEAD: 1}
    assert count_step_flop(SHAPE, everything, T, skips_blocks=True) == count_step_flop(SHAPE, everything, T)
    cost = PlanCost(SHAPE, T, {"a": 1}, skips_blocks=True)
    whole = PlanCost(SHAPE, T, {"a": 1})
    reads = {0: 2, 2: 2}
    assert cost.download_bytes({1: 2}, reads) == cost.upload_bytes({1: 2}) == 120
    assert whole.download_bytes({1: 2}, reads) == 360
    per_block = 4 * T * 16 * 10
    assert cost.memory_bytes({0: 2}) == whole.memory_bytes({0: 2}) - 2 * per_block
    (client,) = build_fleet({"laptop-8gb": 1}, {"a": 1}).clients
    assert cost.seconds(client, {1: 2}).compute_s < whole.seconds(client, {1: 2}).compute_s


def test_cost_of_an_adapter_at_the_input_passes_all_blocks():
    """Forward 340, backward 310 + 30, weights 30."""
    assert count_flop_per_step(SHAPE, {0: 2}, T) == 4 * (340 + 340 + 30)


def test_cost_of_the_head_alone():
    """Forward 310, backward 10, weights 7."""
    assert count_flop_per_step(SHAPE, {HEAD: 1}, T) == 4 * (310 + 10 + 7)


def test_cost_of_full_parameters():
    """Last block and head: forward 310, backward 110, weights 100 + 10. Everything: 310, 310, 1310."""
    assert count_flop_per_step(SHAPE, {2: 1, HEAD: 1}, T, adapter="full") == 4 * (310 + 110 + 110)
    everything = {EMBEDDINGS: 1, 0: 1, 1: 1, 2: 1, HEAD: 1}
    assert count_flop_per_step(SHAPE, everything, T, adapter="full") == 4 * (310 + 310 + 1310)


def test_seconds_by_hand():
    """500/100 + 10·2068/1000 + 60/20 = 5 + 20.68 + 3."""
    profile = DeviceProfile("x", 1, flop_per_s=1000, down_bytes_per_s=100, up_bytes_per_s=20)
    time = predict_client_seconds(profile, SHAPE, {2: 2, HEAD: 1}, T, 10, 500, 60)
    assert (time.download_s, time.upload_s) == (5, 3)
    assert time.compute_s == pytest.approx(20.68)
    assert time.total_s == pytest.approx(28.68)


def test_deeper_suffixes_and_larger_ranks_cost_more():
    suffixes = [dict.fromkeys(range(BLOCKS - k, BLOCKS), 2) for k in range(BLOCKS + 1)]
    costs = [count_flop_per_step(SHAPE, s, T) for s in suffixes]
    assert costs == sorted(set(costs))
    assert count_flop_per_step(SHAPE, {2: 3}, T) > count_flop_per_step(SHAPE, {2: 2}, T)
