"""Laws of every registered codec and of wrapper combinations; a new codec joins by one entry in CODEC_LIST."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.codec import (
    CODECS,
    BFloat16,
    Codec,
    ErrorFeedback,
    Float16,
    Float32,
    Int4,
    Int8,
    Nf4,
    RandomK,
    TopK,
    Zstd,
    wire_id,
)
from fedstrata.codec.nf4 import LEVELS
from fedstrata.codec.random_k import drawn_indices
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec
from fedstrata.core.wire import REPLY, Payload, pack_frame, unpack_frame
from fedstrata.errors import PayloadError
from fedstrata.registry import to_config

CODEC_LIST: list[Codec] = [
    Float32(),
    BFloat16(),
    Float16(),
    Int8(),
    Int8(block=3, rounding="stochastic"),
    Int4(),
    Int4(block=5),
    Int4(block=64, rounding="stochastic"),
    TopK(),
    TopK(fraction=0.4),
    TopK(fraction=1.0),
    Nf4(),
    Nf4(block=5),
    RandomK(),
    RandomK(fraction=0.4, scale=True),
    RandomK(fraction=0.8),
    Zstd(RandomK(0.3)),
    ErrorFeedback(RandomK(0.3)),
    Zstd(Float32()),
    Zstd(Int4(rounding="stochastic"), level=1),
    Zstd(TopK(0.3)),
    ErrorFeedback(Int4(rounding="stochastic")),
    ErrorFeedback(TopK(0.2)),
    ErrorFeedback(Zstd(Int8(block=4))),
    Zstd(ErrorFeedback(BFloat16())),
]
LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2.0**-7) * 2.0**127, "random_k": 2.0**125}

every_codec = pytest.mark.parametrize("codec", CODEC_LIST, ids=str)
battery = settings(max_examples=10, deadline=None)


def core(codec: Codec) -> Codec:
    """The codec inside all wrappers."""
    while isinstance(codec, Zstd | ErrorFeedback):
        codec = codec.inner
    return codec


def remembers(codec: Codec) -> bool:
    """Whether error feedback is anywhere in it."""
    return isinstance(codec, ErrorFeedback) or (isinstance(codec, Zstd) and remembers(codec.inner))


@dataclass(frozen=True)
class Sample:
    """A layout and bits for its values; `of` makes tensors that a codec can represent."""

    layout: Layout
    bits: bytes

    def of(self, codec: Codec, *, exponents: range = range(255)) -> NamedTensors:
        """Any finite float32 (zeros of both signs, subnormals, ±max) whose exponent field lies in `exponents`."""
        bits = np.frombuffer(self.bits, "<u4").copy()
        exponent = (bits >> 23) & 0xFF
        exponent = np.where(bits % 8 == 0, exponent, exponents.start + exponent % len(exponents)).astype(np.uint32)
        exponent = np.minimum(exponent, np.uint32(exponents.stop - 1))
        flat = ((bits & 0x807FFFFF) | (exponent << 23)).astype(np.uint32).view(np.float32)
        if exponents.start > 0:
            flat = np.where(bits % 8 == 0, np.float32(0), flat)
        limit = LARGEST.get(core(codec).id)
        if limit is not None:
            flat = np.clip(flat, np.float32(-limit), np.float32(limit))
        tensors, start = {}, 0
        for spec in self.layout:
            tensors[spec.name] = flat[start : start + spec.num_values].reshape(spec.shape)
            start += spec.num_values
        return tensors


NORMAL = range(110, 140)  # magnitudes 2^-17 … 2^13
EDGES = [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000]


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=4))
    layout = Layout(tuple(TensorSpec(f"t{i}.weight", shape, i) for i, shape in enumerate(shapes)))
    word = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from(EDGES))
    if layout.num_values > 40:
        bits = generator(draw(st.integers(0, 2**32)), "bits").bytes(4 * layout.num_values)
    else:
        words = draw(st.lists(word, min_size=layout.num_values, max_size=layout.num_values))
        bits = np.array(words, "<u4").tobytes()
    return Sample(layout, bits)


def encode(codec: Codec, tensors: NamedTensors, layout: Layout, seed: int = 0) -> Payload:
    return codec.encode(tensors, layout, {}, generator(seed, "law"))[0]


def check_valid(decoded: NamedTensors, layout: Layout) -> None:
    layout.check(decoded)
    assert all(tensor.dtype == np.float32 and tensor.flags.c_contiguous for tensor in decoded.values())


def same_bits(a: NamedTensors, b: NamedTensors) -> bool:
    return all(np.array_equal(a[n].view(np.uint32), b[n].view(np.uint32)) for n in a) and list(a) == list(b)


def test_list_covers_every_registered_codec():
    assert {codec.id for codec in CODEC_LIST} == set(CODECS)


@every_codec
def test_config_survives_json_and_builds_an_equal_codec(codec):
    assert CODECS.build(json.loads(json.dumps(to_config(codec)))) == codec


@every_codec
@battery
@given(sample=samples())
def test_decoded_tensors_have_the_layouts_shapes_and_are_finite(codec, sample):
    check_valid(codec.decode(encode(codec, sample.of(codec), sample.layout), sample.layout), sample.layout)


@every_codec
@battery
@given(sample=samples())
def test_payload_is_never_longer_than_its_bound_and_exact_where_fixed(codec, sample):
    payload = encode(codec, sample.of(codec), sample.layout)
    lengths, bounds = (len(payload.side), len(payload.values)), codec.max_bytes(sample.layout)
    assert all(length <= bound for length, bound in zip(lengths, bounds, strict=True))
    if codec.fixed_length:
        assert lengths == bounds


@every_codec
@battery
@given(sample=samples(), seed=st.integers(0, 100))
def test_same_stream_gives_the_same_bytes(codec, sample, seed):
    tensors = sample.of(codec)
    first, second = (encode(codec, tensors, sample.layout, seed) for _ in range(2))
    assert (bytes(first.side), bytes(first.values)) == (bytes(second.side), bytes(second.values))


@every_codec
@battery
@given(sample=samples())
def test_only_stochastic_codecs_draw_from_the_stream(codec, sample):
    rng = generator(0, "law")
    before = rng.bit_generator.state
    codec.encode(sample.of(codec), sample.layout, {}, rng)
    drew = rng.bit_generator.state != before
    assert drew == (not codec.deterministic and sample.layout.num_values > 0)


@every_codec
@battery
@given(sample=samples())
def test_encoding_leaves_its_input_alone(codec, sample):
    tensors = sample.of(codec)
    before = {name: tensor.copy() for name, tensor in tensors.items()}
    encode(codec, tensors, sample.layout)
    assert same_bits(tensors, before)


@every_codec
@battery
@given(sample=samples())
def test_payload_survives_the_frame(codec, sample):
    payload = encode(codec, sample.of(codec), sample.layout)
    frame = unpack_frame(pack_frame(REPLY, wire_id(codec), {"client": "a"}, payload), REPLY)
    assert frame.codec_id == codec.id
    direct, framed = codec.decode(payload, sample.layout), codec.decode(frame.payload, sample.layout)
    assert same_bits(direct, framed)


@pytest.mark.parametrize("codec", [c for c in CODEC_LIST if c.lossless], ids=str)
@battery
@given(sample=samples())
def test_lossless_codecs_give_back_every_bit(codec, sample):
    tensors = sample.of(codec)
    assert same_bits(codec.decode(encode(codec, tensors, sample.layout), sample.layout), tensors)


@pytest.mark.parametrize("codec", [c for c in CODEC_LIST if not c.lossless and core(c) != TopK(1.0)], ids=str)
def test_codecs_that_are_not_lossless_do_change_something(codec):
    layout = Layout((TensorSpec("w", (300,), 0),))
    tensors = {"w": generator(0, "lossy").standard_normal(300, dtype=np.float32)}
    assert not same_bits(codec.decode(encode(codec, tensors, layout), layout), tensors)


def error_bound(codec: Codec, tensor: np.ndarray) -> np.ndarray:
    """Largest |x̂ − x| per value, float64; 2⁻¹⁴ of a step pays for float32 arithmetic."""
    x = np.abs(tensor.astype(np.float64)).reshape(-1)
    if isinstance(codec, Float16):
        return 2.0**-11 * x + 2.0**-25
    if isinstance(codec, BFloat16):
        return 2.0**-8 * x + 2.0**-134
    if isinstance(codec, Int4 | Int8):
        levels = 127 if isinstance(codec, Int8) else 7
        steps = 0.5 if codec.rounding == "nearest" else 1.0
        absmax = np.array([x[i - i % codec.block :][: codec.block].max() for i in range(x.size)])
        scale = absmax / levels + 2.0**-149  # subnormal scales are rounded up
        return scale * (steps + 2.0**-14) + 2.0**-149
    if isinstance(codec, Nf4):
        signed = tensor.astype(np.float64).reshape(-1)
        absmax = np.array([x[i - i % codec.block :][: codec.block].max() for i in range(x.size)])
        nearest = np.abs(absmax[:, None] * LEVELS.astype(np.float64) - signed[:, None]).min(axis=1)
        return nearest + absmax * 2.0**-23 + 2.0**-148
    return np.zeros_like(x)


@every_codec
@battery
@given(sample=samples())
def test_error_stays_within_the_documented_bound(codec, sample):
    tensors = sample.of(codec)
    payload = encode(codec, tensors, sample.layout)
    seed = generator(0, "law").bytes(16)  # the stream of `encode`, from its start
    decoded = codec.decode(payload, sample.layout)
    for name, tensor in tensors.items():
        x, y = tensor.astype(np.float64).reshape(-1), decoded[name].astype(np.float64).reshape(-1)
        inner = core(codec)
        if isinstance(inner, TopK):
            sent = np.argsort(-np.abs(x), kind="stable")[: inner.count(x.size)]
            expected = np.zeros_like(x)
            expected[sent] = x[sent]
            assert np.array_equal(y, expected)
        elif isinstance(inner, RandomK):
            ratio = np.float32(x.size / inner.count(x.size)) if inner.scale and x.size else np.float32(1)
            places = drawn_indices(seed, name, x.size, inner.count(x.size))
            expected = np.zeros_like(x)
            expected[places] = tensor.reshape(-1)[places] * ratio
            assert np.array_equal(y, expected)
        else:
            assert (np.abs(y - x) <= error_bound(inner, tensor)).all()


@pytest.mark.parametrize("codec", [c for c in CODEC_LIST if c.deterministic], ids=str)
@battery
@given(sample=samples())
def test_coding_twice_equals_coding_once_with_nearest_rounding(codec, sample):
    once = codec.decode(encode(codec, sample.of(codec, exponents=NORMAL), sample.layout), sample.layout)
    twice = codec.decode(encode(codec, once, sample.layout), sample.layout)
    # The scale of an integer block may move by one unit in the last place; all others are equal.
    tolerance = 2.0**-22 if isinstance(core(codec), Int4 | Int8) else 0.0
    for name, tensor in once.items():
        assert np.allclose(twice[name], tensor, rtol=tolerance, atol=0)


@every_codec
@battery
@given(sample=samples(), rounds=st.integers(1, 4))
def test_error_feedback_loses_nothing_over_rounds(codec, sample, rounds):
    residual: NamedTensors = {}
    total = {s.name: np.zeros(s.shape) for s in sample.layout}
    decoded = {s.name: np.zeros(s.shape) for s in sample.layout}
    largest = 0.0
    for server_round in range(rounds):
        keep = sample.layout.restrict([s for s in sample.layout.strata if (server_round + int(s)) % 2 == 0 or s == 0])
        tensors = {
            n: t * np.float32(1 + server_round) for n, t in sample.of(codec, exponents=NORMAL).items() if n in keep
        }
        payload, residual = codec.encode(tensors, keep, residual, generator(server_round, "feedback"))
        for name, tensor in codec.decode(payload, keep).items():
            total[name] += tensors[name]
            decoded[name] += tensor
            largest = max(largest, float(np.abs(tensors[name]).max(initial=0)))
    if not remembers(codec):
        assert residual == {}
        return
    for name in residual:
        assert np.allclose(decoded[name] + residual[name], total[name], rtol=0, atol=1e-5 * largest)


def decodes_or_refuses(codec: Codec, payload: Payload, layout: Layout) -> None:
    """The only two allowed ends for bytes that came from anywhere; no warnings either."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            decoded = codec.decode(payload, layout)
        except PayloadError:
            return
        check_valid(decoded, layout)


@every_codec
@battery
@given(sample=samples(), data=st.data())
def test_random_bytes_decode_to_a_valid_layout_or_raise_payload_error(codec, sample, data):
    for exact in (False, True):
        sizes = codec.max_bytes(sample.layout)
        sections = [
            data.draw(st.binary(min_size=size, max_size=size) if exact else st.binary(max_size=64)) for size in sizes
        ]
        decodes_or_refuses(codec, Payload(*sections), sample.layout)


@every_codec
@battery
@given(sample=samples(), data=st.data())
def test_damaged_payload_decodes_to_a_valid_layout_or_raises_payload_error(codec, sample, data):
    payload = encode(codec, sample.of(codec), sample.layout)
    sections = [bytearray(payload.side), bytearray(payload.values)]
    for section in sections:
        for _ in range(min(len(section), 3)):
            section[data.draw(st.integers(0, len(section) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    decodes_or_refuses(codec, Payload(*map(bytes, sections)), sample.layout)


@every_codec
@battery
@given(sample=samples(), data=st.data())
def test_truncated_or_extended_payload_is_refused(codec, sample, data):
    payload = encode(codec, sample.of(codec), sample.layout)
    sections = [bytes(payload.side), bytes(payload.values)]
    which = data.draw(st.integers(0, 1))
    shorter = [sections[which][: data.draw(st.integers(0, len(sections[which]) - 1))]] if sections[which] else []
    for section in [*shorter, sections[which] + data.draw(st.binary(min_size=1, max_size=9))]:
        changed = list(sections)
        changed[which] = section
        with pytest.raises(PayloadError):
            codec.decode(Payload(*changed), sample.layout)


@every_codec
def test_empty_layout_costs_no_bytes(codec):
    empty = Layout(())
    payload, residual = codec.encode({}, empty, {}, generator(0))
    assert payload.num_bytes == 0
    assert codec.max_bytes(empty) == (0, 0)
    assert codec.decode(payload, empty) == {}
    assert residual == {}


@every_codec
def test_differences_of_zero_stay_zero(codec):
    layout = Layout((TensorSpec("w", (3, 5), 0), TensorSpec("b", (2,), "head")))
    decoded = codec.decode(encode(codec, layout.zeros(), layout), layout)
    assert all(not tensor.any() for tensor in decoded.values())
