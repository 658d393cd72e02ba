"""Codecs by hand: numbers that can be checked on paper, options, and hostile sections."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.codec import BFloat16, Float16, Float32, Int4, Int8, TopK
from fedstrata.codec.quantize import largest_scale, spans
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, TensorSpec
from fedstrata.core.wire import Payload
from fedstrata.errors import PayloadError

FLOAT32_MAX = float(np.finfo(np.float32).max)


def row(*values: float) -> dict[str, np.ndarray]:
    return {"w": np.array(values, np.float32)}


def layout_of(tensors: dict[str, np.ndarray]) -> Layout:
    return Layout(tuple(TensorSpec(name, tensor.shape, 0) for name, tensor in tensors.items()))


def encode(codec, tensors, residual=None, rng=None):
    return codec.encode(tensors, layout_of(tensors), residual or {}, rng or generator(0, "test"))


def through(codec, *values: float) -> list[float]:
    tensors = row(*values)
    return codec.decode(encode(codec, tensors)[0], layout_of(tensors))["w"].tolist()


def floats(section) -> list[float]:
    return np.frombuffer(section, "<f4").tolist()


# ---- floats


def test_float32_decode_returns_views_of_the_payload():
    tensors = row(*range(1000))
    payload, _ = encode(Float32(), tensors)
    decoded = Float32().decode(payload, layout_of(tensors))["w"]
    assert np.shares_memory(decoded, np.frombuffer(payload.values, np.uint8))
    assert not decoded.flags.writeable


def test_float32_reads_values_that_are_not_aligned():
    tensors = row(1, 2, 3)
    data = b"x" + bytes(encode(Float32(), tensors)[0].values)
    decoded = Float32().decode(Payload(b"", memoryview(data)[1:]), layout_of(tensors))
    assert decoded["w"].tolist() == [1, 2, 3]


def test_encoding_copies_so_that_later_changes_do_not_reach_the_payload():
    tensors = row(1, 2)
    payload, _ = encode(Float32(), tensors)
    tensors["w"][:] = 9
    assert floats(payload.values) == [1, 2]


def test_tensor_that_is_not_contiguous_is_encoded_in_row_order():
    tensors = {"w": np.arange(6, dtype=np.float32).reshape(2, 3).T}
    payload, _ = encode(Float32(), tensors)
    assert floats(payload.values) == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-8, 1.0),  # a tie: the even neighbor is below
        (1 + 3 * 2**-8, 1 + 2**-6),  # a tie: the even neighbor is above
        (1 + 2**-8 + 2**-20, 1 + 2**-7),  # just above the tie
        (-(1 + 3 * 2**-8), -(1 + 2**-6)),
        (2.0**-149, 0.0),
        (2.0**-133, 2.0**-133),  # the smallest subnormal
        ((2 - 2**-7) * 2.0**127, (2 - 2**-7) * 2.0**127),  # the largest
    ],
)
def test_bfloat16_rounds_to_nearest_even(value, expected):
    assert through(BFloat16(), value) == [expected]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1 + 2**-11, 1.0), (1 + 3 * 2**-11, 1 + 2**-9), (2.0**-24, 2.0**-24), (2.0**-25, 0.0), (65504.0, 65504.0)],
)
def test_float16_rounds_to_nearest_even(value, expected):
    assert through(Float16(), value) == [expected]


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        (Float16(), 65504.01),
        (Float16(), -70000.0),
        (Float16(), FLOAT32_MAX),
        (BFloat16(), FLOAT32_MAX),
        (BFloat16(), -FLOAT32_MAX),
    ],
)
def test_value_above_the_largest_is_an_error_that_names_the_tensor(codec, value):
    tensors = {"fine": np.ones(3, np.float32), "block.7.lora_B": np.array([0, value, 0], np.float32)}
    with pytest.raises(PayloadError, match=r"block\.7\.lora_B"):
        encode(codec, tensors)


@pytest.mark.parametrize("codec", [Float16(), BFloat16()], ids=lambda codec: codec.id)
def test_nan_is_never_encoded_as_a_half(codec):
    with pytest.raises(PayloadError, match="w"):
        encode(codec, row(1, np.nan))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(Float32(), np.float32), (BFloat16(), np.uint16), (Float16(), np.float16), (TopK(1.0), np.float32)],
    ids=["float32", "bfloat16", "float16", "top_k"],
)
def test_value_that_is_not_finite_is_refused_and_its_tensor_named(codec, dtype, value):
    values = np.array([1, value], dtype if dtype is np.float16 else np.float32)
    if dtype is np.uint16:
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    side = np.array([0, 0], "<u4").tobytes() if codec.id == "top_k" else b""
    layout = layout_of({"fine": np.zeros(1, np.float32), "block.3.w": np.zeros(1, np.float32)})
    with pytest.raises(PayloadError, match=r"block\.3\.w"):
        codec.decode(Payload(side, values.tobytes()), layout)


# ---- integers


def test_int8_scale_is_the_largest_magnitude_over_127():
    # scale = 2.54/127 = 0.02; q = round(1/0.02) = 50, round(-0.031/0.02) = round(-1.55) = -2
    payload, _ = encode(Int8(), row(1, -2.54, -0.031))
    assert floats(payload.side) == [np.float32(2.54) / np.float32(127)]
    assert np.frombuffer(payload.values, np.int8).tolist() == [50, -127, -2]


def test_int4_packs_the_earlier_value_low_and_starts_every_tensor_on_a_byte():
    # scales 1 and 2; nibbles 7, -1 = F | 3, 0 (spare) and -7 = 9, 2
    tensors = {"a": np.array([7, -1, 3], np.float32), "b": np.array([-14, 4], np.float32)}
    payload, _ = encode(Int4(), tensors)
    assert floats(payload.side) == [1.0, 2.0]
    assert bytes(payload.values).hex() == "f703" + "29"


@pytest.mark.parametrize("codec", [Int8(block=3), Int4(block=3)], ids=lambda codec: codec.id)
def test_blocks_have_their_own_scale_and_the_last_may_be_short(codec):
    levels = 127 if codec.id == "int8" else 7
    payload, _ = encode(codec, row(1, 2, -levels, 0, 0, 0, 2 * levels, -2))
    assert floats(payload.side) == [1.0, 0.0, 2.0]
    assert through(codec, 1, 2, -levels, 0, 0, 0, 2 * levels, -2) == [1, 2, -levels, 0, 0, 0, 2 * levels, -2]


def test_blocks_do_not_reach_over_tensors():
    tensors = {"a": np.array([127], np.float32), "b": np.array([1.27], np.float32)}
    assert len(encode(Int8(), tensors)[0].side) == 8


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("make", [Int8, Int4], ids=["int8", "int4"])
@pytest.mark.parametrize("unit", [2.0**-149, 2.0**-140, 2.0**-126, 2.0**-120])
def test_subnormal_blocks_stay_finite_and_close(make, rounding, unit):
    values = [unit * k for k in (0, 1, -3, 100, 190, -200)]
    codec = make(rounding=rounding)
    payload, _ = encode(codec, row(*values))
    scale = floats(payload.side)[0]
    assert 0 < scale <= 200 * unit / (127 if make is Int8 else 7) + 2.0**-149
    bound = scale * (0.5 if rounding == "nearest" else 1.0) * (1 + 1e-5) + 2.0**-149
    assert max(abs(a - b) for a, b in zip(through(codec, *values), values, strict=True)) <= bound


@pytest.mark.parametrize(("codec", "levels"), [(Int8(), 127), (Int4(), 7)], ids=["int8", "int4"])
def test_largest_float32_is_encoded_without_infinity(codec, levels):
    decoded = through(codec, FLOAT32_MAX, -FLOAT32_MAX, 0)
    assert np.isfinite(decoded).all()
    assert decoded[0] == pytest.approx(FLOAT32_MAX, rel=1e-6)
    above = float(np.nextafter(largest_scale(levels), np.float32(np.inf)))
    assert float(largest_scale(levels)) * levels <= FLOAT32_MAX < above * levels


@pytest.mark.parametrize(("make", "levels"), [(Int8, 127), (Int4, 7)], ids=["int8", "int4"])
def test_stochastic_rounding_is_unbiased(make, levels):
    # Per value: P(up) = frac(x/scale). Standard error of the mean of n values: √(f(1−f)/n) steps.
    num = 40_000
    codec = make(block=num + 1, rounding="stochastic")
    for fraction in (0.1, 0.5, 0.75):
        values = [float(levels)] + [2 + fraction] * num
        mean = np.mean(through(codec, *values)[1:])
        assert abs(mean - (2 + fraction)) < 5 * np.sqrt(fraction * (1 - fraction) / num)


@pytest.mark.parametrize(("make", "levels"), [(Int8, 127), (Int4, 7)], ids=["int8", "int4"])
def test_stochastic_rounding_leaves_whole_steps_alone_and_never_leaves_the_range(make, levels):
    values = np.tile(np.arange(-levels, levels + 1), 200)
    codec = make(block=len(values), rounding="stochastic")
    assert through(codec, *values) == values.tolist()
    awkward = np.float32(0.1) * np.tile(np.float32([levels, -levels]), 5000)
    decoded = np.array(through(codec, *awkward.tolist()))
    assert np.abs(decoded - awkward).max() <= 1e-5 * levels


class Bits:
    """Stands in for a stream: hands out 16-bit numbers in a fixed order."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = np.array(numbers, "<u2")

    def integers(self, low, high, size, dtype):
        assert (low, high, dtype) == (0, 1 << 64, np.uint64)
        return np.resize(self.numbers, 4 * size).view("<u8")


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.9999])
def test_share_of_values_rounded_up_is_the_nearest_16_bit_fraction(fraction):
    # Over all 2^16 noises (j + ½)/2^16 exactly round(2^16·f) reach the next step; the first one meets the peak.
    tensors = row(7, *([2 + fraction] * 65535))
    payload, _ = encode(Int4(block=65536, rounding="stochastic"), tensors, rng=Bits(*range(65536)))
    decoded = Int4(block=65536, rounding="stochastic").decode(payload, layout_of(tensors))["w"]
    assert set(decoded[1:].tolist()) == {2, 3}
    assert np.count_nonzero(decoded[1:] == 3) == round(65536 * (float(tensors["w"][1]) - 2))


@pytest.mark.parametrize(("make", "levels"), [(Int8, 127), (Int4, 7)], ids=["int8", "int4"])
@pytest.mark.parametrize("noise", [0, 65535])
def test_peak_whose_quotient_rounds_above_the_range_stays_in_it(make, levels, noise):
    peaks = generator(0, "peaks").uniform(0.5, 2, size=2000).astype(np.float32)
    quotients = peaks / (peaks / np.float32(levels))
    assert (quotients > levels).any()
    codec = make(block=1, rounding="stochastic")
    tensors = row(*peaks, *-peaks)
    decoded = codec.decode(encode(codec, tensors, rng=Bits(noise))[0], layout_of(tensors))["w"]
    assert np.abs(decoded) == pytest.approx(np.abs(tensors["w"]), rel=1.01 / levels)
    assert (np.abs(decoded) <= np.abs(tensors["w"]) * (1 + 1e-6)).all()


def test_stochastic_rounding_uses_the_stream_it_is_given():
    codec, tensors = Int4(rounding="stochastic"), row(*generator(3, "x").normal(size=100))
    first = bytes(encode(codec, tensors, rng=generator(1, "a"))[0].values)
    assert first == bytes(encode(codec, tensors, rng=generator(1, "a"))[0].values)
    assert first != bytes(encode(codec, tensors, rng=generator(1, "b"))[0].values)


@pytest.mark.parametrize(
    "codec", [Int8(block=256), Int4(block=256), Int8(block=3), Int4(block=7), Int4(block=65536)], ids=str
)
def test_tensors_of_many_chunks_equal_the_plain_formula(codec):
    levels = 127 if codec.id == "int8" else 7
    num = 3 * 65536 + 777
    x = generator(0, "chunks").standard_normal(num, dtype=np.float32)
    padded = np.zeros(-(-num // codec.block) * codec.block, np.float32)
    padded[:num] = x
    blocks = padded.reshape(-1, codec.block)
    scale = np.abs(blocks).max(axis=1) / np.float32(levels)
    expected = (np.rint(blocks / scale[:, None]) * scale[:, None]).reshape(-1)[:num]
    tensors = {"first": np.float32([5]), "w": x}
    decoded = codec.decode(encode(codec, tensors)[0], layout_of(tensors))
    assert np.array_equal(decoded["w"], expected)


def test_chunks_cover_a_tensor_once():
    for num, block in [(0, 4), (1, 1), (65536, 1), (200_001, 3), (200_001, 7), (300_000, 65536), (262_145, 65536)]:
        covered = list(spans(num, block))
        assert [first for first, _, _ in covered] == [0, *(last for _, last, _ in covered)][: len(covered)]
        assert (covered[-1][1] if covered else 0) == num
        assert all(first == block * index and first % 2 == 0 for first, _, index in covered)


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), FLOAT32_MAX, -0.5])
@pytest.mark.parametrize(("codec", "size"), [(Int8(), 2), (Int4(), 1)], ids=["int8", "int4"])
def test_scale_that_no_encoder_writes_is_refused(codec, size, scale):
    with pytest.raises(PayloadError, match="scale"):
        codec.decode(Payload(np.float32(scale).tobytes(), bytes(size)), layout_of(row(0, 0)))


def test_int8_step_of_minus_128_is_refused():
    with pytest.raises(PayloadError, match="−128"):
        Int8().decode(Payload(np.float32(1).tobytes(), b"\x00\x80"), layout_of(row(0, 0)))


@pytest.mark.parametrize("byte", [0x08, 0x80, 0x88, 0x18])
def test_int4_nibble_of_minus_8_is_refused(byte):
    with pytest.raises(PayloadError, match="−8"):
        Int4().decode(Payload(np.float32(1).tobytes(), bytes([0x11, byte])), layout_of(row(0, 0, 0, 0)))


def test_int4_spare_nibble_must_be_zero():
    with pytest.raises(PayloadError, match="spare nibble"):
        Int4().decode(Payload(np.float32(1).tobytes(), b"\x11\x11"), layout_of(row(0, 0, 0)))
