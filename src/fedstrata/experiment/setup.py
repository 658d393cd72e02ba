"""From spec, method, model and data to what all rounds share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedstrata.core.lora import lora_scaling
from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Layout, Stratum
from fedstrata.data.load import SplitData, split_data
from fedstrata.device.profiles import build_fleet
from fedstrata.experiment.methods import build_downlink
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.method import Method
from fedstrata.plan.checks import check_own_ranks
from fedstrata.server.probe import CLIENT_SOURCE
from fedstrata.server.setup import POOLED_CLIENT, RoundSetup
from fedstrata.train.model import LoadedModel

DEFAULT_STEPS = 5


def read_data(spec: ExperimentSpec, base_dir: Path, client_proxy_fraction: float | None = None) -> SplitData:
    """The examples, split and spread over clients, not yet tokenized."""
    return split_data(
        spec.data,
        spec.task,
        spec.simulation.partition,
        num_clients=sum(spec.simulation.devices.values()),
        seed=spec.run.seed,
        base_dir=base_dir,
        client_proxy_fraction=client_proxy_fraction,
    )


def make_setup(spec: ExperimentSpec, method: Method, loaded: LoadedModel, data: SplitData) -> RoundSetup:
    """What all rounds share."""
    shape = loaded.shape
    sizes = {c: len(s.train) for c, s in data.splits.clients.items()}
    fleet = build_fleet(spec.simulation.devices, sizes)
    layout = server_layout(spec, method, loaded)
    train = spec.train.model_dump(mode="json")
    if spec.train.local_steps is None and spec.train.local_epochs is None:
        train["local_steps"] = DEFAULT_STEPS
    return RoundSetup(
        method=method,
        shape=shape,
        fleet=fleet,
        layout=layout,
        scaling=scaling_of(spec, method, layout),
        scaling_power=scaling_power(spec, method),
        kind=spec.adapter.kind,
        seed=spec.run.seed,
        num_rounds=spec.rounds.count,
        clients_per_round=spec.rounds.clients_per_round,
        min_replies=1 if method.topology == "pooled" else spec.rounds.min_replies,
        train=train,
        max_length=spec.model.max_length,
        downlink=build_downlink(spec),
        partial_downlink=spec.rounds.downlink == "changed",
        head=method.head or spec.adapter.head,
        threads=spec.compute.threads_per_client,
        reuse=spec.compute.reuse,
        reuse_memory_bytes=spec.compute.reuse_memory_bytes,
        exactness_values=spec.record.exactness_values if spec.record.exactness else 0,
        examples_of=_examples_of(method, data),
    )


def _examples_of(method: Method, data: SplitData) -> dict[str, dict[str, int]]:
    """How many examples every client has of each set that it may be asked about."""
    splits = data.splits
    own = {
        "client_validation": {c: len(s.validation) for c, s in splits.clients.items()},
        CLIENT_SOURCE: {c: len(s.proxy) for c, s in splits.clients.items()},
    }
    if method.topology == "pooled":
        own = {name: {POOLED_CLIENT: sum(sizes.values())} for name, sizes in own.items()}
    ids = own[CLIENT_SOURCE]
    shared = {"server_validation": len(splits.server_validation), "test": len(splits.test)}
    return own | {name: dict.fromkeys(ids, size) for name, size in shared.items()}


def server_layout(spec: ExperimentSpec, method: Method, loaded: LoadedModel) -> Layout:
    """The server's tensors: adapters at the ranks that the planner gives them and the head, or every parameter."""
    ranks: dict[Stratum, int]
    if spec.adapter.kind == "full":
        ranks = {EMBEDDINGS: 1, **dict.fromkeys(loaded.shape.blocks, 1)}
    else:
        ranks = method.planner.server_ranks(loaded.shape, spec.adapter.max_rank)
        is_set = "max_rank" in spec.adapter.model_fields_set
        is_set = is_set and spec.adapter.kind != "bottleneck"  # widths are the method's own
        check_own_ranks(method.planner.id, ranks, spec.adapter.max_rank, is_set=is_set)
    return global_layout(loaded.shape, spec.adapter.kind, ranks | {HEAD: 1})


def scaling_of(spec: ExperimentSpec, method: Method, layout: Layout) -> dict[str, float]:
    """One scaling per target: alpha / rank, or alpha / sqrt(rank), at the server's rank; or the method's own number."""
    adapter = spec.adapter
    if not isinstance(method.scaling, str):
        return dict.fromkeys(layout.targets, float(method.scaling))
    ranks = {s.target: s.rank for s in layout if s.kind in ("lora_A", "lora_R")}
    return {t: lora_scaling(adapter.alpha, r, adapter.scaling) for t, r in ranks.items()}


def scaling_power(spec: ExperimentSpec, method: Method) -> float:
    """P in s_k = s·(r/r_k)^p: what a client's own rank does to its scaling."""
    if method.scaling == "by_rank":
        return 1.0 if spec.adapter.scaling == "alpha_over_r" else 0.5
    return 1.0 if method.scaling == "by_sketch" else 0.0


def describe(spec: ExperimentSpec, setup: RoundSetup, loaded: LoadedModel, data: SplitData) -> dict[str, Any]:
    """What `run.json` says about the world."""
    splits = data.splits
    return {
        "model": {
            "source": spec.model.source,
            "architecture": setup.shape.architecture,
            "identity": loaded.identity,
            "num_blocks": setup.shape.num_blocks,
            "num_parameters": setup.shape.num_parameters,
            "num_trained": setup.layout.num_values,
            "drawn_afresh": list(loaded.missing),
        },
        "base_bytes": setup.shape.base_bytes,
        "labels": list(data.label_names),
        "data": {
            "source": spec.data.source,
            "sha256": dict(data.hashes),
            "num_test": len(splits.test),
            "num_server_validation": len(splits.server_validation),
            "num_proxy": len(splits.proxy),
        },
        "clients": [
            {
                "client": c.id,
                "device": c.device.name,
                "num_examples": c.num_examples,
                "num_validation": len(splits.clients[c.id].validation),
            }
            for c in setup.fleet.clients
        ],
    }
