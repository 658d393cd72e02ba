"""How an update becomes bytes: floats, block-wise integers and levels, a part of the entries, and wrappers."""

from fedstrata.codec.base import CODECS, Codec, wire_id
from fedstrata.codec.blockwise import Int4, Int8
from fedstrata.codec.floats import BFloat16, Float16, Float32
from fedstrata.codec.nf4 import Nf4
from fedstrata.codec.random_k import RandomK
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
    "Nf4",
    "RandomK",
    "TopK",
    "Zstd",
    "wire_id",
]
