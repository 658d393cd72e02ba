"""How fast codecs are: GB/s of float32 in, one thread, 10 million values. Run: `python benchmarks/codecs.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from fedstrata.codec import CODECS
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, TensorSpec

NUM_VALUES = 10_000_000
CONFIGS: tuple[Any, ...] = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    {"id": "int8", "rounding": "stochastic"},
    "int4",
    {"id": "int4", "rounding": "stochastic"},
    "nf4",
    "top_k",
    {"id": "zstd", "inner": "int8"},
    {"id": "error_feedback", "inner": {"id": "int4", "rounding": "stochastic"}},
)


def rate(work: Callable[[], Any]) -> float:
    """GB/s, the best of three."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return 4 * NUM_VALUES / min(seconds) / 1e9


def main() -> None:
    """Measures and prints a table."""
    layout = Layout((TensorSpec("w", (NUM_VALUES,), 0),))
    tensors = {"w": generator(0, "bench").standard_normal(NUM_VALUES, dtype=np.float32)}
    print("| codec | encode | decode |\n|---|---:|---:|")
    with threadpool_limits(1):
        for config in CONFIGS:
            codec = CODECS.build(config)
            payload, _ = codec.encode(tensors, layout, {}, generator(0, "rounding"))
            encode = rate(lambda codec=codec: codec.encode(tensors, layout, {}, generator(0, "rounding")))  # type: ignore[misc]
            decode = rate(lambda codec=codec, payload=payload: codec.decode(payload, layout))  # type: ignore[misc]
            print(f"| `{config}` | {encode:.1f} | {decode:.1f} |")


if __name__ == "__main__":
    main()
