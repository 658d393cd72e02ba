"""How fast the server merges, one thread. Run: `python benchmarks/aggregation.py`.

First the means that stream: GB/s of float32 values taken in, beside one pass of numpy that adds the same values to a
float64 sum. Then the merges that form products: seconds for 100 clients of rank 64 on a map of 4096 × 4096, whose
weight the server never forms.
"""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from fedstrata.aggregate import AGGREGATORS
from fedstrata.aggregate.base import ClientUpdate, MergeContext
from fedstrata.core.rng import generator
from fedstrata.core.tensors import Layout, TensorSpec

NUM_VALUES, NUM_UPDATES = 10_000_000, 8
WIDTH, RANK, NUM_CLIENTS = 4096, 64, 100
MEANS: tuple[Any, ...] = ("holders_mean", {"id": "holders_mean", "moments": True}, "cohort_mean")
PRODUCTS: tuple[Any, ...] = ("product_mean", "raflora", "stack", "fedex", "lora_fair")


def plain_sum(values: list[np.ndarray]) -> float:
    """GB/s of adding float32 to a float64 sum in one numpy call per update: what a mean cannot do without."""
    total = np.zeros(NUM_VALUES)
    began = time.perf_counter()
    for one in values:
        np.add(total, one, out=total)
    return 4 * NUM_VALUES * len(values) / (time.perf_counter() - began) / 1e9


def mean_rate(config: Any, values: list[np.ndarray]) -> float:
    """GB/s of `add` over all updates and one `finish`."""
    layout = Layout((TensorSpec("w", (NUM_VALUES,), 0),))
    start = {"w": np.zeros(NUM_VALUES, np.float32)}
    part = AGGREGATORS.build(config)
    began = time.perf_counter()
    acc = part.zero(layout, MergeContext())
    for k, one in enumerate(values):
        acc = part.add(acc, ClientUpdate(f"c{k}", k + 1, layout, start, {"w": one}))
    part.finish(acc, start)
    return 4 * NUM_VALUES * len(values) / (time.perf_counter() - began) / 1e9


def product_seconds(config: Any) -> float:
    """Seconds of `add` and `finish` for the whole cohort on one map."""
    layout = Layout(
        (
            TensorSpec("q.lora_A", (RANK, WIDTH), 0, "lora_A"),
            TensorSpec("q.lora_B", (WIDTH, RANK), 0, "lora_B"),
        )
    )
    rng = generator(0, "bench")
    start = {s.name: rng.standard_normal(s.shape, dtype=np.float32) for s in layout}
    part = AGGREGATORS.build(config)
    seconds = 0.0
    acc = part.zero(layout, MergeContext({"q": 1.0}))
    for k in range(NUM_CLIENTS):
        values = {s.name: 0.1 * rng.standard_normal(s.shape, dtype=np.float32) for s in layout}
        began = time.perf_counter()
        acc = part.add(acc, ClientUpdate(f"c{k:03}", 10 + k, layout, start, values))
        seconds += time.perf_counter() - began
    began = time.perf_counter()
    part.finish(acc, start)
    return seconds + time.perf_counter() - began


def main() -> None:
    """Measures and prints two tables."""
    rng = generator(0, "bench")
    values = [rng.standard_normal(NUM_VALUES, dtype=np.float32) for _ in range(NUM_UPDATES)]
    with threadpool_limits(1):
        base = max(plain_sum(values) for _ in range(3))
        print(f"| mean | GB/s | of a plain sum's {base:.1f} GB/s |\n|---|---:|---:|")
        for config in MEANS:
            rate = max(mean_rate(config, values) for _ in range(3))
            print(f"| `{config}` | {rate:.1f} | {rate / base:.2f} |")
        del values
        print("\n| merge of products | seconds |\n|---|---:|")
        for config in PRODUCTS:
            print(f"| `{config}` | {product_seconds(config):.1f} |", flush=True)
    unit = 1 if sys.platform == "darwin" else 1024
    print(f"\nPeak resident memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
