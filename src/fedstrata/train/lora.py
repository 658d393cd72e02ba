"""One model, many clients: LoRA pairs are injected once, and each client's own ranks are swapped in.

The base model is never copied, and no client changes it. A client's tensors become parameters of exactly its ranks; a
pair that is not in its plan is turned off, which is exact. The same holds for small matrices between frozen factors and
for bottleneck adapters behind the blocks. In full-parameter tuning whole parameters are swapped: a client's values
stand in for the base's, and the base's come back with the next client. Only a method that merges into the base moves
it, for everybody, with `move_base`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn

from fedstrata.core.frames import Frames
from fedstrata.core.shape import BOTTLENECK_KINDS, ModelShape
from fedstrata.core.tensors import Layout, NamedTensors, TensorSpec, all_finite, lowest_block
from fedstrata.errors import ModelError, PayloadError, PlanError
from fedstrata.train.bottleneck import Bottleneck, attach_bottlenecks
from fedstrata.train.config import AdapterConfig
from fedstrata.train.frames import SquareMap
from fedstrata.train.model import LoadedModel
from fedstrata.train.skip import BlockSwitch
from fedstrata.train.strata import find_blocks

ADAPTER = "default"


@final
class AdaptedModel:
    """A loaded model that becomes any client's model in well under a millisecond per ten targets.

    Args:
        loaded: A model without LoRA pairs; it is changed in place and belongs to this object from now on.
        adapter: What is added to the model or trained in it, and the largest rank.

    Raises:
        ModelError: If the model already carries pairs, or PEFT adapted other maps than planned.
    """

    def __init__(self, loaded: LoadedModel, adapter: AdapterConfig) -> None:
        self.loaded, self.adapter = loaded, adapter
        self._layers: dict[str, Any] = {}
        self._squares: dict[str, SquareMap] = {}
        self._bottlenecks: dict[str, Bottleneck] = {}
        self._frames: Frames | None = None
        free = loaded.shape.parameters if adapter.kind == "full" else loaded.shape.head
        by_name = dict(loaded.model.named_parameters())
        self._weights: dict[str, nn.Parameter] = {s.name: by_name[s.name] for s in free}
        self._base: dict[str, torch.Tensor] = {n: p.data for n, p in self._weights.items()}
        self._replaced: set[str] = set()
        self._present = self._trained = Layout(())
        accepted = inspect.signature(loaded.model.forward).parameters
        self._options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        self._own = by_name  # the base's parameter objects never change, only what stands in for their values
        self._unmoved: dict[str, torch.Tensor] = {}
        self.blocks = find_blocks(loaded.model)
        self.switch = BlockSwitch(loaded.model, self.blocks)
        if adapter.kind in ("lora", "square"):
            self._layers = _inject(loaded, adapter)
        if adapter.kind == "square":
            self._squares = {t: SquareMap(layer, ADAPTER) for t, layer in self._layers.items()}
        if adapter.kind == "bottleneck":
            self._bottlenecks = attach_bottlenecks(self.blocks, loaded.shape, adapter.dropout)
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

    @property
    def bottlenecks(self) -> tuple[Bottleneck, ...]:
        """The adapters behind the blocks, by block; none of another kind than `bottleneck`."""
        return tuple(self._bottlenecks.values())

    @property
    def lowest_trained(self) -> int:
        """The lowest block that this client trains: 0 also for the embeddings, the number of blocks without one."""
        return lowest_block(self._trained.strata, self.shape.num_blocks)

    @property
    def moved(self) -> frozenset[str]:
        """Targets whose base weights do not stand as loaded."""
        return frozenset(self._unmoved)

    @property
    def frames(self) -> Frames | None:
        """The frozen factors around every R; None until they are set."""
        return self._frames

    def set_frames(self, frames: Frames) -> None:
        """Sets the frozen factors around every R, for every client from the next `set_client` on.

        Raises:
            PlanError: If this model's adapters have none.
            ModelError: If there is no such target.
            PayloadError: If a factor does not fit or is not orthonormal.
        """
        if self.adapter.kind != "square":
            raise PlanError(f'adapter.kind = "{self.adapter.kind}" has no frozen factors', expected='"square"')
        frames.check(self.shape.targets)
        self._frames = frames

    def base_tensors(self, layout: Layout) -> NamedTensors:
        """First values of the plain weights in `layout`: the checkpoint's, or drawn for the head; copies."""
        return {s.name: self._known(s.name).numpy().copy() for s in layout if s.kind == "weight"}

    def move_base(self, deltas: Mapping[str, np.ndarray]) -> None:
        """Moves the base weights of targets, for every client from now on: W := float32(W_0 + D).

        W_0 is the weight as loaded and is kept, so that the bits follow from D alone, whatever stood there before.
        Targets that are not named go back to W_0. `set_client` and `reset` leave the base where it stands. A saved
        LoRA folder holds pairs and head only: without D beside it, it belongs to the base as it stands now.

        Args:
            deltas: D by target, float32 `[out_features, in_features]`, however the map stores its weight.

        Raises:
            ModelError: If a target carries no LoRA pair.
            PayloadError: If a delta has another shape or type, or is not finite.
        """
        turned = {t.name: t.fan_in_fan_out for t in self.shape.targets}
        for target, delta in deltas.items():
            self._check_move(target, delta)
        for target in [t for t in self._unmoved if t not in deltas]:
            self._own[f"{target}.weight"].data = self._unmoved.pop(target)
        for target, delta in deltas.items():
            weight = self._own[f"{target}.weight"]
            original = self._unmoved.setdefault(target, weight.data)
            change = _tensor(delta.T if turned[target] else delta)
            weight.data = change.add_(original)  # a sum of two float32 numbers does not depend on their order

    def set_client(
        self,
        tensors: Mapping[str, np.ndarray],
        present: Layout,
        trained: Layout,
        scaling: Mapping[str, float],
        *,
        kept_blocks: Collection[int] | None = None,
    ) -> None:
        """Turns the model into one client's.

        Args:
            tensors: The values of everything in `present`, float32; copied.
            present: What stands in the forward pass. Adapters that it lacks are off, weights that it lacks are the
                base's. A target of a model with frozen factors has an R between them, or a pair of its own.
            trained: The part of `present` that is trained; nothing else gets a gradient.
            scaling: The factor of B·A per target of `present`.
            kept_blocks: The blocks that the model consists of, others being left out; None: all.

        Raises:
            PlanError: If `trained` is not a part of `present`, an adapter is incomplete, a scaling is missing, an R has
                no frozen factors of its rank, a trained block is left out, or this model's blocks cannot be left out.
            PayloadError: If the tensors are not exactly those of `present`, or not finite.
            ModelError: If the model has no such target or weight.
        """
        present.check({s.name: tensors[s.name] for s in present if s.name in tensors}, where="the client's model")
        self._check_plan(present, trained, scaling)
        left_out = [] if kept_blocks is None else [s for s in trained.strata if s in self.shape.blocks]
        left_out = [s for s in left_out if s not in (kept_blocks or ())]
        if left_out:
            raise PlanError(f"Block {left_out[0]} is to be trained and left out")
        for adapter in self._bottlenecks.values():
            adapter.off()  # first, so that blocks are looked at without the last client's adapters
        self.switch.keep(kept_blocks)
        self._present, self._trained = present, trained
        wanted = set(trained.names)
        targets = set(present.targets)
        for target, layer in self._layers.items():
            if target in self._squares:
                self._squares[target].off()
            if f"{target}.lora_R" in present:
                self._swap_square(target, tensors, wanted, scaling[target])
            elif target in targets:
                _swap(layer, target, tensors, wanted, scaling[target])
            elif not layer.disable_adapters:
                layer.enable_adapters(False)
        for block, (path, adapter) in enumerate(self._bottlenecks.items()):
            names: dict[str, str] = {k: f"{path}.{k}" for k in BOTTLENECK_KINDS}
            if names["adapter_down"] in present:
                values = {k: _tensor(tensors[n]) for k, n in names.items()}
                trains = [k for k, n in names.items() if n in wanted]
                adapter.put(values, trains, is_on=kept_blocks is None or block in kept_blocks)
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
        """Back to the base where it stands: every block on, adapters off, free weights as loaded, none trained."""
        self.set_client({}, Layout(()), Layout(()), {})

    def read(self, layout: Layout) -> NamedTensors:
        """The current values of `layout`, copied, float32; every tensor of it must be present."""
        for spec in layout:
            if spec.name not in self._present:
                raise PlanError(f"{spec.name} is not part of this client's model", where="read")
        return {s.name: self._current(s.name).detach().numpy().copy() for s in layout}

    def trained_set(self) -> tuple[str, ...]:
        """Names of everything in the model that really requires a gradient: the base's own parameters, then adapters.

        It is read off the parameters, not off the plan; one outside every layout appears under its module path.
        """
        found = [n for n, p in self._own.items() if p.requires_grad]
        for target, layer in self._layers.items():
            for factor, holder in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
                if holder[ADAPTER].weight.requires_grad:
                    found.append(f"{target}.{factor}")
        found += [f"{t}.lora_R" for t, s in self._squares.items() if s.R is not None and s.R.requires_grad]
        found += [f"{path}.{kind}" for path, adapter in self._bottlenecks.items() for kind in adapter.trained]
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
        """Turns adapter dropout on from the lowest trained block upwards; everything else stays in eval mode."""
        lowest = self.lowest_trained
        active = [
            self._layers[t.name].lora_dropout
            for t in self.shape.targets
            if t.block >= lowest and t.name in self._layers
        ]
        active += [a.dropout_module for a in self.bottlenecks[lowest:]]
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
        owner, _, kind = name.rpartition(".")
        if owner in self._bottlenecks:
            return self._bottlenecks[owner].parameter(kind)
        if kind == "lora_R":
            return self._squares[owner].parameter()
        parameter: nn.Parameter = getattr(self._layers[owner], kind)[ADAPTER].weight
        return parameter

    def _swap_square(self, target: str, tensors: Mapping[str, np.ndarray], trained: set[str], scaling: float) -> None:
        """Gives one map its client's R, between the leading slices of the frozen factors."""
        name = f"{target}.lora_R"
        left, right = self._frames_of(target, tensors[name].shape[0])
        frozen = {f"{target}.lora_A": right, f"{target}.lora_B": left}
        _swap(self._layers[target], target, frozen, set(), scaling)
        self._squares[target].put(_tensor(tensors[name]), is_trained=name in trained)

    def _frames_of(self, target: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
        if self._frames is None:
            raise PlanError("The frozen factors around every R are not known yet", do="call set_frames first")
        return self._frames.of(target, rank)

    def _check_move(self, target: str, delta: np.ndarray) -> None:
        if target not in self._layers:
            raise ModelError(f"{target} carries no LoRA pair, so nothing is merged into it", where="move_base")
        shape = next((t.out_features, t.in_features) for t in self.shape.targets if t.name == target)
        if delta.shape != shape or delta.dtype != np.float32 or not all_finite(delta):
            raise PayloadError(
                f"The update of {target} does not fit",
                where="move_base",
                expected=f"finite float32 {list(shape)}",
                got=f"{delta.dtype} {list(delta.shape)}",
            )

    def _check_plan(self, present: Layout, trained: Layout, scaling: Mapping[str, float]) -> None:
        for spec in present:
            if spec.kind == "weight":
                if self._known(spec.name).shape != spec.shape:
                    raise ModelError(f"{spec.name} has another shape", got=f"{spec.shape}")
            elif spec.kind in BOTTLENECK_KINDS:
                if spec.target not in self._bottlenecks:
                    raise ModelError(f"{spec.target} carries no bottleneck adapter", where=self.shape.architecture)
                _check_complete(spec, present, BOTTLENECK_KINDS, "down, bias and up of one width")
            else:
                self._check_pair(spec, present, scaling)
        for spec in trained:
            if spec.name not in present or present[spec.name] != spec:
                raise PlanError(f"{spec.name} is to be trained but does not stand in the client's model")

    def _check_pair(self, spec: TensorSpec, present: Layout, scaling: Mapping[str, float]) -> None:
        """What is added to a linear map: A and B, or R alone."""
        if spec.target not in self._layers:
            raise ModelError(f"{spec.target} carries no LoRA pair", where=self.shape.architecture)
        if spec.kind != "lora_R":
            _check_complete(spec, present, ("lora_A", "lora_B"), "A and B of one rank")
        elif spec.target not in self._squares or f"{spec.target}.lora_A" in present:
            raise PlanError(f"{spec.name} does not stand between frozen factors", expected="no pair beside it")
        else:
            self._frames_of(spec.target, spec.rank)
        if spec.target not in scaling:
            raise PlanError(f"{spec.target} has no scaling")


def _check_complete(spec: TensorSpec, present: Layout, kinds: Collection[str], expected: str) -> None:
    """Raises `PlanError` unless all tensors of an adapter are present at one rank."""
    names = [f"{spec.target}.{k}" for k in kinds]
    if not all(n in present for n in names) or len({present[n].rank for n in names}) > 1:
        what = "pair" if spec.kind.startswith("lora_") else "bottleneck adapter"
        raise PlanError(f"The {what} of {spec.target} is not complete", expected=expected)


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
