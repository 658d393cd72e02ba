"""Workers that die, that cannot start, and answers that come before their turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedstrata.codec.base import CODECS
from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import Layout, TensorSpec
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.engine.base import MachineBase
from fedstrata.engine.crew import MAX_TRIES, CrewEngine
from fedstrata.engine.local import LocalEngine
from fedstrata.engine.pool import ProcessCrew
from fedstrata.errors import EngineError
from fedstrata.method import METHODS
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.clients import MemoryStates
from fedstrata.record.site import SiteBase
from fedstrata.round import Observer, run_round
from fedstrata.server.setup import RoundSetup

pytestmark = pytest.mark.engine

LAYOUT = Layout((TensorSpec("block.0.weight", (500,), 0),))
TRAIN = {"local_steps": 1, "local_epochs": None, "batch_size": 1, "learning_rate": 1.0, "schedule": "constant"}
BOX = DeviceProfile("box", 1 << 34, 1e11, 1e8, 1e8)


def setup_of(*clients: str, sizes: dict[str, int] | None = None) -> RoundSetup:
    fleet = Fleet(tuple(Client(c, BOX, (sizes or {}).get(c, 1)) for c in sorted(clients)))
    codec = {"id": "error_feedback", "inner": "int8"}
    return RoundSetup(
        method=METHODS.build("fedavg", {}).with_parts(codec=CODECS.build(codec)),
        shape=ModelShape("bench", 1, 1, None, (), (), LAYOUT.specs, 2000),
        fleet=fleet, layout=LAYOUT, scaling={}, seed=0, num_rounds=1, clients_per_round=None, min_replies=1,
        train=TRAIN, max_length=1, downlink=CODECS.build("float32"), exactness_values=0,
    )  # fmt: skip


@contextmanager
def pool(tmp_path: Path, size: int = 2, memory_bytes: int = 1 << 20, **habits: Any) -> Iterator[CrewEngine]:
    from worker_trainers import Step

    (tmp_path / "marks").mkdir(exist_ok=True)
    crew = ProcessCrew(Step(LAYOUT, tmp_path / "marks", **habits), size, tmp_path / "shared")
    base = MachineBase(SiteBase(), LAYOUT, lambda log: log)
    with CrewEngine(crew, MemoryStates(), base, folder=tmp_path / "replies", memory_bytes=memory_bytes) as engine:
        yield engine


def run(setup: RoundSetup, engine: Any, rounds: int = 1) -> tuple[ServerState, list[dict[str, Any]]]:
    state, clients = ServerState(tensors=LAYOUT.zeros(), versions={"0": 0}), []
    for _ in range(rounds):
        state, _, clients = run_round(setup, state, engine)
    return state, clients


def expected(setup: RoundSetup, tmp_path: Path, rounds: int = 1) -> ServerState:
    from worker_trainers import Step

    (tmp_path / "elsewhere").mkdir()
    return run(setup, LocalEngine(Step(LAYOUT, tmp_path / "elsewhere"), MemoryStates()), rounds)[0]


def same(one: ServerState, two: ServerState) -> bool:
    """Every field, and the tensors bit for bit; nothing moves the base here."""
    plain = [f.name for f in fields(ServerState) if f.name not in ("tensors", "base")]
    return (
        all(getattr(one, name) == getattr(two, name) for name in plain)
        and one.base.number == two.base.number == 0
        and all(np.array_equal(one.tensors[n], two.tensors[n]) for n in LAYOUT.names)
    )


def test_a_killed_worker_is_replaced_and_its_client_tried_again(tmp_path: Path) -> None:
    setup = setup_of("a", "b", "c", "d", "e")
    with pool(tmp_path, kills={"b": 1, "d": MAX_TRIES - 1}) as engine:
        state, clients = run(setup, engine, rounds=2)
    assert all(c["status"] == "ok" for c in clients)
    assert same(expected(setup, tmp_path, rounds=2), state)
    assert len(list((tmp_path / "marks").glob("b.*"))) == 3


def test_a_client_that_ends_every_worker_is_a_named_failure(tmp_path: Path) -> None:
    with pool(tmp_path, kills={"b": 99}) as engine:
        _, clients = run(setup_of("a", "b", "c", "raises"), engine)
    told = {c["client"]: c["failure"] for c in clients if c["failure"]}
    assert told.keys() == {"b", "raises"}
    assert told["b"]["reason"] == "died"
    assert f"each of the {MAX_TRIES} times" in told["b"]["detail"]
    assert "SIGKILL" in told["b"]["detail"]
    assert told["raises"]["detail"] == "ValueError: the disk of this client is full"
    assert len(list((tmp_path / "marks").glob("b.*"))) == MAX_TRIES


def test_workers_that_cannot_start_say_why(tmp_path: Path) -> None:
    from worker_trainers import Broken

    crew = ProcessCrew(Broken(), 1, tmp_path / "shared")
    base = MachineBase(SiteBase(), LAYOUT, lambda log: log)
    with pytest.raises(EngineError, match="no room for the model"), CrewEngine(crew, MemoryStates(), base) as engine:
        engine.start()
    assert not (tmp_path / "shared").exists()


def test_answers_before_their_turn_wait_on_the_disk_and_come_in_order(tmp_path: Path) -> None:
    clients = [f"c{i}" for i in range(8)]
    setup = setup_of(*clients)
    back: list[str] = []
    with pool(tmp_path, memory_bytes=600, waits_for={"c0": 7}) as engine:
        state = ServerState(tensors=LAYOUT.zeros(), versions={"0": 0})
        spilled = []
        observer = Observer(
            client_back=lambda c: (back.append(c), spilled.append(len(list((tmp_path / "replies").glob("*")))))
        )
        state, _, records = run_round(setup, state, engine, observer)
    assert back.index("c0") >= 5  # one more waits behind it in its worker
    assert [r["client"] for r in records] == clients
    assert max(spilled) >= 4
    assert not (tmp_path / "replies").exists()
    assert same(expected(setup, tmp_path), state)


def test_the_largest_client_begins_first(tmp_path: Path) -> None:
    sizes = {"a": 3, "b": 9, "c": 5}
    setup = setup_of(*sizes, sizes=sizes)
    setup = replace(setup, train=TRAIN | {"local_epochs": 1})
    began: list[str] = []
    with pool(tmp_path, size=1, sizes=sizes) as engine:
        state = ServerState(tensors=LAYOUT.zeros(), versions={"0": 0})
        _, _, records = run_round(setup, state, engine, Observer(client_began=began.append))
    assert began == ["b", "c", "a"]
    assert [r["client"] for r in records] == ["a", "b", "c"]


def test_a_round_that_is_given_up_leaves_no_worker_at_work(tmp_path: Path) -> None:
    def stop(record: Any) -> None:
        raise KeyboardInterrupt

    setup = setup_of("a", "b", "c")
    with pool(tmp_path, sleeps_s={"b": 60.0, "c": 60.0}, waits_for={"a": 2}) as engine:
        state = ServerState(tensors=LAYOUT.zeros(), versions={"0": 0})
        with pytest.raises(KeyboardInterrupt):
            run_round(setup, state, engine, Observer(client_done=stop))
        pids = [int(p.read_text()) for p in (tmp_path / "marks").glob("[bc].*")]
    assert pids
    assert not any(map(psutil.pid_exists, pids))


SCRIPT = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {support!r})
from worker_trainers import Step
from fedstrata.core.tensors import Layout, TensorSpec
from fedstrata.engine.pool import ProcessCrew
crew = ProcessCrew(Step(Layout(()), Path(".")), 2, Path({folder!r}))
[crew.hire() for _ in range(2)]
[crew.happened(wait=True) for _ in range(2)]
print(*crew.pids.values(), flush=True)
time.sleep(60)
"""


def test_a_killed_server_leaves_no_orphans_and_its_script_needs_no_guard(tmp_path: Path) -> None:
    support = str(Path(__file__).parents[1] / "support")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(support=support, folder=str(tmp_path / "shared")))
    server = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = [int(pid) for pid in server.stdout.readline().split()]
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # as Ctrl-C does to the whole group
    time.sleep(0.2)
    assert all(map(psutil.pid_exists, pids))
    server.kill()
    server.wait(timeout=30)
    until = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(psutil.pid_exists, pids))
