"""How an update becomes bytes: floats, block-wise integers, the largest entries, and wrappers around them."""

from fedstrata.codec.base import CODECS, Codec, wire_id
from fedstrata.codec.blockwise import Int4, Int8
from fedstrata.codec.floats import BFloat16, Float16, Float32
from fedstrata.codec.topk import TopK
from fedstrata.codec.wrap import ErrorFeedback, Zstd

__all__ = [
    "CODECS",
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Float16",
    "Float32",
    "Int4",
    "Int8",
    "TopK",
    "Zstd",
    "wire_id",
]
