"""Many arrays in one block of bytes, for processes of one machine that read it where it lies.

```
8 bytes   "FSTRBLOB"
8 bytes   length of the header, u64, little-endian
header    UTF-8 JSON: {"info": …, "arrays": {name: [dtype, shape, offset]}}
arrays    each at its offset from the beginning
```

An array keeps its address modulo 64: matrix kernels may choose their path by alignment, and then the last bit of a
result could depend on who holds the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from fedstrata.core.wire import canonical_json

_MAGIC = b"FSTRBLOB"
_ALIGN = 64
_PAGE = 4096


def write_blob(file: BinaryIO, arrays: Mapping[str, np.ndarray], info: Mapping[str, Any]) -> None:
    """Writes arrays and a JSON object that describes them."""
    entries: dict[str, list[Any]] = {}
    contiguous = {name: np.ascontiguousarray(a) for name, a in arrays.items()}
    header = b""
    for room in (0, 1):  # the offsets depend on the header's length, and its length on their digits
        offset = -(-(16 + len(header) + 32 * len(arrays) * room) // _PAGE) * _PAGE
        for name, array in contiguous.items():
            offset += (array.ctypes.data - offset) % _ALIGN
            entries[name] = [array.dtype.str, list(array.shape), offset]
            offset += array.nbytes
        header = canonical_json({"info": dict(info), "arrays": entries})
    file.write(_MAGIC + len(header).to_bytes(8, "little") + header)
    position = 16 + len(header)
    for name, array in contiguous.items():
        file.write(bytes(entries[name][2] - position))
        file.write(array.reshape(-1).view(np.uint8).data)
        position = entries[name][2] + array.nbytes


def read_blob(block: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a block of bytes (uint8), as views of it, and the JSON object."""
    if bytes(block[:8]) != _MAGIC:
        raise ValueError("This is no block of arrays")
    header = json.loads(bytes(block[16 : 16 + int.from_bytes(bytes(block[8:16]), "little")]))
    found = {}
    for name, (dtype, shape, offset) in header["arrays"].items():
        size = np.dtype(dtype).itemsize * math.prod(shape)
        found[name] = block[offset : offset + size].view(dtype).reshape(shape)
    return found, header["info"]


def map_blob(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The same for a file: its pages are shared between processes until one of them writes to a page."""
    return read_blob(np.asarray(np.memmap(path, np.uint8, mode="c")))
