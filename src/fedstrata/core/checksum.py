"""CRC-32 (zlib's polynomial), in its fastest implementation at hand: the values are the same everywhere."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this platform: zlib takes about four times as long
    from zlib import crc32

__all__ = ["crc32"]
