"""The frame in which every task, reply and client state travels (`docs/format.md` has it to the byte).

```
offset size
0      4     magic "FSTR"
4      1     version, 1
5      1     kind: 1 task, 2 reply, 3 client state
6      2     number of sections, 3
8      16    codec id, ASCII, padded with NUL
24     36    three times: length (u64), CRC-32 (u32) of header, side and values
60     4     CRC-32 of bytes 0 … 59
64     …     header (UTF-8 JSON object), side, values, without padding
```

All numbers are little-endian. A frame is as long as it says, to the byte; every length is compared with what
is really there before anything is allocated.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn, TypeAlias

import numpy as np

from fedstrata.core.checksum import crc32
from fedstrata.errors import PayloadError

MAGIC = b"FSTR"
VERSION = 1
TASK, REPLY, CLIENT_STATE = 1, 2, 3
MAX_HEADER_BYTES = 4 << 20
MAX_CODEC_ID_BYTES = 16
_LARGE = 1 << 20
_PRELUDE = struct.Struct("<4sBBH16sQIQIQI")
_CRC = struct.Struct("<I")
PRELUDE_BYTES = _PRELUDE.size + _CRC.size
_KINDS = {TASK: "task", REPLY: "reply", CLIENT_STATE: "client state"}

Bytes: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class Payload:
    """Encoded tensors: `side` holds what is needed to read `values` (scales, indices, sizes)."""

    side: Bytes = b""
    values: Bytes = b""

    @cached_property
    def crc(self) -> tuple[int, int]:
        """CRC-32 of side and values; kept, because one downlink payload serves many clients."""
        return crc32(self.side), crc32(self.values)

    @property
    def num_bytes(self) -> int:
        """Length of both sections."""
        return len(self.side) + len(self.values)


@dataclass(frozen=True)
class SectionBytes:
    """Where the bytes of one frame went; prelude and JSON header count as header."""

    header: int = 0
    side: int = 0
    values: int = 0

    @property
    def total(self) -> int:
        """Length of the whole frame."""
        return self.header + self.side + self.values

    def __add__(self, other: SectionBytes) -> SectionBytes:
        return SectionBytes(self.header + other.header, self.side + other.side, self.values + other.values)

    def to_json(self) -> dict[str, int]:
        """As it stands in the records."""
        return {"total": self.total, "header": self.header, "side": self.side, "values": self.values}


@dataclass(frozen=True)
class Frame:
    """A frame that was read and whose checksums hold."""

    kind: int
    codec_id: str
    header: dict[str, Any]
    payload: Payload
    sections: SectionBytes


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes. NaN and infinity are refused."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def pack_frame(kind: int, codec_id: str, header: Mapping[str, Any], payload: Payload) -> Bytes:
    """Writes one frame.

    Raises:
        PayloadError: If the codec id is longer than 16 characters or not ASCII, or the header above 4 MiB.
    """
    head = canonical_json(header)
    if not codec_id.isascii() or len(codec_id) > MAX_CODEC_ID_BYTES or len(head) > MAX_HEADER_BYTES:
        raise PayloadError(
            "This frame cannot be written",
            expected=f"a codec id of at most {MAX_CODEC_ID_BYTES} ASCII characters and a header of at most 4 MiB",
            got=f'codec id "{codec_id}", {len(head)} bytes of header',
        )
    side_crc, values_crc = payload.crc
    prelude = _PRELUDE.pack(
        MAGIC, VERSION, kind, 3, codec_id.encode("ascii"), len(head), crc32(head),
        len(payload.side), side_crc, len(payload.values), values_crc,
    )  # fmt: skip
    return _joined((prelude, _CRC.pack(crc32(prelude)), head, payload.side, payload.values))


def _joined(parts: Sequence[Bytes]) -> Bytes:
    """One buffer of all parts: bytes, or for a large frame a read-only view of a numpy buffer.

    numpy asks for huge pages; a large bytes object pays a page fault every 4 KiB, four times the copy itself.
    """
    total = sum(map(len, parts))
    if total < _LARGE:
        return b"".join(parts)
    view = np.empty(total, np.uint8).data
    offset = 0
    for part in parts:
        view[offset : offset + len(part)] = part
        offset += len(part)
    return view.toreadonly()


def frame_sections(data: Bytes) -> SectionBytes:
    """The section sizes that a frame states, for the ledger; the frame is one that we packed or checked."""
    fields = _PRELUDE.unpack_from(data)
    return SectionBytes(PRELUDE_BYTES + fields[5], fields[7], fields[9])


def peek_header(data: Bytes) -> dict[str, Any]:
    """The header of a frame that we packed ourselves, without reading the sections behind it."""
    header: dict[str, Any] = json.loads(str(memoryview(data)[PRELUDE_BYTES : frame_sections(data).header], "utf-8"))
    return header


def unpack_frame(data: Bytes, kind: int, *, where: str = "payload") -> Frame:
    """Reads one frame and checks it.

    Args:
        data: The bytes that arrived.
        kind: The kind that is expected here.
        where: Named in the error.

    Raises:
        PayloadError: If anything differs from the format: magic, version, kind, lengths, checksums, header.
    """

    def bad(what: str, expected: str | None = None, got: str | None = None) -> NoReturn:
        raise PayloadError(what, where=where, expected=expected, got=got)

    if len(data) < PRELUDE_BYTES:
        bad("The frame is cut short", f"at least {PRELUDE_BYTES} bytes", f"{len(data)}")
    magic, version, got_kind, num, raw_id, n_head, crc_head, n_side, crc_side, n_values, crc_values = (
        _PRELUDE.unpack_from(data)
    )
    if magic != MAGIC:
        bad("These bytes are not a Fedstrata frame", MAGIC.decode(), repr(bytes(magic)))
    if crc32(data[: _PRELUDE.size]) != _CRC.unpack_from(data, _PRELUDE.size)[0]:
        bad("The frame's prelude is damaged", "a matching CRC-32")
    if version != VERSION:
        bad("The frame has another version", str(VERSION), str(version))
    if got_kind != kind or num != 3:
        bad("The frame is of another kind", _KINDS.get(kind, str(kind)), _KINDS.get(got_kind, str(got_kind)))
    total = PRELUDE_BYTES + n_head + n_side + n_values
    if n_head > MAX_HEADER_BYTES or total != len(data):
        bad("The frame is not as long as it says", f"{total} bytes", f"{len(data)}")
    view = memoryview(data)
    head = view[PRELUDE_BYTES : PRELUDE_BYTES + n_head]
    side = view[PRELUDE_BYTES + n_head : PRELUDE_BYTES + n_head + n_side]
    values = view[PRELUDE_BYTES + n_head + n_side :]
    for name, section, crc in (
        ("header", head, crc_head),
        ("side", side, crc_side),
        ("values", values, crc_values),
    ):
        if crc32(section) != crc:
            bad(f"The frame's {name} section is damaged", "a matching CRC-32")
    raw_id = raw_id.rstrip(b"\0")
    if not raw_id.isascii() or b"\0" in raw_id:
        bad("The frame's codec id is not ASCII, padded with NUL", got=repr(raw_id))
    codec_id = raw_id.decode("ascii")
    header = _read_header(head, bad)
    if not isinstance(header, dict):
        bad("The frame's header is not a JSON object", got=type(header).__name__)
    sections = SectionBytes(PRELUDE_BYTES + n_head, n_side, n_values)
    return Frame(got_kind, codec_id, header, Payload(side, values), sections)


def _read_header(head: Bytes, bad: Callable[..., NoReturn]) -> Any:
    """Parses a header: UTF-8, finite numbers and nothing that could not be written again as JSON."""
    try:
        header = json.loads(
            str(head, "utf-8"), parse_constant=lambda text: bad("The header holds", "a finite number", text)
        )
        canonical_json(header)
    except (ValueError, RecursionError) as error:
        bad("The frame's header is not JSON", "UTF-8 with finite numbers, not nested deeply", type(error).__name__)
    return header
