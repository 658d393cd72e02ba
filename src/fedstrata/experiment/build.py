"""From a checked spec to everything that a run needs: model, data, fleet, layout, trainer, first state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.client import ClientState
from fedstrata.core.lora import lora_scaling
from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Layout, NamedTensors, Stratum
from fedstrata.data.load import SplitData, length_notes, split_data
from fedstrata.device.profiles import build_fleet
from fedstrata.errors import ConfigError
from fedstrata.experiment.contradictions import has_validation
from fedstrata.experiment.methods import build_downlink, build_method
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.watch import Watch
from fedstrata.method import METHODS, Method
from fedstrata.plan.checks import check_own_ranks
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.clients import FolderStates
from fedstrata.server.setup import POOLED_CLIENT, RoundSetup
from fedstrata.server.tasks import plan_round
from fedstrata.train.adapter_folder import load_adapter, save_adapter
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import LoadedModel, load_model
from fedstrata.train.trainer import TorchTrainer

DEFAULT_STEPS = 5


@dataclass(frozen=True, eq=False)
class Built:
    """A run, ready to start.

    Attributes:
        spec: What it was built from.
        method_name: The method's own name, whatever alias was typed.
        setup: What all rounds share.
        trainer: Model and data.
        initial: The state before the first round.
        keep: Which state `adapter/` will hold.
        info: What `run.json` says about clients, model and data.
    """

    spec: ExperimentSpec
    method_name: str
    setup: RoundSetup
    trainer: TorchTrainer
    initial: ServerState
    keep: str
    info: dict[str, Any]

    @property
    def is_personal(self) -> bool:
        """Whether clients end with models of their own."""
        return bool(self.setup.local_strata)

    def save_adapter(self, folder: Path, tensors: NamedTensors) -> None:
        """Writes an adapter (or a fully tuned model) as a standard folder."""
        save_adapter(folder, self.trainer.adapted, self.setup.layout, tensors, self.setup.scaling)

    def load_adapter(self, folder: Path) -> NamedTensors:
        """Reads what `save_adapter` wrote."""
        return load_adapter(folder)[0]

    def client_tensors(self, folder: Path, client: str, accepted_round: int) -> NamedTensors:
        """What a client keeps to itself."""
        data = FolderStates(folder).read(client, accepted_round)
        return ClientState.from_bytes(data, self.setup.layout).local


def build(spec: ExperimentSpec, base_dir: Path, watch: Watch) -> Built:
    """Loads and checks everything; nothing is written.

    Raises:
        FedstrataError: If data, model, fleet and plan do not fit together.
    """
    method = build_method(spec)
    watch.step(f"reading {spec.data.source}")
    data = read_data(spec, base_dir)
    watch.step(f"loading {spec.model.source}")
    loaded = load_model(spec.model, spec.adapter, label_names=data.label_names, seed=spec.run.seed, base_dir=base_dir)
    dataset = data.task.encode(
        data.examples, data.labels, loaded.tokenizer, spec.model.max_length, loaded.shape.max_positions
    )
    notes = [*loaded.notes, *data.notes, *length_notes(dataset, spec.model.max_length)]
    for note in notes:
        watch.note(note)
    setup = make_setup(spec, method, loaded, data)
    adapted = AdaptedModel(loaded, spec.adapter)
    train_indices = {c: s.train for c, s in data.splits.clients.items()}
    validation_indices = {c: s.validation for c, s in data.splits.clients.items()}
    if method.topology == "pooled":
        train_indices, validation_indices = _pooled(train_indices), _pooled(validation_indices)
    trainer = TorchTrainer(
        adapted,
        setup.layout,
        setup.scaling,
        dataset,
        train_indices=train_indices,
        validation_indices=validation_indices,
        splits={"server_validation": data.splits.server_validation, "test": data.splits.test},
        seed=spec.run.seed,
        threads=spec.compute.threads_per_client,
        eval_batch_size=spec.eval.batch_size,
    )
    initial = ServerState(
        tensors=trainer.initial(setup.layout),
        versions={str(s): 0 for s in setup.layout.strata},
        planner=method.planner.init(setup.shape, setup.workers),
        selector=method.selector.init(),
    )
    plan_round(setup, initial)  # a plan that cannot be carried out is refused before anything is written
    personal = bool(setup.local_strata)
    if personal and spec.run.keep == "best":
        raise ConfigError(
            'run.keep = "best", but every client ends with a model of its own', where="run.keep", do='keep = "last"'
        )
    keep = spec.run.keep or ("best" if has_validation(spec) and not personal else "last")
    info = describe(spec, setup, loaded, data) | {"notes": notes}
    info["data"]["sha256"]["tokens"] = dataset.sha256
    return Built(spec, METHODS.find(spec.method.name).name, setup, trainer, initial, keep, info)


def _pooled(per_client: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {POOLED_CLIENT: np.sort(np.concatenate(list(per_client.values())))}


def read_data(spec: ExperimentSpec, base_dir: Path) -> SplitData:
    """The examples, split and spread over clients, not yet tokenised."""
    return split_data(
        spec.data,
        spec.task,
        spec.simulation.partition,
        num_clients=sum(spec.simulation.devices.values()),
        seed=spec.run.seed,
        base_dir=base_dir,
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
        scaling=scaling_of(spec, layout),
        seed=spec.run.seed,
        num_rounds=spec.rounds.count,
        clients_per_round=spec.rounds.clients_per_round,
        min_replies=1 if method.topology == "pooled" else spec.rounds.min_replies,
        train=train,
        max_length=spec.model.max_length,
        downlink=build_downlink(spec),
        partial_downlink=spec.rounds.downlink == "changed",
        head=spec.adapter.head,
        threads=spec.compute.threads_per_client,
        exactness_values=spec.record.exactness_values if spec.record.exactness else 0,
    )


def server_layout(spec: ExperimentSpec, method: Method, loaded: LoadedModel) -> Layout:
    """The server's tensors: adapters at the ranks that the planner gives them and the head, or every parameter."""
    ranks: dict[Stratum, int]
    if spec.adapter.kind == "full":
        ranks = {EMBEDDINGS: 1, **dict.fromkeys(loaded.shape.blocks, 1)}
    else:
        ranks = method.planner.server_ranks(loaded.shape, spec.adapter.max_rank)
        is_set = "max_rank" in spec.adapter.model_fields_set
        check_own_ranks(method.planner.id, ranks, spec.adapter.max_rank, is_set=is_set)
    return global_layout(loaded.shape, spec.adapter.kind, ranks | {HEAD: 1})


def scaling_of(spec: ExperimentSpec, layout: Layout) -> dict[str, float]:
    """One scaling per target: alpha / rank, or alpha / sqrt(rank), at the server's rank."""
    adapter = spec.adapter
    return {s.target: lora_scaling(adapter.alpha, s.rank, adapter.scaling) for s in layout if s.kind == "lora_A"}


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
