"""What a plan costs a device: operations and seconds, estimated from sizes alone and not calibrated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fedstrata.core.shape import AdapterKind, ModelShape
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Stratum, stratum_order
from fedstrata.device.fleet import DeviceProfile


@dataclass(frozen=True)
class RoundTime:
    """Seconds of one client in one round; download, compute and upload do not overlap.

    Attributes:
        download_s: Task down.
        compute_s: All local steps.
        upload_s: Reply up.
        forward_s: Of `compute_s`, the forward passes.
        backward_s: Of `compute_s`, the rest.
    """

    download_s: float
    compute_s: float
    upload_s: float
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Their sum."""
        return self.download_s + self.compute_s + self.upload_s


def predict_client_seconds(
    profile: DeviceProfile,
    shape: ModelShape,
    plan_strata: Mapping[Stratum, int],
    tokens_per_step: int,
    steps: int,
    down_bytes: int,
    up_bytes: int,
    *,
    adapter: AdapterKind = "lora",
    skips_blocks: bool = False,
) -> RoundTime:
    """Predicts how long one client needs for one round, download, compute and upload one after the other.

        t = down_bytes / down_rate + steps · flop_per_step / rate + up_bytes / up_rate

    with `count_flop_per_step`. It is an estimate from the profile's rates: no measurement of this model on this
    device goes into it.

    Args:
        profile: The client's rates.
        shape: The model's sizes.
        plan_strata: Trained strata and their ranks; rank 0 means frozen.
        tokens_per_step: Batch size times padded length.
        steps: Local steps.
        down_bytes: Length of the task.
        up_bytes: Length of the reply.
        adapter: Whether the strata's LoRA pairs are trained, or their own parameters.
        skips_blocks: Whether blocks that are not trained are left out of the model.
    """
    flop = count_step_flop(shape, plan_strata, tokens_per_step, adapter=adapter, skips_blocks=skips_blocks)
    return RoundTime(
        download_s=down_bytes / profile.down_bytes_per_s,
        compute_s=steps * flop.total / profile.flop_per_s,
        upload_s=up_bytes / profile.up_bytes_per_s,
        forward_s=steps * flop.forward / profile.flop_per_s,
        backward_s=steps * flop.backward / profile.flop_per_s,
    )


@dataclass(frozen=True)
class StepFlop:
    """Operations of one training step; `backward` counts gradients of activations and of weights."""

    forward: int
    backward: int

    @property
    def total(self) -> int:
        """Their sum."""
        return self.forward + self.backward


def count_flop_per_step(
    shape: ModelShape, plan_strata: Mapping[Stratum, int], tokens_per_step: int, *, adapter: AdapterKind = "lora"
) -> int:
    """Operations of one training step, forward and backward: the sum of `count_step_flop`."""
    return count_step_flop(shape, plan_strata, tokens_per_step, adapter=adapter).total


def count_step_flop(
    shape: ModelShape,
    plan_strata: Mapping[Stratum, int],
    tokens_per_step: int,
    *,
    adapter: AdapterKind = "lora",
    skips_blocks: bool = False,
) -> StepFlop:
    """Operations of one training step.

    With T tokens, P_b parameters in block b (0 for a block that is left out of the model), P_h in the head, m the
    lowest trained stratum, and N_b = Σ r·(in + out) LoRA parameters of a trained block at rank r:

        forward           2·T·(Σ_b P_b + P_h + Σ_trained N_b)
        activation grads  2·T·(Σ_{b ≥ m} P_b + P_h + Σ_trained N_b), nothing if nothing is trained
        weight grads      2·T·(parameters that are trained)

    The last line counts N_b and the head's parameters with LoRA, and all parameters of the trained strata in
    full-parameter tuning (where there is no N_b). A square matrix between frozen factors adds r² per map to N_b and
    trains those alone; a bottleneck adapter of width w in a stream of width h has N_b = w·(2h + 1). Left out:
    attention scores (quadratic in length), norms and activations, embedding look-ups, adapters that are present but
    frozen, and that most heads see one token per text only.

    Args:
        shape: The model's sizes.
        plan_strata: Trained strata and their ranks; rank 0 means frozen.
        tokens_per_step: T.
        adapter: What is trained.
        skips_blocks: Whether blocks that are not trained are left out of the model, as in FedRA.
    """
    trained = [s for s, rank in plan_strata.items() if rank > 0]
    present = {HEAD, *trained} if skips_blocks else {HEAD, *shape.blocks}
    passed = {s: n for s, n in _stratum_sizes(shape).items() if s in present and s != EMBEDDINGS}
    own = count_values(shape, plan_strata, adapter=adapter)
    added = 0 if adapter == "full" else sum(n for s, n in own.items() if s != HEAD)
    if adapter == "square":
        added += sum(n for s, n in _lora_sizes(shape, plan_strata).items() if s != HEAD)
    forward = sum(passed.values()) + added
    backward = 0
    if trained:
        lowest = min(stratum_order(s) for s in trained)
        backward = sum(n for s, n in passed.items() if stratum_order(s) >= lowest) + added
    return StepFlop(2 * tokens_per_step * forward, 2 * tokens_per_step * (backward + sum(own.values())))


def count_values(
    shape: ModelShape, ranks: Mapping[Stratum, int], *, adapter: AdapterKind = "lora"
) -> Mapping[Stratum, int]:
    """Numbers in the adapters (or the parameters of full-parameter tuning) of each stratum whose rank is above 0."""
    if adapter == "lora":
        return _lora_sizes(shape, ranks)
    if adapter != "full":
        return _small_sizes(shape, ranks, adapter)
    sizes = _stratum_sizes(shape)
    return {s: sizes[s] for s, rank in ranks.items() if rank > 0}


def _stratum_sizes(shape: ModelShape) -> Counter[Stratum]:
    """Parameters per stratum."""
    sizes: Counter[Stratum] = Counter()
    for spec in shape.parameters:
        sizes[spec.stratum] += spec.num_values
    return sizes


def _lora_sizes(shape: ModelShape, ranks: Mapping[Stratum, int]) -> Counter[Stratum]:
    """Trained parameters per stratum with LoRA."""
    sizes: Counter[Stratum] = Counter()
    for target in shape.targets:
        sizes[target.block] += ranks.get(target.block, 0) * (target.in_features + target.out_features)
    if ranks.get(HEAD, 0) > 0:
        sizes[HEAD] = sum(spec.num_values for spec in shape.head)
    return sizes


def _small_sizes(shape: ModelShape, ranks: Mapping[Stratum, int], adapter: AdapterKind) -> Counter[Stratum]:
    """Trained parameters per stratum with square matrices between frozen factors, or with bottleneck adapters."""
    sizes: Counter[Stratum] = Counter()
    if adapter == "square":
        for target in shape.targets:
            sizes[target.block] += ranks.get(target.block, 0) ** 2
    else:
        for block in shape.blocks:
            sizes[block] = ranks.get(block, 0) * (2 * shape.hidden_size + 1)
    if ranks.get(HEAD, 0) > 0:
        sizes[HEAD] = sum(spec.num_values for spec in shape.head)
    return sizes
