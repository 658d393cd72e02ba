"""One model, many clients: LoRA pairs are injected once, and each client's own ranks are swapped in.

The base model is never copied and never changed. A client's tensors become parameters of exactly its ranks; a pair
that is not in its plan is turned off, which is exact. In full-parameter tuning the same holds for whole parameters:
a client's values stand in for the base's, and the base's come back with the next client.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from fedstrata.core.shape import ModelShape
from fedstrata.core.tensors import EMBEDDINGS, Layout, NamedTensors
from fedstrata.errors import ModelError, PlanError
from fedstrata.train.config import AdapterConfig
from fedstrata.train.model import LoadedModel

ADAPTER = "default"


@final
class AdaptedModel:
    """A loaded model that becomes any client's model in well under a millisecond per ten targets.

    Args:
        loaded: A model without LoRA pairs; it is changed in place and belongs to this object from now on.
        adapter: LoRA or full parameters, and the largest rank.

    Raises:
        ModelError: If the model already carries pairs, or PEFT adapted other maps than planned.
    """

    def __init__(self, loaded: LoadedModel, adapter: AdapterConfig) -> None:
        self.loaded, self.adapter = loaded, adapter
        self._layers: dict[str, Any] = {}
        free = loaded.shape.head if adapter.kind == "lora" else loaded.shape.parameters
        by_name = dict(loaded.model.named_parameters())
        self._weights: dict[str, nn.Parameter] = {s.name: by_name[s.name] for s in free}
        self._base: dict[str, torch.Tensor] = {n: p.data for n, p in self._weights.items()}
        self._replaced: set[str] = set()
        self._present = self._trained = Layout(())
        accepted = inspect.signature(loaded.model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        self._own = by_name  # the base's parameter objects never change, only what stands in for their values
        if adapter.kind == "lora":
            self._layers = _inject(loaded, adapter)
        loaded.model.eval().requires_grad_(False)

    @property
    def model(self) -> nn.Module:
        """The model as the last `set_client` left it."""
        return self.loaded.model

    @property
    def shape(self) -> ModelShape:
        """Its sizes."""
        return self.loaded.shape

    @property
    def pad_id(self) -> int:
        """Id that fills short texts."""
        return self.loaded.pad_id

    def base_tensors(self, layout: Layout) -> NamedTensors:
        """First values of the plain weights in `layout`: the checkpoint's, or drawn for the head; copies."""
        return {s.name: self._known(s.name).numpy().copy() for s in layout if s.kind == "weight"}

    def set_client(
        self, tensors: Mapping[str, np.ndarray], present: Layout, trained: Layout, scaling: Mapping[str, float]
    ) -> None:
        """Turns the model into one client's.

        Args:
            tensors: The values of everything in `present`, float32; copied.
            present: What stands in the forward pass. Pairs that it lacks are off, weights that it lacks are the base's.
            trained: The part of `present` that is trained; nothing else gets a gradient.
            scaling: The factor of B·A per target of `present`.

        Raises:
            PlanError: If `trained` is not a part of `present`, a pair is incomplete, or a scaling is missing.
            PayloadError: If the tensors are not exactly those of `present`, or not finite.
            ModelError: If the model has no such target or weight.
        """
        present.check({s.name: tensors[s.name] for s in present if s.name in tensors}, where="the client's model")
        self._check_plan(present, trained, scaling)
        self._present, self._trained = present, trained
        wanted = set(trained.names)
        targets = set(present.targets)
        for target, layer in self._layers.items():
            if target in targets:
                _swap(layer, target, tensors, wanted, scaling[target])
            elif not layer.disable_adapters:
                layer.enable_adapters(False)
        weights = {s.name for s in present if s.kind == "weight"}
        for name, parameter in self._weights.items():
            if name in weights:
                parameter.data = _tensor(tensors[name])
            elif name in self._replaced:
                parameter.data = self._base[name]
            parameter.requires_grad_(name in wanted)
            parameter.grad = None
        self._replaced = weights
        differing = wanted.symmetric_difference(self.trained_set())
        if differing:
            raise ModelError(
                "The trainable tensors are not the planned ones",
                got=f"these differ: {', '.join(sorted(differing)[:4])}",
                do="report this as a bug",
            )

    def reset(self) -> None:
        """Back to the base: every pair off, every weight as loaded, nothing trainable."""
        self.set_client({}, Layout(()), Layout(()), {})

    def read(self, layout: Layout) -> NamedTensors:
        """The current values of `layout`, copied, float32; every tensor of it must be present."""
        for spec in layout:
            if spec.name not in self._present:
                raise PlanError(f"{spec.name} is not part of this client's model", where="read")
        return {s.name: self._current(s.name).detach().numpy().copy() for s in layout}

    def trained_set(self) -> tuple[str, ...]:
        """Names of everything in the model that really requires a gradient: the base's own parameters, then pairs.

        It is read off the parameters, not off the plan; one outside every layout appears under its module path.
        """
        found = [n for n, p in self._own.items() if p.requires_grad]
        for target, layer in self._layers.items():
            for factor, holder in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                if holder[ADAPTER].weight.requires_grad:
                    found.append(f"{target}.{factor}")
        return tuple(found)

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """What this client optimizes, by name, in the order of its layout."""
        return {s.name: self._current(s.name) for s in self._trained}

    def logits(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Class scores, `[batch, num_labels]`; `inputs` is a batch without its labels."""
        output = self.model(**inputs, **self._options)
        scores: torch.Tensor = output.logits
        return scores

    @contextmanager
    def dropout(self) -> Iterator[None]:
        """Turns LoRA dropout on from the lowest trained block upwards; everything else stays in eval mode."""
        blocks = [0 if s == EMBEDDINGS else s for s in self._trained.strata if isinstance(s, int) or s == EMBEDDINGS]
        active = [
            self._layers[t.name].lora_dropout
            for t in self.shape.targets
            if blocks and t.block >= min(blocks) and t.name in self._layers
        ]
        for module in active:
            module.train()
        try:
            yield
        finally:
            for module in active:
                module.eval()

    def _known(self, name: str) -> torch.Tensor:
        if name not in self._base:
            raise ModelError(f"{name} is no weight that may be trained", where=self.shape.architecture)
        return self._base[name]

    def _current(self, name: str) -> nn.Parameter:
        if name in self._weights:
            return self._weights[name]
        target, _, factor = name.rpartition(".")
        parameter: nn.Parameter = getattr(self._layers[target], factor)[ADAPTER].weight
        return parameter

    def _check_plan(self, present: Layout, trained: Layout, scaling: Mapping[str, float]) -> None:
        for spec in present:
            if spec.kind == "weight":
                if self._known(spec.name).shape != spec.shape:
                    raise ModelError(f"{spec.name} has another shape", got=f"{spec.shape}")
                continue
            if spec.target not in self._layers:
                raise ModelError(f"{spec.target} carries no LoRA pair", where=self.shape.architecture)
            pair = [f"{spec.target}.{f}" for f in ("lora_A", "lora_B")]
            if not all(n in present for n in pair) or present[pair[0]].rank != present[pair[1]].rank:
                raise PlanError(f"The pair of {spec.target} is not complete", expected="A and B of one rank")
            if spec.target not in scaling:
                raise PlanError(f"{spec.target} has no scaling")
        for spec in trained:
            if spec.name not in present or present[spec.name] != spec:
                raise PlanError(f"{spec.name} is to be trained but does not stand in the client's model")


def _inject(loaded: LoadedModel, adapter: AdapterConfig) -> dict[str, Any]:
    """Puts a LoRA pair on every target, turned off."""
    if any(isinstance(m, LoraLayer) for m in loaded.model.modules()):
        raise ModelError("The model carries LoRA pairs already", do="load it afresh")
    targets = loaded.shape.targets
    config = LoraConfig(
        r=adapter.max_rank,
        lora_alpha=1,
        lora_dropout=adapter.dropout,
        target_modules=[t.name for t in targets],
        fan_in_fan_out=any(t.fan_in_fan_out for t in targets),
    )
    with torch.random.fork_rng(devices=[]):  # PEFT draws first values; ours come with every client
        inject_adapter_in_model(config, loaded.model)
    layers = {name: m for name, m in loaded.model.named_modules() if isinstance(m, LoraLayer)}
    if layers.keys() != {t.name for t in targets}:
        wrong = sorted(layers.keys() ^ {t.name for t in targets})
        raise ModelError("The adapted maps are not the planned ones", got=", ".join(wrong[:4]))
    for layer in layers.values():
        layer.enable_adapters(False)
    return layers


def _swap(layer: Any, target: str, tensors: Mapping[str, np.ndarray], trained: set[str], scaling: float) -> None:
    """Gives one map its client's pair: parameters of exactly its rank."""
    if layer.disable_adapters:
        layer.enable_adapters(True)
    name_a, name_b = f"{target}.lora_A", f"{target}.lora_B"
    a, b = _tensor(tensors[name_a]), _tensor(tensors[name_b])
    rank = a.shape[0]
    linear_a, linear_b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    linear_a.weight = nn.Parameter(a, requires_grad=name_a in trained)
    linear_b.weight = nn.Parameter(b, requires_grad=name_b in trained)
    linear_a.out_features = linear_b.in_features = layer.r[ADAPTER] = rank
    layer.scaling[ADAPTER] = scaling
    layer.lora_alpha[ADAPTER] = scaling * rank


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A torch copy: training must not write into what the caller keeps."""
    return torch.from_numpy(np.array(array, dtype=np.float32, order="C"))
