"""The real trainer: one model, all data of this process, any client's task."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import psutil

from fedstrata.client import FisherSums, LocalWork, Score
from fedstrata.core.frames import Frames, drawn_frames
from fedstrata.core.lora import client_scalings, init_lora
from fedstrata.core.merges import BaseLog, Merge
from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import Layout, NamedTensors, lowest_block, parse_stratum
from fedstrata.errors import ClientError, DataError
from fedstrata.message import Task, TaskLayouts
from fedstrata.objective.base import OBJECTIVES
from fedstrata.record.site import Site, SiteBase
from fedstrata.train.batches import Examples
from fedstrata.train.config import TrainConfig
from fedstrata.train.evaluate import evaluate
from fedstrata.train.fisher import FisherOptions, choose_examples, fisher_sums
from fedstrata.train.frames import gradient_sketch
from fedstrata.train.local import train_locally
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.prefix import PrefixReuse

HELD_OUT = "client_heldout"
"""The source of a Fisher probe whose examples are the clients' own; all others are files of the server's."""

REUSE_MEMORY_BYTES = 1 << 29
"""The default of `compute.reuse_memory_bytes`."""

_EMPTY: Mapping[str, Any] = MappingProxyType({})


class TorchTrainer:
    """Trains and evaluates with torch; clients share the base model and take turns.

    Args:
        adapted: The model.
        layout: The server's tensors.
        scaling: LoRA scaling per target.
        examples: All encoded examples that this process may see.
        train_indices: Training examples by client.
        validation_indices: Validation examples by client.
        splits: Examples of `server_validation` and `test`.
        proxy_indices: Held-out examples by client, for Fisher scores.
        server_proxies: The server's own examples for Fisher scores, by source.
        seed: The run's seed.
        threads: CPU threads for evaluations that no task asks for.
        eval_batch_size: Examples per forward pass of an evaluation.
        reuse_memory_bytes: What hidden states that are kept may take; results depend on it only through clients whose
            own states take more.
    """

    def __init__(
        self,
        adapted: AdaptedModel,
        layout: Layout,
        scaling: Mapping[str, float],
        examples: Examples,
        *,
        train_indices: Mapping[str, np.ndarray],
        validation_indices: Mapping[str, np.ndarray],
        splits: Mapping[str, np.ndarray],
        seed: int,
        threads: int,
        eval_batch_size: int,
        proxy_indices: Mapping[str, np.ndarray] = _EMPTY,
        server_proxies: Mapping[str, Examples] = _EMPTY,
        reuse_memory_bytes: int = REUSE_MEMORY_BYTES,
    ) -> None:
        self.adapted, self.scaling, self.examples = adapted, scaling, examples
        self._layout = layout
        self._train, self._validation, self._splits = train_indices, validation_indices, splits
        self._proxies, self._server_proxies = proxy_indices, server_proxies
        self._seed, self._threads, self._eval_batch = seed, threads, eval_batch_size
        self.site: Site = SiteBase()
        self._stands_at = 0
        self.reuse = PrefixReuse(adapted, examples, reuse_memory_bytes)
        if adapted.adapter.kind == "square" and adapted.frames is None:
            adapted.set_frames(self._frames_of(BaseLog()))

    @property
    def server_layout(self) -> Layout:
        """Layout of the server's tensors."""
        return self._layout

    @cached_property
    def base_layout(self) -> Layout:
        """A pair per map, as updates of the base and frozen factors are written."""
        if self.adapted.adapter.kind != "square":
            return self._layout
        ranks = {s.stratum: s.rank for s in self._layout if s.kind == "lora_R"}
        return global_layout(self.adapted.shape, "lora", ranks)

    def _frames_of(self, base: BaseLog) -> Frames:
        """The frozen factors that a log holds, or drawn ones."""
        if base.number:
            return Frames(base.merges[0].factors)
        ranks = {s.stratum: s.rank for s in self._layout if s.kind == "lora_R"}
        return drawn_frames(self._seed, self.adapted.shape.targets, ranks)

    def initial(self, layout: Layout) -> NamedTensors:
        """First values: adapters and fresh heads from named streams, other weights from the checkpoint."""
        first = init_lora(self._seed, layout) | self.adapted.base_tensors(layout)
        return {name: first[name] for name in layout.names}

    def take_merges(self, client: str, known: int, number: int, merges: Sequence[Merge], *, keep: bool) -> None:
        """Brings the base model to merge `number`; `keep`: whether what came is kept in `site`."""
        self.stand_at(self.site.take(client, known, number, merges, keep=keep))

    def stand_at(self, base: BaseLog) -> None:
        """Makes the base model that of a log; the same number means the same bits, whoever's log it is.

        With square matrices the log holds the frozen factors around them; an empty one means drawn factors.
        """
        if base.number != self._stands_at:
            if self.adapted.adapter.kind == "square":
                self.adapted.set_frames(self._frames_of(base))
            else:
                self.adapted.move_base(base.dense())
            self._stands_at = base.number

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        """One client's training in one round."""
        if task.client not in self._train:
            raise ClientError(f"There is no data of client {task.client} here")
        indices, config = self._train[task.client], TrainConfig.model_validate(task.train)
        scaling = task.scalings(self.scaling, self._layout, layouts.present)
        kept = [s for s in map(parse_stratum, task.ranks) if isinstance(s, int)]
        began, prefix = time.perf_counter(), None
        problem = self._no_reuse(task, layouts, indices) if task.reuse != "off" else None
        self.adapted.set_client(
            start, layouts.present, layouts.trained, scaling, kept_blocks=kept if task.skip_blocks else None
        )
        if task.reuse != "off" and problem is None:
            prefix = self.reuse.prefix(
                task.client,
                indices,
                start,
                layouts.present,
                scaling,
                chunk_size=config.batch_size,
                threads=task.threads,
                base_number=self._stands_at,
            )
        prefix_s = time.perf_counter() - began
        result = train_locally(
            self.adapted,
            self.examples,
            indices,
            config=config,
            learning_rate=task.learning_rate,
            objective=OBJECTIVES.build(task.objective),
            start=start,
            seed_path=(task.seed, task.server_round, task.client),
            threads=task.threads,
            prefix=prefix,
        )
        numbers = {"last_loss": result.last_loss, "num_tokens": float(result.num_tokens)}
        measured = {"train_s": result.train_s, "rss_bytes": float(psutil.Process().memory_info().rss)}
        if task.reuse != "off":
            numbers["reused_below"] = float(prefix.states.block) if prefix else 0.0
            measured |= {"train_s": prefix_s + result.train_s, "prefix_s": prefix_s}
        return LocalWork(
            tensors=self.adapted.read(layouts.present),
            num_examples=result.num_examples,
            num_steps=result.num_steps,
            loss=result.mean_loss,
            numbers=numbers,
            measured=measured,
            warnings=[f"hidden states are not reused: {problem}"] if problem and task.reuse == "always" else (),
        )

    def _no_reuse(self, task: Task, layouts: TaskLayouts, indices: np.ndarray) -> str | None:
        """Why this client is trained in the plain loop; None if its states are computed once. May reset the model."""
        if task.skip_blocks:
            return "blocks that are not trained are left out"
        return self.reuse.problem(lowest_block(layouts.trained.strata, self.adapted.shape.num_blocks), indices)

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        """Evaluates what a task describes on the split that it names."""
        own = task.split == "client_validation"
        indices = self._validation.get(task.client) if own else self._splits.get(task.split)
        if indices is None:
            raise ClientError(f"Client {task.client} has no examples of {task.split}")
        scaling = task.scalings(self.scaling, self._layout, layouts.present)
        return self._score(layouts.present, tensors, scaling, indices, task.threads)

    def gradient(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> tuple[NamedTensors, int]:
        """The loss's gradient at every map over some training examples, truncated to the map's rank."""
        if task.client not in self._train:
            raise ClientError(f"There is no data of client {task.client} here")
        scaling = task.scalings(self.scaling, self._layout, layouts.present)
        self.adapted.set_client(tensors, layouts.present, Layout(()), scaling)
        chosen = choose_examples(self._train[task.client], task.options.get("examples"), task.seed, task.client)
        ranks = {t: self.base_layout[f"{t}.lora_A"].rank for t in self.base_layout.targets}
        found = gradient_sketch(
            self.adapted, self.examples, chosen, ranks, batch_size=self._eval_batch, threads=task.threads
        )
        pairs = {f"{t}.lora_A": g.right for t, g in found.items()} | {f"{t}.lora_B": g.left for t, g in found.items()}
        return {n: np.ascontiguousarray(pairs[n], np.float32) for n in self.base_layout.names}, len(chosen)

    def fisher(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> FisherSums:
        """Squared gradients per block, summed over this client's held-out examples; the model is reset afterwards."""
        options = FisherOptions.parse(task.options, layouts.present)
        if options.source != HELD_OUT:
            raise ClientError(f'A client has no "{options.source}" examples', where="Fisher scores", expected=HELD_OUT)
        indices = self._proxies.get(task.client, np.empty(0, np.int64))
        if not len(indices):
            raise ClientError(
                f"Client {task.client} has held out no examples",
                where="data.client_proxy_fraction",
                do="hold some out, or let the planner use examples of the server's (its option source)",
            )
        scaling = task.scalings(self.scaling, self._layout, layouts.present)
        chosen = choose_examples(indices, options.examples, task.seed, task.client)
        return self._fisher(layouts.present, tensors, scaling, options, self.examples, chosen, task.threads)

    def fisher_of_server(self, tensors: NamedTensors, options: Mapping[str, Any]) -> FisherSums:
        """The same for examples that the server was given, with its own model, on the base as it stands.

        Raises:
            DataError: If it has none of this source.
        """
        parsed = FisherOptions.parse(options, self._layout)
        examples = self._server_proxies.get(parsed.source)
        if examples is None:
            raise DataError(f'There are no "{parsed.source}" examples on the server', where="Fisher scores")
        chosen = choose_examples(np.arange(len(examples.labels)), parsed.examples, self._seed, "server")
        scaling = client_scalings(self.scaling, self._layout, self._layout, 0.0)
        return self._fisher(self._layout, tensors, scaling, parsed, examples, chosen, self._threads)

    def score(self, tensors: NamedTensors, split: str) -> Score:
        """Evaluates the server's model on a split of the server's."""
        return self._score(self._layout, tensors, self.scaling, self.indices_of(split), self._threads)

    def score_adapter(self, tensors: NamedTensors, layout: Layout, scaling: Mapping[str, float], split: str) -> Score:
        """Evaluates a stored adapter on a split of the server's: tensors of another layout, on the base as loaded."""
        self.stand_at(BaseLog())
        return self._score(layout, tensors, scaling, self.indices_of(split), self._threads)

    def indices_of(self, split: str) -> np.ndarray:
        """Which examples `server_validation` or `test` holds."""
        return self._splits[split]

    def _score(
        self,
        layout: Layout,
        tensors: NamedTensors,
        scaling: Mapping[str, float],
        indices: np.ndarray,
        threads: int,
    ) -> Score:
        self.adapted.set_client(tensors, layout, Layout(()), scaling)
        sums = evaluate(self.adapted, self.examples, indices, batch_size=self._eval_batch, threads=threads)
        return Score(sums.num_examples, sums.loss_sum, sums.num_correct)

    def _fisher(
        self,
        layout: Layout,
        tensors: NamedTensors,
        scaling: Mapping[str, float],
        options: FisherOptions,
        examples: Examples,
        chosen: np.ndarray,
        threads: int,
    ) -> FisherSums:
        trained = layout.restrict(options.strata)
        self.adapted.set_client(tensors, layout, trained, scaling)
        try:
            return fisher_sums(
                self.adapted, examples, chosen, trained=trained, fisher_on=options.fisher_on, threads=threads
            )
        finally:
            self.adapted.reset()
