"""From a checked spec to everything that a run needs: model, data, fleet, layout, trainer, first state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from fedstrata.client import Score
from fedstrata.core.lora import orthonormal_rows
from fedstrata.core.merges import BaseLog
from fedstrata.core.tensors import NamedTensors
from fedstrata.core.units import format_bytes
from fedstrata.data.load import SplitData, length_notes
from fedstrata.data.proxy import ProxySet, resolve_proxy
from fedstrata.data.task import EncodedDataset
from fedstrata.errors import ConfigError, PlanError
from fedstrata.experiment.contradictions import has_validation
from fedstrata.experiment.methods import build_method
from fedstrata.experiment.plugins import load_plugins, plugin_record
from fedstrata.experiment.proxies import ServerProbe, heldout_fraction, scoring_source, server_source
from fedstrata.experiment.setup import describe, make_setup, read_data
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.watch import Watch
from fedstrata.method import METHODS, Method
from fedstrata.plan.base import ContestPlanner
from fedstrata.plan.checks import check_state
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.client_state import ClientState
from fedstrata.record.clients import FolderStates
from fedstrata.server.probe import CLIENT_SOURCE
from fedstrata.server.setup import POOLED_CLIENT, RoundSetup
from fedstrata.server.tasks import plan_round
from fedstrata.train.adapter_folder import load_adapter, save_adapter
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import LoadedModel, load_model
from fedstrata.train.share import weights_of
from fedstrata.train.skip import can_skip_blocks
from fedstrata.train.trainer import TorchTrainer

_BYTES_PER_VALUE = 20
"""Server, client, gradient and Adam's two moments at float32."""


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
        dataset: All encoded examples of the clients and the server.
        weights: The base model as loaded, for workers; not copied.
        indices: Whose examples are whose: by client for `train`, `validation` and `proxy`; by name for `splits`.
    """

    spec: ExperimentSpec
    method_name: str
    setup: RoundSetup
    trainer: TorchTrainer
    initial: ServerState
    keep: str
    info: dict[str, Any]
    dataset: EncodedDataset
    weights: Mapping[str, torch.Tensor]
    indices: Mapping[str, Mapping[str, np.ndarray]]

    @property
    def is_personal(self) -> bool:
        """Whether clients end with models of their own."""
        return self.setup.is_personal

    def save_adapter(self, folder: Path, tensors: NamedTensors, base: BaseLog) -> None:
        """Writes an adapter (or a fully tuned model) as a standard folder, with what was merged into the base."""
        square = self.setup.adapter == "square"  # then the log holds what stands around the matrices
        self.trainer.stand_at(base if square else BaseLog())
        merged = {} if square else base.dense()
        save_adapter(folder, self.trainer.adapted, self.setup.layout, tensors, self.setup.scaling, base=merged)

    def score(self, state: ServerState, split: str) -> Score:
        """Evaluates the server's model on a split of the server's."""
        self.trainer.stand_at(state.base)
        return self.trainer.score(state.tensors, split)

    def score_folder(self, folder: Path, split: str) -> Score:
        """Evaluates what `save_adapter` wrote."""
        tensors, info = load_adapter(folder)
        self.trainer.stand_at(BaseLog())
        return self.trainer.score_adapter(tensors, info.layout, info.scaling, split)

    def client_tensors(self, folder: Path, client: str, accepted_round: int) -> NamedTensors:
        """What a client keeps to itself."""
        data = FolderStates(folder).read(client, accepted_round)
        return ClientState.from_bytes(data, self.setup.layout).local


def build(spec: ExperimentSpec, base_dir: Path, watch: Watch) -> Built:
    """Loads and checks everything; nothing is written.

    Raises:
        FedstrataError: If data, model, fleet and plan do not fit together.
    """
    load_plugins(spec, base_dir)
    method = build_method(spec)
    watch.step(f"reading {spec.data.source}")
    data = read_data(spec, base_dir, heldout_fraction(spec, method))
    watch.step(f"loading {spec.model.source}")
    loaded = load_model(spec.model, spec.adapter, label_names=data.label_names, seed=spec.run.seed, base_dir=base_dir)
    dataset = data.task.encode(
        data.examples, data.labels, loaded.tokenizer, spec.model.max_length, loaded.shape.max_positions
    )
    lengths = length_notes(dataset, spec.model.max_length)
    notes = [*method.notes, *loaded.notes, *data.notes, *lengths, *_idle_keys(spec)]
    for note in notes:
        watch.note(note)
    setup = make_setup(spec, method, loaded, data)
    if method.skips_blocks and (problem := can_skip_blocks(loaded.model)):
        raise PlanError(f"The model's blocks cannot be left out: {problem}", do='use method.name = "fedra_freeze"')
    weights = weights_of(loaded)
    adapted = AdaptedModel(loaded, spec.adapter)
    clients = data.splits.clients.items()
    indices = {part: {c: getattr(s, part) for c, s in clients} for part in ("train", "validation", "proxy")}
    if method.topology == "pooled":
        indices = {part: _pooled(i) for part, i in indices.items()}
    indices["splits"] = {"server_validation": data.splits.server_validation, "test": data.splits.test}
    proxies = _server_proxies(spec, method, loaded, data, base_dir)
    trainer = TorchTrainer(
        adapted,
        setup.layout,
        setup.scaling,
        dataset,
        train_indices=indices["train"],
        validation_indices=indices["validation"],
        proxy_indices=indices["proxy"],
        server_proxies={p.source: p.examples for p in proxies},
        splits=indices["splits"],
        seed=spec.run.seed,
        threads=spec.compute.threads_per_client,
        eval_batch_size=spec.eval.batch_size,
        reuse_memory_bytes=spec.compute.reuse_memory_bytes,
    )
    setup = replace(setup, server_probe=ServerProbe(trainer) if proxies else None)
    if isinstance(method.planner, ContestPlanner) and spec.eval.on == "server":
        setup = replace(setup, server_score=lambda state: _validation_score(trainer, state))
    _check_memory(setup)
    initial = ServerState(
        tensors=first_tensors(trainer, setup),
        versions={str(s): 0 for s in setup.layout.strata},
        planner=check_state(method.planner, method.planner.init(setup.shape, setup.workers), "init"),
        selector=check_state(method.selector, method.selector.init(), "init"),
    )
    plan_round(setup, initial)  # a plan that cannot be carried out is refused before anything is written
    personal = setup.is_personal
    if personal and spec.run.keep == "best":
        raise ConfigError(
            'run.keep = "best", but every client ends with a model of its own', where="run.keep", do='keep = "last"'
        )
    keep = spec.run.keep or ("best" if has_validation(spec) and not personal else "last")
    info = describe(spec, setup, loaded, data) | {"notes": notes}
    info["data"]["sha256"]["tokens"] = dataset.sha256
    info["plugins"] = plugin_record(method, spec.method.name, spec)
    if scoring_source(method) is not None:
        info["data"]["scoring"] = [p.to_json() for p in proxies] or _heldout(data)
    if scoring_source(method) != CLIENT_SOURCE and any(len(s.proxy) for s in data.splits.clients.values()):
        info["data"]["held_out"] = {c: len(s.proxy) for c, s in data.splits.clients.items()}
    name = METHODS.find(spec.method.name).name
    return Built(spec, name, setup, trainer, initial, keep, info, dataset, weights, indices)


def _check_memory(setup: RoundSetup) -> None:
    """Refuses adapters that this machine cannot hold, before they fill it.

    Raises:
        PlanError: If the server's tensors and one client's gradients and moments are larger than its memory.
    """
    needed, there = _BYTES_PER_VALUE * setup.layout.num_values, psutil.virtual_memory().total
    if needed > there:
        raise PlanError(
            "What is trained does not fit into this machine's memory",
            expected=f"at most {format_bytes(there)}",
            got=f"{format_bytes(needed)} for {setup.layout.num_values} numbers",
            do="ask for smaller ranks or widths",
        )


def first_tensors(trainer: TorchTrainer, setup: RoundSetup) -> NamedTensors:
    """The server's tensors before the first round."""
    tensors = trainer.initial(setup.layout)
    if setup.method.pairs.start == "orthonormal":
        for spec in setup.layout:
            if spec.kind == "lora_A":
                tensors[spec.name] = orthonormal_rows(tensors[spec.name])
    return tensors


def _idle_keys(spec: ExperimentSpec) -> list[str]:
    """Keys of `[adapter]` that the method's own kind of adapter makes idle."""
    if spec.adapter.kind != "bottleneck":
        return []
    idle = sorted({"alpha", "max_rank", "scaling"} & spec.adapter.model_fields_set)
    return [f"adapter.{key} is set, but bottleneck adapters have none" for key in idle]


def _validation_score(trainer: TorchTrainer, state: ServerState) -> Mapping[str, float]:
    trainer.stand_at(state.base)
    score = trainer.score(state.tensors, "server_validation")
    return {"accuracy": score.num_correct / score.num_examples, "loss": score.loss_sum / score.num_examples}


def _server_proxies(
    spec: ExperimentSpec, method: Method, loaded: LoadedModel, data: SplitData, base_dir: Path
) -> list[ProxySet]:
    """The server's own examples for scoring blocks, where the method asks for some."""
    source = server_source(method)
    if source is None:
        return []
    return [
        resolve_proxy(
            source,
            spec.data,
            data,
            tokenizer=loaded.tokenizer,
            max_length=spec.model.max_length,
            max_positions=loaded.shape.max_positions,
            seed=spec.run.seed,
            base_dir=base_dir,
        )
    ]


def _heldout(data: SplitData) -> list[dict[str, Any]]:
    """What `run.json` says about examples that clients keep from training."""
    sizes = {c: len(s.proxy) for c, s in data.splits.clients.items()}
    return [{"source": CLIENT_SOURCE, "num_examples": sum(sizes.values()), "per_client": sizes}]


def _pooled(per_client: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {POOLED_CLIENT: np.sort(np.concatenate(list(per_client.values())))}
