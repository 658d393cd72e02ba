"""The frame: hostile bytes end in PayloadError at once and without allocation."""

from __future__ import annotations

import json
import struct
import tracemalloc
import zlib

import pytest

from fedstrata.core.wire import (
    CLIENT_STATE,
    MAX_HEADER_BYTES,
    PRELUDE_BYTES,
    REPLY,
    TASK,
    Payload,
    SectionBytes,
    canonical_json,
    frame_sections,
    pack_frame,
    unpack_frame,
)
from fedstrata.errors import PayloadError

HEADER = {"client": "bank-1", "loss": 0.25}
FRAME = pack_frame(REPLY, "int8", HEADER, Payload(b"\x01\x02\x03\x04", b"\x05\x06"))


def raw_frame(
    head: bytes = b"{}",
    side: bytes = b"",
    values: bytes = b"",
    *,
    magic: bytes = b"FSTR",
    version: int = 1,
    kind: int = REPLY,
    sections: int = 3,
    codec_id: bytes = b"float32",
    lengths: tuple[int, int, int] | None = None,
) -> bytes:
    """A frame with right checksums, written without the code under test."""
    n_head, n_side, n_values = lengths or (len(head), len(side), len(values))
    prelude = struct.pack(
        "<4sBBH16sQIQIQI",
        magic,
        version,
        kind,
        sections,
        codec_id,
        n_head,
        zlib.crc32(head),
        n_side,
        zlib.crc32(side),
        n_values,
        zlib.crc32(values),
    )
    return prelude + struct.pack("<I", zlib.crc32(prelude)) + head + side + values


def refused(data: bytes | memoryview, kind: int = REPLY) -> str:
    """The message of the refusal; checks that refusing allocates less than 1 MiB."""
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError) as caught:
            unpack_frame(data, kind)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    return str(caught.value)


def test_frame_gives_back_what_was_packed():
    frame = unpack_frame(FRAME, REPLY)
    assert (frame.kind, frame.codec_id, frame.header) == (REPLY, "int8", HEADER)
    assert bytes(frame.payload.side) == b"\x01\x02\x03\x04"
    assert bytes(frame.payload.values) == b"\x05\x06"


def test_frame_is_the_documented_one():
    head = b'{"client":"bank-1","loss":0.25}'
    assert raw_frame(head, b"\x01\x02\x03\x04", b"\x05\x06", codec_id=b"int8") == FRAME


@pytest.mark.parametrize("kind", [TASK, REPLY, CLIENT_STATE])
def test_empty_frame_has_only_prelude_and_braces(kind):
    data = pack_frame(kind, "", {}, Payload())
    assert len(data) == PRELUDE_BYTES + 2 == 66
    assert unpack_frame(data, kind).payload.num_bytes == 0


def test_sections_are_views_of_the_frame_without_a_copy():
    values = bytes(5_000_000)
    data = pack_frame(TASK, "float32", {}, Payload(b"", values))
    tracemalloc.start()
    frame = unpack_frame(data, TASK)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(frame.payload.values) == 5_000_000
    assert peak < 1 << 20


def test_section_sizes_add_up_to_the_frame():
    sizes = frame_sections(FRAME)
    assert sizes == unpack_frame(FRAME, REPLY).sections == SectionBytes(len(FRAME) - 6, 4, 2)
    assert sizes.total == len(FRAME)
    assert (sizes + SectionBytes(1, 2, 3)).to_json() == {
        "total": len(FRAME) + 6,
        "header": len(FRAME) - 5,
        "side": 6,
        "values": 5,
    }


def test_frame_truncated_at_every_length_is_refused():
    for length in range(len(FRAME)):
        refused(FRAME[:length])


@pytest.mark.parametrize("extra", [b"\0", b"x" * 100, FRAME])
def test_extended_frame_is_refused(extra):
    assert "not as long as it says" in refused(FRAME + extra)


def test_every_single_flipped_bit_is_refused():
    for bit in range(8 * len(FRAME)):
        damaged = bytearray(FRAME)
        damaged[bit // 8] ^= 1 << (bit % 8)
        refused(bytes(damaged))


def test_other_magic_is_named():
    assert "not a Fedstrata frame" in refused(raw_frame(magic=b"GGUF"))


@pytest.mark.parametrize("version", [0, 2, 255])
def test_other_version_is_named(version):
    assert f"got: {version}" in refused(raw_frame(version=version))


@pytest.mark.parametrize("kind", [0, TASK, CLIENT_STATE, 4, 255])
def test_other_kind_is_named(kind):
    assert "another kind" in refused(raw_frame(kind=kind))


@pytest.mark.parametrize("sections", [0, 2, 4, 65535])
def test_other_number_of_sections_is_refused(sections):
    refused(raw_frame(sections=sections))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("size", [2**60, 2**64 - 1, 2**63, 1 << 32, 3])
def test_declared_size_that_is_not_there_is_refused_at_once(which, size):
    lengths = [2, 0, 0]
    lengths[which] = size
    refused(raw_frame(lengths=tuple(lengths)))


def test_declared_sizes_that_wrap_around_64_bits_are_refused():
    refused(raw_frame(lengths=(2, 2**63, 2**63)))


def test_sections_whose_border_was_moved_are_refused():
    refused(raw_frame(side=b"\x01\x02", values=b"\x03\x04", lengths=(2, 1, 3)))


def test_header_above_four_mib_is_refused_before_it_is_read():
    head = b'{"a":"' + b"x" * (5 << 20) + b'"}'
    assert "not as long as it says" in refused(raw_frame(head))


def test_header_above_four_mib_is_not_written():
    with pytest.raises(PayloadError, match="cannot be written"):
        pack_frame(TASK, "float32", {"a": "x" * MAX_HEADER_BYTES}, Payload())


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{",
        b"hello",
        b"{'a':1}",
        b'{"a":1}x',
        b"\xff\xfe",
        b'{"a":"\xc3"}',
        '{"a":1}'.encode("utf-16"),
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":[-Infinity]}',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b'{"a":' + b"1" * 5000 + b"}",
        b"[" * 100_000,
        b"[" * 50_000 + b"]" * 50_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
    ids=lambda head: f"{head[:12]!r}-{len(head)}",
)
def test_header_that_is_not_plain_json_is_refused(head):
    refused(raw_frame(head))


@pytest.mark.parametrize("head", [b"null", b"1", b"[]", b'"text"', b"true"])
def test_header_that_is_not_an_object_is_refused(head):
    assert "not a JSON object" in refused(raw_frame(head))


@pytest.mark.parametrize("codec_id", [b"int\xff", b"int8\0x", b"\0x"])
def test_codec_id_that_is_not_padded_ascii_is_refused(codec_id):
    assert "codec id" in refused(raw_frame(codec_id=codec_id))


@pytest.mark.parametrize("codec_id", ["seventeen-letters", "größe"])
def test_codec_id_that_does_not_fit_is_not_written(codec_id):
    with pytest.raises(PayloadError, match="cannot be written"):
        pack_frame(TASK, codec_id, {}, Payload())


def test_canonical_json_sorts_keys_and_keeps_unicode():
    assert canonical_json({"b": [1, 2.5], "a": "ö"}) == '{"a":"ö","b":[1,2.5]}'.encode()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_canonical_json_refuses_numbers_that_are_not_finite(value):
    with pytest.raises(ValueError, match="JSON"):
        canonical_json({"loss": value})


def test_frame_is_the_same_for_bytes_and_views():
    side, values = b"\x01\x02\x03\x04", b"\x05\x06"
    assert pack_frame(REPLY, "int8", HEADER, Payload(memoryview(side), memoryview(values))) == FRAME
    assert unpack_frame(memoryview(FRAME), REPLY).header == HEADER == json.loads(FRAME[64:-6])
