"""The format to the byte: literal bytes that every later version must still read (`docs/format.md`)."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.codec import (
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
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec
from fedstrata.core.wire import REPLY, Payload, pack_frame, unpack_frame

LAYOUT = Layout(
    (
        TensorSpec("q.lora_A", (2, 3), 0, "lora_A"),
        TensorSpec("q.lora_B", (2, 2), 0, "lora_B"),
        TensorSpec("bias", (3,), "head"),
    )
)
TENSORS: NamedTensors = {
    "q.lora_A": np.array([[1, -3.5, 0.5], [-0.0, 3, -7]], np.float32),
    "q.lora_B": np.zeros((2, 2), np.float32),
    "bias": np.array([127, -63.5, 0.25], np.float32),
}
EXACT = [[1, -3.5, 0.5, -0.0, 3, -7], [0, 0, 0, 0], [127, -63.5, 0.25]]


NF4 = {2: -0.5250730514526367, 9: 0.16093020141124725, 10: 0.24611230194568634, 12: 0.44070982933044434}
"""Four of the levels, by code."""


def steps(scales: list[float], *rows: list[float]) -> list[list[float]]:
    """q·scale in float32, with block = 4: lora_A has the scales 0 and 1, lora_B 2, bias 3."""
    first, second, third, fourth = (np.float32(s) for s in scales)
    a, b, c = (np.array(row, np.float32) for row in rows)
    return [[*(a[:4] * first), *(a[4:] * second)], [*(b * third)], [*(c * fourth)]]


INT8_SCALES = [np.float32(3.5) / np.float32(127), np.float32(7) / np.float32(127), 0, 1]
INT4_SCALES = [0.5, 1, 0, np.float32(127) / np.float32(7)]
NEAREST8 = steps(INT8_SCALES, [36, -127, 18, 0, 54, -127], [0, 0, 0, 0], [127, -64, 0])
NEAREST4 = steps(INT4_SCALES, [2, -7, 1, 0, 3, -7], [0, 0, 0, 0], [7, -4, 0])

# codec, side, values, decoded
GOLDEN: list[tuple[Codec, str, str, list[list[float]]]] = [
    (
        Float32(),
        "",
        "0000803f 000060c0 0000003f 00000080 00004040 0000e0c0"
        "00000000 00000000 00000000 00000000"
        "0000fe42 00007ec2 0000803e",
        EXACT,
    ),
    (BFloat16(), "", "803f 60c0 003f 0080 4040 e0c0  0000 0000 0000 0000  fe42 7ec2 803e", EXACT),
    (Float16(), "", "003c 00c3 0038 0080 0042 00c7  0000 0000 0000 0000  f057 f0d3 0034", EXACT),
    (
        Int8(block=4),
        "87c3e13c 87c3613d  00000000  0000803f",
        "24 81 12 00 36 81  00 00 00 00  7f c0 00",
        NEAREST8,
    ),
    (
        Int8(block=4, rounding="stochastic"),
        "87c3e13c 87c3613d  00000000  0000803f",
        "24 81 12 00 36 81  00 00 00 00  7f c1 01",
        steps(INT8_SCALES, [36, -127, 18, 0, 54, -127], [0, 0, 0, 0], [127, -63, 1]),
    ),
    (Int4(block=4), "0000003f 0000803f  00000000  92249141", "92 01 93  00 00  c7 00", NEAREST4),
    (
        Int4(block=4, rounding="stochastic"),
        "0000003f 0000803f  00000000  92249141",
        "92 01 93  00 00  d7 00",
        steps(INT4_SCALES, [2, -7, 1, 0, 3, -7], [0, 0, 0, 0], [7, -3, 0]),
    ),
    (
        TopK(0.4),
        "01000000 05000000  00000000 01000000  00000000",
        "000060c0 0000e0c0  00000000 00000000  0000fe42",
        [[0, -3.5, 0, 0, 0, -7], [0, 0, 0, 0], [127, 0, 0]],
    ),
    # x/scale: 0.2857, -1, 0.1429, -0 | 0.4286, -1 | zeros | 1, -0.5, 0.00197 with the scales 3.5, 7, 0 and 127
    (
        Nf4(block=4),
        "00006040 0000e040  00000000  0000fe42",
        "0a 79 0c  77 77  2f 07",
        steps(
            [3.5, 7, 0, 127],
            [NF4[10], -1, NF4[9], 0, NF4[12], -1],
            [0, 0, 0, 0],
            [1, NF4[2], 0],
        ),
    ),
    # places 2, 4 | 0, 2 | 2 of this seed; n/k = 3, 2 and 3
    (
        RandomK(0.4),
        "7ba099acfc758e48cf57ec096a2b5265",
        "0000003f 00004040  00000000 00000000  0000803e",
        [[0, 0, 0.5, 0, 3, 0], [0, 0, 0, 0], [0, 0, 0.25]],
    ),
    (
        RandomK(0.4, scale=True),
        "7ba099acfc758e48cf57ec096a2b5265",
        "0000c03f 00001041  00000000 00000000  0000403f",
        [[0, 0, 1.5, 0, 9, 0], [0, 0, 0, 0], [0, 0, 0.75]],
    ),
    (
        RandomK(0.6),
        "7ba099acfc758e48cf57ec096a2b5265",
        "0000803f 000060c0 00000080 0000e0c0  00000000 00000000  0000fe42 00007ec2",
        [[1, -3.5, 0, -0.0, 0, -7], [0, 0, 0, 0], [127, -63.5, 0]],
    ),
    (ErrorFeedback(Int4(block=4)), "0000003f 0000803f  00000000  92249141", "92 01 93  00 00  c7 00", NEAREST4),
]

# Compressed bytes may differ between releases of Zstandard: what was written once must be read, no more.
GOLDEN_COMPRESSED: list[tuple[Codec, str, str, list[list[float]]]] = [
    (
        Zstd(Float32()),
        "",
        "28b52ffd 2034 550100 14020000803f000060c00000003f00000080000040400000e0fe4200007ec20000803e0200a0c1b16613",
        EXACT,
    ),
    (
        Zstd(Int8(block=4)),
        "28b52ffd 2010 810000 87c3e13c87c3613d000000000000803f",
        "28b52ffd 200d 690000 248112003681000000007fc000",
        NEAREST8,
    ),
]

# A reply of client "a": int8, one tensor of the values −127 and 64. `docs/format.md` walks through it.
FRAME = (
    "46535452 01 02 0300 696e7438000000000000000000000000"
    "0e00000000000000 2f91512f 0400000000000000 6a6aa1ac 0200000000000000 65fa9d15"
    "d6a40e16"
    "7b22636c69656e74223a2261227d"
    "0000803f"
    "8140"
)


@pytest.mark.parametrize(
    ("codec", "side", "values", "decoded"), GOLDEN, ids=lambda x: str(x) if isinstance(x, Codec) else ""
)
def test_encoded_bytes_are_the_stored_ones(codec, side, values, decoded):
    payload, _ = codec.encode(TENSORS, LAYOUT, {}, generator(0, "golden"))
    assert bytes(payload.side).hex() == side.replace(" ", "")
    assert bytes(payload.values).hex() == values.replace(" ", "")


@pytest.mark.parametrize(
    ("codec", "side", "values", "decoded"),
    GOLDEN + GOLDEN_COMPRESSED,
    ids=lambda x: str(x) if isinstance(x, Codec) else "",
)
def test_stored_bytes_decode_to_the_stored_values(codec, side, values, decoded):
    tensors = codec.decode(Payload(bytes.fromhex(side), bytes.fromhex(values)), LAYOUT)
    assert [tensor.reshape(-1).tolist() for tensor in tensors.values()] == [[float(v) for v in row] for row in decoded]
    LAYOUT.check(tensors)


def test_negative_zero_survives_in_stored_floats():
    for codec, _, values, _ in GOLDEN[:3]:
        tensors = codec.decode(Payload(b"", bytes.fromhex(values)), LAYOUT)
        assert np.signbit(tensors["q.lora_A"]).tolist() == [[False, True, False], [True, False, True]]


def test_whole_frame_is_the_stored_one():
    layout = Layout((TensorSpec("w", (2,), 0),))
    payload, _ = Int8().encode({"w": np.array([-127, 64], np.float32)}, layout, {}, generator(0))
    assert pack_frame(REPLY, wire_id(Int8()), {"client": "a"}, payload).hex() == FRAME.replace(" ", "")


def test_stored_frame_is_read():
    frame = unpack_frame(bytes.fromhex(FRAME), REPLY)
    assert (frame.codec_id, frame.header) == ("int8", {"client": "a"})
    assert (frame.sections.header, frame.sections.side, frame.sections.values) == (78, 4, 2)
    decoded = Int8().decode(frame.payload, Layout((TensorSpec("w", (2,), 0),)))
    assert decoded["w"].tolist() == [-127, 64]
