"""What a plan costs a client, with the run's workload inside: what planners ask before they decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedstrata.core.shape import AdapterKind, ModelShape
from fedstrata.core.tensors import EMBEDDINGS, Stratum, stratum_order
from fedstrata.device.cost import RoundTime, count_values, predict_client_seconds
from fedstrata.device.fleet import Client, DeviceProfile

Ranks = Mapping[Stratum, int]

_FLOAT32_BYTES = 4
_TRAINED_BYTES = 12
"""Beside a trained number itself: its gradient and Adam's two moments."""
_ACTIVATIONS_PER_BLOCK = 16
"""Numbers per token that one block keeps for its backward pass, in units of the hidden size: our assumption."""


@dataclass(frozen=True)
class PlanNeeds:
    """What one plan asks of a device's caps: memory, and bytes of one round in both directions."""

    memory_bytes: int
    round_bytes: int

    def broken_cap(self, device: DeviceProfile) -> str:
        """The first cap that the plan breaks, in words; empty if it fits.

        Example:
            >>> PlanNeeds(7, 0).broken_cap(DeviceProfile("toy", 6, 1.0, 1.0, 1.0))
            'memory: needs 7 bytes, has 6'
        """
        if self.memory_bytes > device.memory_bytes:
            return f"memory: needs {self.memory_bytes} bytes, has {device.memory_bytes}"
        if device.round_bytes is not None and self.round_bytes > device.round_bytes:
            return f"bytes of a round: needs {self.round_bytes}, may use {device.round_bytes}"
        return ""


@dataclass(frozen=True)
class PlanCost:
    """Seconds, bytes and memory of plans, estimated from sizes alone and not calibrated.

    Attributes:
        shape: The model's sizes.
        tokens_per_step: Batch size times padded length.
        steps: Local steps per client.
        adapter: What is trained.
        up_bytes_per_value: Of the uplink's codec.
        down_bytes_per_value: Of the downlink's codec.
        skips_blocks: Whether a client's model has no other blocks than those that it trains: nothing is read then.
    """

    shape: ModelShape
    tokens_per_step: int
    steps: Mapping[str, int]
    adapter: AdapterKind = "lora"
    up_bytes_per_value: float = 4.0
    down_bytes_per_value: float = 4.0
    skips_blocks: bool = False

    def seconds(self, client: Client, trained: Ranks, reads: Ranks | None = None) -> RoundTime:
        """Seconds of one round.

        Args:
            client: Who trains.
            trained: Trained strata and their ranks; they are sent up, and down with `reads`.
            reads: Further strata in its forward pass.
        """
        return predict_client_seconds(
            client.device,
            self.shape,
            trained,
            self.tokens_per_step,
            self.steps[client.id],
            self.download_bytes(trained, reads),
            self.upload_bytes(trained),
            adapter=self.adapter,
            skips_blocks=self.skips_blocks,
        )

    def num_values(self, ranks: Ranks) -> int:
        """Numbers in these strata's adapters."""
        return sum(count_values(self.shape, ranks, adapter=self.adapter).values())

    def upload_bytes(self, trained: Ranks) -> int:
        """Bytes of the reply, without its header."""
        return round(self.num_values(trained) * self.up_bytes_per_value)

    def download_bytes(self, trained: Ranks, reads: Ranks | None = None) -> int:
        """Bytes of the task, without its header."""
        return round(self.num_values(self._present(trained, reads)) * self.down_bytes_per_value)

    def memory_bytes(self, trained: Ranks, reads: Ranks | None = None) -> int:
        """Memory of training.

            base + 4·N_present + 12·N_trained + 4·T·16·h·(L − m)

        with `base` the model at float32 (`shape.base_bytes`), N numbers in the adapters that are present (`trained`
        and `reads`) or trained, T = `tokens_per_step`, h the hidden size, m the lowest trained block (0 for the
        embeddings, L − 1 if only the head is trained); L − m is the number of trained blocks where others are left
        out of the model. In full-parameter tuning the present numbers are the base.
        Left out: attention scores, the head's activations, and what the framework itself needs.
        """
        own = self.num_values(trained)
        present = 0 if self.adapter == "full" else self.num_values(self._present(trained, reads))
        lowest = min((s for s, rank in trained.items() if rank > 0), key=stratum_order, default=None)
        top = self.shape.num_blocks - 1
        first = lowest if isinstance(lowest, int) else 0 if lowest == EMBEDDINGS else top
        depth = top + 1 - first
        if self.skips_blocks:
            depth = sum(1 for s, rank in trained.items() if rank > 0 and isinstance(s, int))
        kept = self.tokens_per_step * _ACTIVATIONS_PER_BLOCK * self.shape.hidden_size * depth
        return self.shape.base_bytes + _FLOAT32_BYTES * (present + kept) + _TRAINED_BYTES * own

    def _present(self, trained: Ranks, reads: Ranks | None) -> Ranks:
        return trained if self.skips_blocks else {**(reads or {}), **trained}

    def needs(self, trained: Ranks, reads: Ranks | None = None) -> PlanNeeds:
        """What a plan asks of a device's caps."""
        traffic = self.download_bytes(trained, reads) + self.upload_bytes(trained)
        return PlanNeeds(self.memory_bytes(trained, reads), traffic)
