"""Top-k, zstd and error feedback, and what holds for the options and lengths of every codec."""

from __future__ import annotations

import dataclasses
import tracemalloc

import numpy as np
import pytest
import zstandard

from fedstrata.codec import CODECS, BFloat16, ErrorFeedback, Float16, Float32, Int4, Int8, TopK, Zstd, wire_id
from fedstrata.codec.topk import largest_indices
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, TensorSpec
from fedstrata.core.wire import Payload
from fedstrata.errors import ConfigError, PayloadError

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


# ---- top-k


def test_top_k_sends_the_largest_magnitudes_with_ascending_indices():
    payload, _ = encode(TopK(0.5), row(1, -5, 0, 3, 2, -4))
    assert np.frombuffer(payload.side, "<u4").tolist() == [1, 3, 5]
    assert floats(payload.values) == [-5, 3, -4]
    assert through(TopK(0.5), 1, -5, 0, 3, 2, -4) == [0, -5, 0, 3, 0, -4]


@pytest.mark.parametrize(
    ("fraction", "num", "count"),
    [(0.01, 10, 1), (0.01, 150, 2), (0.5, 3, 2), (0.25, 10, 3), (1.0, 7, 7), (1.0, 0, 0), (1e-9, 5, 1), (0.1, 1, 1)],
)
def test_top_k_count_is_rounded_and_at_least_one(fraction, num, count):
    assert TopK(fraction).count(num) == count


def test_top_k_takes_the_lower_index_on_a_tie():
    payload, _ = encode(TopK(0.5), row(1, -2, 2, 2, -2, 1))
    assert np.frombuffer(payload.side, "<u4").tolist() == [1, 2, 3]


@pytest.mark.parametrize("kind", ["normal", "ties", "sorted", "one peak in the sample"])
@pytest.mark.parametrize("k", [1, 7, 500, 9_999])
def test_top_k_of_a_large_tensor_equals_a_stable_sort(kind, k):
    x = generator(1, kind).standard_normal(20_000, dtype=np.float32)
    if kind == "ties":
        x = np.round(x)
    elif kind == "sorted":
        x.sort()
    elif kind == "one peak in the sample":
        x[::61] = 1e6  # the sample that guesses a bound sees nothing but these
    expected = np.sort(np.argsort(-np.abs(x), kind="stable")[:k])
    assert np.array_equal(largest_indices(x, k), expected)


@pytest.mark.parametrize("indices", [(1, 1), (2, 1), (0, 4), (4, 0), (0, 2**32 - 1)])
def test_top_k_indices_that_repeat_descend_or_leave_the_tensor_are_refused(indices):
    side = np.array(indices, "<u4").tobytes()
    with pytest.raises(PayloadError, match="indices"):
        TopK(0.5).decode(Payload(side, bytes(8)), layout_of(row(0, 0, 0, 0)))


def test_top_k_refuses_a_tensor_that_u32_cannot_index():
    layout = Layout((TensorSpec("huge", (1 << 16, 1 << 16), 0),))
    with pytest.raises(PayloadError, match="huge"):
        TopK().max_bytes(layout)


# ---- zstd


def test_zstd_compresses_each_section_into_one_frame_with_its_size():
    codec = Zstd(Int8())
    tensors = row(*([1.0] * 5000))
    payload, _ = encode(codec, tensors)
    assert zstandard.frame_content_size(payload.side) == 4 * 20
    assert zstandard.frame_content_size(payload.values) == 5000
    assert payload.num_bytes < 200


def test_zstd_leaves_an_empty_section_empty():
    payload, _ = encode(Zstd(Float32()), row(1, 2))
    assert len(payload.side) == 0


@pytest.mark.parametrize(
    "values",
    [
        zstandard.ZstdCompressor().compress(bytes(9)),  # one value too many
        zstandard.ZstdCompressor().compress(bytes(4)),  # one too few
        zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8)),  # states no size
        zstandard.ZstdCompressor().compress(bytes(8)) + b"\0",  # something follows
        zstandard.ZstdCompressor().compress(bytes(8))[:-1],
        bytes.fromhex("502a4d180100000000"),  # a skippable frame
        b"\x28\xb5\x2f\xfd",
        b"x",
        b"",
        zstandard.ZstdCompressor().compress(b""),
    ],
)
def test_zstd_section_of_another_size_or_shape_is_refused(values):
    with pytest.raises(PayloadError):
        Zstd(Float32()).decode(Payload(b"", values), layout_of(row(0, 0)))


@pytest.mark.parametrize("stated", [8, 2**30, 2**60])
def test_zstd_bomb_is_refused_without_allocating(stated):
    # A frame of 64 MiB of zeros whose header states another size: frame header descriptor 0xE0, u64 size.
    bomb = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64 << 20))
    window = bomb[5:6]
    lying = b"\x28\xb5\x2f\xfd\xc0" + window + stated.to_bytes(8, "little") + bomb[6:]
    assert zstandard.frame_content_size(lying) == stated
    layout = layout_of(row(0, 0))
    tracemalloc.start()
    with pytest.raises(PayloadError):
        Zstd(Float32()).decode(Payload(b"", lying), layout)
    with pytest.raises(PayloadError):
        Zstd(Float32()).decode(Payload(b"", lying[:14] + lying[-3:]), layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_zstd_frame_that_lies_about_its_size_writes_no_more_than_it_states():
    inner = zstandard.ZstdCompressor(write_content_size=False).compress(b"\x00" * 4000)
    lying = b"\x28\xb5\x2f\xfd\xc0" + inner[5:6] + (2000).to_bytes(8, "little") + inner[6:]
    layout = layout_of(row(*([0] * 500)))
    with pytest.raises(PayloadError, match=r"damaged|lies"):
        Zstd(Float32()).decode(Payload(b"", lying), layout)


# ---- error feedback


def test_error_feedback_sends_next_time_what_was_left_unsent():
    codec = ErrorFeedback(TopK(0.5))
    payload, residual = encode(codec, row(4, 1))
    assert codec.decode(payload, layout_of(row(4, 1)))["w"].tolist() == [4, 0]
    assert residual["w"].tolist() == [0, 1]
    payload, residual = encode(codec, row(0.5, 1), residual)
    assert codec.decode(payload, layout_of(row(0, 0)))["w"].tolist() == [0, 2]
    assert residual["w"].tolist() == [0.5, 0]


def lora(rank: int, first: float = 0.0) -> tuple[dict[str, np.ndarray], Layout]:
    """A pair of rank `rank`, both factors filled with `first`."""
    layout = Layout((TensorSpec("q.lora_A", (rank, 3), 0, "lora_A"), TensorSpec("q.lora_B", (2, rank), 0, "lora_B")))
    return {s.name: np.full(s.shape, first, np.float32) for s in layout}, layout


def test_smaller_rank_uses_and_updates_the_leading_corner_of_the_residual():
    codec, rng = ErrorFeedback(TopK(0.01)), generator(0)
    tensors, layout = lora(3, 1.0)
    _, residual = codec.encode(tensors, layout, {}, rng)
    assert residual["q.lora_A"].tolist() == [[0, 1, 1], [1, 1, 1], [1, 1, 1]]
    small, small_layout = lora(1, 2.0)
    payload, after = codec.encode(small, small_layout, residual, rng)
    # Row 0 of A is 2 + (0, 1, 1) = (2, 3, 3); its largest entry (the lower index on a tie) is sent.
    assert codec.decode(payload, small_layout)["q.lora_A"].tolist() == [[0, 3, 0]]
    assert after["q.lora_A"].tolist() == [[2, 0, 3], [1, 1, 1], [1, 1, 1]]
    # Column 0 of B was (0, 1) and becomes 2 + (0, 1) = (2, 3).
    assert codec.decode(payload, small_layout)["q.lora_B"].tolist() == [[0], [3]]
    assert after["q.lora_B"].tolist() == [[2, 1, 1], [0, 1, 1]]


def test_larger_rank_grows_the_residual_from_zero():
    codec, rng = ErrorFeedback(TopK(0.01)), generator(0)
    small, small_layout = lora(1, 2.0)
    _, residual = codec.encode(small, small_layout, {}, rng)
    large, large_layout = lora(2, 1.0)
    payload, after = codec.encode(large, large_layout, residual, rng)
    # A is 1 + ((0, 2, 2), (0, 0, 0)): the first 3 is sent.
    assert codec.decode(payload, large_layout)["q.lora_A"].tolist() == [[0, 3, 0], [0, 0, 0]]
    assert after["q.lora_A"].tolist() == [[1, 0, 3], [1, 1, 1]]


def test_residual_of_tensors_outside_the_layout_is_carried_unchanged():
    other = np.float32([3, 4])
    _, residual = encode(ErrorFeedback(TopK(0.5)), row(4, 1), {"elsewhere": other})
    assert residual["elsewhere"] is other
    assert list(residual) == ["elsewhere", "w"]


def test_encoding_with_error_feedback_changes_neither_tensors_nor_the_old_residual():
    tensors, residual = row(4, 1), row(1, 1)
    encode(ErrorFeedback(Int4()), tensors, residual)
    assert tensors["w"].tolist() == [4, 1]
    assert residual["w"].tolist() == [1, 1]


def test_residual_of_another_number_of_dimensions_is_an_error():
    with pytest.raises(PayloadError, match="another model"):
        encode(ErrorFeedback(Int4()), row(1, 2), {"w": np.zeros((2, 2), np.float32)})


def test_sum_with_the_residual_that_overflows_is_an_error():
    with pytest.raises(PayloadError, match="too large"):
        encode(ErrorFeedback(TopK(0.5)), row(3e38, 1), row(3e38, 0))


# ---- options, ids, lengths


@pytest.mark.parametrize(
    "make",
    [
        lambda: Int8(block=0),
        lambda: Int4(block=65537),
        lambda: Int8(rounding="up"),
        lambda: TopK(0.0),
        lambda: TopK(1.5),
        lambda: TopK(float("nan")),
        lambda: Zstd(Float32(), level=0),
        lambda: Zstd(Float32(), level=23),
        lambda: Zstd("int8"),
        lambda: Zstd(Zstd(Int8())),
        lambda: Zstd(ErrorFeedback(Zstd(Int8()))),
        lambda: ErrorFeedback(ErrorFeedback(Int8())),
        lambda: ErrorFeedback(Zstd(ErrorFeedback(Int8()))),
        lambda: CODECS.build({"id": "int8", "blocks": 64}),
        lambda: CODECS.build({"id": "int4", "rounding": "down"}),
        lambda: CODECS.build({"id": "zstd"}),
        lambda: CODECS.build({"id": "zstd", "inner": {"id": "int8", "block": 0}}),
    ],
)
def test_options_that_make_no_sense_are_config_errors(make):
    with pytest.raises(ConfigError):
        make()


def test_both_wrong_options_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        Int8(block=0, rounding="sometimes")
    assert len(caught.value.problems) == 2


def test_zstd_inside_error_feedback_and_around_it_are_fine():
    assert ErrorFeedback(Zstd(Int4())).max_bytes(layout_of(row(1))) == Zstd(Int4()).max_bytes(layout_of(row(1)))
    assert Zstd(ErrorFeedback(Int4())).deltas_only


def test_wire_id_is_the_id_of_the_outermost_part():
    assert wire_id(ErrorFeedback(Zstd(Int4()))) == "error_feedback"
    assert wire_id(Zstd(Int4())) == "zstd"


def test_every_registered_id_fits_the_frame():
    assert all(part_id.isascii() and len(part_id) <= 16 for part_id in CODECS)


def test_codec_id_that_does_not_fit_the_frame_is_a_config_error():
    @dataclasses.dataclass(frozen=True)
    class Long(Float32):
        id = "a-name-of-17-char"

    with pytest.raises(ConfigError, match="a-name-of-17-char"):
        wire_id(Long())


@pytest.mark.parametrize(
    "tensors",
    [{}, {"w": np.zeros(3, np.float32)}, {"w": np.zeros(2, np.float64)}, {"v": np.zeros(2, np.float32)}],
    ids=["nothing", "other shape", "other type", "other name"],
)
@pytest.mark.parametrize("codec", [Float32(), Float16(), Int8(), Int4(), TopK(), ErrorFeedback(Int8())], ids=str)
def test_tensors_that_are_not_the_layouts_are_not_encoded(codec, tensors):
    with pytest.raises(PayloadError, match="Tensor w"):
        codec.encode(tensors, layout_of(row(0, 0)), {}, generator(0))


@pytest.mark.parametrize(
    "codec", [Float32(), BFloat16(), Float16(), Int8(), Int4(), TopK(0.5), Zstd(Int8()), Zstd(Float32())], ids=str
)
def test_wrong_length_is_refused_before_a_large_layout_is_allocated(codec):
    layout = Layout((TensorSpec("large", (1 << 14, 1 << 14), 0),))
    tracemalloc.start()
    for payload in (Payload(), Payload(b"1234", b"1234"), Payload(b"", bytes(1000)), Payload(bytes(1000), b"")):
        with pytest.raises(PayloadError):
            codec.decode(payload, layout)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("codec", "expected"),
    [
        (Float32(), (0, 4 * 1003)),
        (BFloat16(), (0, 2 * 1003)),
        (Float16(), (0, 2 * 1003)),
        (Int8(), (4 * (4 + 1), 1003)),  # ⌈1000/256⌉ + ⌈3/256⌉ scales
        (Int4(), (4 * (4 + 1), 500 + 2)),
        (Int4(block=10), (4 * (100 + 1), 500 + 2)),
        (TopK(0.01), (4 * (10 + 1), 4 * (10 + 1))),
        (Zstd(Float32()), (0, 4012 + 15 + (131072 - 4012) // 2048)),
    ],
    ids=str,
)
def test_section_sizes_follow_from_the_layout(codec, expected):
    layout = Layout((TensorSpec("a", (100, 10), 0), TensorSpec("b", (3,), "head")))
    assert codec.max_bytes(layout) == expected
