"""nf4 and random_k by hand: levels, ties, blocks, places, scaling, and hostile sections."""

from __future__ import annotations

import hashlib
import math
import statistics

import numpy as np
import pytest

from fedstrata.codec import CODECS, Int4, Nf4, RandomK
from fedstrata.codec.nf4 import LEVELS, MIDPOINTS
from fedstrata.codec.random_k import _places, drawn_indices
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, TensorSpec
from fedstrata.core.wire import Payload
from fedstrata.errors import ConfigError, PayloadError

FLOAT32_MAX = float(np.finfo(np.float32).max)
SEED = bytes(range(16))


def layout_of(tensors: dict[str, np.ndarray]) -> Layout:
    return Layout(tuple(TensorSpec(name, tensor.shape, 0) for name, tensor in tensors.items()))


def encode(codec, *values: float, rng=None) -> Payload:
    tensors = {"w": np.array(values, np.float32)}
    return codec.encode(tensors, layout_of(tensors), {}, rng or generator(0, "test"))[0]


def through(codec, *values: float) -> list[float]:
    layout = Layout((TensorSpec("w", (len(values),), 0),))
    return codec.decode(encode(codec, *values), layout)["w"].tolist()


def codes(section) -> list[int]:
    return [nibble for byte in bytes(section) for nibble in (byte & 15, byte >> 4)]


# ---- nf4


def test_nf4_levels_are_quantiles_of_a_normal_distribution():
    # QLoRA: with c = 1 − ½(1/32 + 1/30) = 0.9677083 as the outermost probability, 9 evenly spaced probabilities from
    # ½ to c give the levels from 0 up, 8 give those from 0 down; both are divided by the largest quantile.
    # The table was made with a slightly rounded c, hence the tolerance.
    quantile = statistics.NormalDist().inv_cdf
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    largest = quantile(outermost)
    upper = [quantile(0.5 + (outermost - 0.5) * i / 8) / largest for i in range(9)]
    lower = [-quantile(0.5 + (outermost - 0.5) * i / 7) / largest for i in range(7, 0, -1)]
    assert np.allclose(LEVELS, [*lower, *upper], atol=1e-4)
    assert (LEVELS[0], LEVELS[7], LEVELS[15]) == (-1, 0, 1)
    assert not LEVELS.flags.writeable


@pytest.mark.parametrize("scale", [1.0, 3.0, 2.0**-40, 1e30])
def test_every_level_times_the_scale_is_given_back(scale):
    values = [float(np.float32(level) * np.float32(scale)) for level in LEVELS]
    assert through(Nf4(), *values) == values
    assert codes(encode(Nf4(), *values).values) == list(range(16))


def test_nf4_takes_the_nearest_level_and_of_two_the_lower():
    for i, midpoint in enumerate(MIDPOINTS):
        below, above = (float(np.nextafter(midpoint, np.float32(side))) for side in (-2, 2))
        section = encode(Nf4(), 1.0, below, float(midpoint), above).values
        assert codes(section) == [15, i, i, i + 1]


def test_nf4_block_has_its_largest_magnitude_as_scale_and_the_last_may_be_short():
    payload = encode(Nf4(block=2), 1, -4, 0, -0.0, 3)
    assert np.frombuffer(payload.side, "<f4").tolist() == [4, 0, 3]
    assert not np.signbit(np.frombuffer(payload.side, "<f4")).any()
    # 0.25 lies between level 10 (0.2461) and 11 (0.3379), nearer to 10; zeros are code 7; the spare nibble is 0
    assert bytes(payload.values).hex() == "0a" + "77" + "0f"


def test_nf4_loses_less_than_even_steps_on_normal_values():
    tensors = {"w": generator(0, "normal").standard_normal(64_000, dtype=np.float32)}
    layout, errors = layout_of(tensors), {}
    for codec in (Nf4(block=64), Int4(block=64)):
        decoded = codec.decode(codec.encode(tensors, layout, {}, generator(0))[0], layout)
        errors[codec.id] = float(np.square(decoded["w"] - tensors["w"]).mean())
    assert errors["nf4"] < 0.8 * errors["int4"]


def test_nf4_error_stays_below_what_the_docstring_says():
    values = np.linspace(-1, 1, 20_001, dtype=np.float32)
    error = np.abs(np.array(through(Nf4(block=65536), *values)) - values)
    assert 0.1515 < error.max() < 0.152
    assert 0.0454 < error[np.abs(values) <= 0.1].max() < 0.046


def test_nf4_at_the_ends_of_float32():
    assert through(Nf4(), FLOAT32_MAX, -FLOAT32_MAX, 0) == [FLOAT32_MAX, -FLOAT32_MAX, 0]
    assert through(Nf4(), 2.0**-149, 0, -(2.0**-149)) == [2.0**-149, 0, -(2.0**-149)]


@pytest.mark.parametrize("scale", [-1.0, math.nan, math.inf])
def test_nf4_wrong_scale_is_refused(scale):
    layout = Layout((TensorSpec("w", (2,), 0),))
    with pytest.raises(PayloadError, match="scale"):
        Nf4().decode(Payload(np.array([scale], "<f4").tobytes(), b"\x77"), layout)


def test_nf4_filled_spare_bits_are_refused():
    layout = Layout((TensorSpec("fine", (2,), 0), TensorSpec("block.3.w", (1,), 0)))
    with pytest.raises(PayloadError, match=r"block\.3\.w"):
        Nf4().decode(Payload(np.ones(2, "<f4").tobytes(), b"\x77\x17"), layout)


@pytest.mark.parametrize("block", [0, -1, 65537])
def test_nf4_block_out_of_range_is_refused(block):
    with pytest.raises(ConfigError, match=f"block = {block}"):
        CODECS.build({"id": "nf4", "block": block})


# ---- random_k


def slow_indices(seed: bytes, name: str, n: int, k: int) -> list[int]:
    """The format's rule, one whole number at a time."""
    key = int.from_bytes(hashlib.sha256(seed + name.encode()).digest()[:8], "little")
    found: set[int] = set()
    j = 0
    while len(found) < min(k, n - k):
        found.add((splitmix(key, j) * n) >> 64)
        j += 1
    return sorted(set(range(n)) - found if 2 * k > n else found)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 1), (10, 3), (10, 5), (10, 6), (10, 10), (1000, 10), (997, 900)])
def test_places_follow_the_documented_rule(n, k):
    places = drawn_indices(SEED, "block.1.lora_A", n, k)
    assert places.tolist() == slow_indices(SEED, "block.1.lora_A", n, k)
    assert len(places) == k


def splitmix(key: int, j: int) -> int:
    """Word j of the stream, one whole number at a time."""
    z = (key + (j + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_places_of_large_tensors_are_exact():
    n = 2**31 + 7  # the product z·n needs more than 64 bits
    assert _places(np.uint64(5), 1, 200, n).tolist() == [(splitmix(5, j) * n) >> 64 for j in range(200)]


def test_every_place_is_drawn_equally_often():
    # 4000 seeds, 3 of 12 places: 1000 times each, standard deviation √(4000·¼·¾) = 27.4
    times = np.zeros(12)
    for i in range(4000):
        times[drawn_indices(i.to_bytes(16, "little"), "w", 12, 3)] += 1
    assert (np.abs(times - 1000) < 5 * 27.4).all()


def test_tensors_of_one_payload_have_places_of_their_own():
    assert drawn_indices(SEED, "a", 1000, 20).tolist() != drawn_indices(SEED, "b", 1000, 20).tolist()


def test_sent_entries_arrive_and_the_others_are_zero():
    values = list(range(1, 11))
    payload = encode(RandomK(0.3), *values)
    places = drawn_indices(payload.side, "w", 10, 3).tolist()
    assert through(RandomK(0.3), *values) == [v if i in places else 0 for i, v in enumerate(values)]
    assert (len(payload.side), len(payload.values)) == (16, 12)


def test_the_seed_comes_from_the_named_stream():
    streams = [generator(0, "codec", 1, "a"), generator(0, "codec", 2, "a"), generator(0, "codec", 1, "b")]
    seeds = {bytes(encode(RandomK(0.5), 1, 2, 3, 4, rng=rng).side) for rng in streams}
    assert len(seeds) == 3
    assert bytes(encode(RandomK(0.5), 1, 2, 3, 4, rng=generator(0, "codec", 1, "a")).side) in seeds


def test_scaled_entries_are_unbiased():
    # x̂ = 4x with probability ¼: mean x, standard error of the mean over N draws x·√(3/N)
    num, codec = 1500, RandomK(0.25, scale=True)
    layout = Layout((TensorSpec("w", (8,), 0),))
    tensors = {"w": np.arange(1, 9, dtype=np.float32)}
    total = np.zeros(8)
    for i in range(num):
        total += codec.decode(codec.encode(tensors, layout, {}, generator(i, "draw"))[0], layout)["w"]
    assert (np.abs(total / num - tensors["w"]) < 5 * tensors["w"] * math.sqrt(3 / num)).all()


def test_everything_sent_is_not_scaled():
    assert through(RandomK(1.0, scale=True), 1, -2, 3) == [1, -2, 3]


def test_scaled_entry_beyond_float32_is_an_error_that_names_the_tensor():
    with pytest.raises(PayloadError, match="Tensor w"):
        encode(RandomK(0.5, scale=True), *[FLOAT32_MAX] * 4)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1, math.nan])
def test_fraction_outside_zero_to_one_is_refused(fraction):
    with pytest.raises(ConfigError, match="fraction"):
        RandomK(fraction)


def test_tensor_that_a_u32_cannot_count_is_refused_before_anything_is_allocated():
    layout = Layout((TensorSpec("w", (2**16, 2**16), 0),))
    with pytest.raises(PayloadError, match="too large"):
        RandomK().decode(Payload(SEED, b""), layout)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_random_k_value_that_is_not_finite_is_refused(value):
    with pytest.raises(PayloadError, match="tensor w"):
        RandomK(1.0).decode(Payload(SEED, np.array([value], "<f4").tobytes()), Layout((TensorSpec("w", (1,), 0),)))
