"""What the engine costs per client and round, beside training: plan, pack, unpack, encode, decode, merge, record.

The client adds one number to every tensor, so that everything measured is ours. Run: `make bench`.
Prints a table, and JSON with `--json`. Times are medians over rounds on one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
from threadpoolctl import threadpool_limits

from fedstrata.client import LocalWork, Score
from fedstrata.codec.base import CODECS
from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.engine.local import LocalEngine
from fedstrata.message import Task, TaskLayouts
from fedstrata.method import METHODS
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.clients import MemoryStates
from fedstrata.round import run_round
from fedstrata.server.setup import RoundSetup

LIMITS_MS = {1_000: 1.0, 1_000_000: 12.0, 10_000_000: 120.0}
TRAIN = {"local_steps": 1, "local_epochs": None, "batch_size": 1, "learning_rate": 1.0, "schedule": "constant"}


class AddOne:
    """A trainer that adds one."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    @property
    def server_layout(self) -> Layout:
        return self._layout

    def initial(self, layout: Layout) -> NamedTensors:
        return layout.zeros()

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        return LocalWork({n: t + np.float32(1) for n, t in start.items()}, num_examples=1, num_steps=1, loss=0.0)

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        return Score(1, 0.0, 1)


def setup_of(num_values: int, num_clients: int, codec: str) -> RoundSetup:
    """One block with one weight of `num_values` numbers."""
    layout = Layout((TensorSpec("block.0.weight", (num_values,), 0),))
    device = DeviceProfile("bench", 1 << 34, 1e11, 1e8, 1e8)
    fleet = Fleet(tuple(Client(f"client-{i:02d}", device, 1) for i in range(num_clients)))
    method = METHODS.build("fedavg", {}).with_parts(codec=CODECS.build(codec))
    shape = ModelShape("bench", 1, 1, None, (), (), layout.specs, 4 * num_values)
    return RoundSetup(
        method=method,
        shape=shape,
        fleet=fleet,
        layout=layout,
        scaling={},
        seed=0,
        num_rounds=1,
        clients_per_round=None,
        min_replies=1,
        train=TRAIN,
        max_length=1,
        downlink=CODECS.build("float32"),
        exactness_values=0,
    )


def measure(num_values: int, codec: str, *, num_clients: int = 8, rounds: int = 7) -> float:
    """Milliseconds per client and round."""
    setup = setup_of(num_values, num_clients, codec)
    engine = LocalEngine(AddOne(setup.layout), MemoryStates())
    state = ServerState(tensors=setup.layout.zeros(), versions={"0": 0})
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        state, _record, _clients = run_round(setup, state, engine)
        seconds.append((time.perf_counter() - began) / num_clients)
    return 1000 * statistics.median(seconds[1:])


def copy_ms(num_values: int) -> float:
    """Milliseconds to copy as many numbers: the unit of the ratio column."""
    source = np.ones(num_values, np.float32)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        source.copy()
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    rows = []
    with threadpool_limits(1):
        for num_values, limit in LIMITS_MS.items():
            for codec in ("float32", "int8"):
                ms = measure(num_values, codec)
                shown = limit if codec == "float32" else None
                rows.append(
                    {
                        "values": num_values,
                        "codec": codec,
                        "ms": ms,
                        "limit_ms": shown,
                        "copies": ms / copy_ms(num_values),
                    }
                )
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'values':>12}  {'codec':8} {'ms per client-round':>20}  {'limit':>7}  {'in plain copies':>16}")
    for row in rows:
        limit = f"{row['limit_ms']:.0f}" if row["limit_ms"] else ""
        print(f"{row['values']:>12,}  {row['codec']:8} {row['ms']:>20.2f}  {limit:>7}  {row['copies']:>16.1f}")


if __name__ == "__main__":
    main()
