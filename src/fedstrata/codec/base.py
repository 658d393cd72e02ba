"""How an update becomes bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.core.wire import MAX_CODEC_ID_BYTES, Payload
from fedstrata.errors import ConfigError
from fedstrata.registry import Registry


class Codec(ABC):
    """Turns tensors into bytes and back.

    A codec is data: a frozen dataclass whose fields are its options. `decode` needs nothing but the bytes
    and the layout; what it returns is what the server aggregates.

    Attributes:
        id: Name in configs and in the frame; at most 16 ASCII characters.
    """

    id: ClassVar[str]

    @property
    @abstractmethod
    def lossless(self) -> bool:
        """Whether `decode(encode(x)) == x` bit for bit."""

    @property
    @abstractmethod
    def fixed_length(self) -> bool:
        """Whether the payload's length follows from the layout alone."""

    @property
    @abstractmethod
    def deltas_only(self) -> bool:
        """Whether it makes sense for differences only (entries that are not sent count as zero)."""

    @property
    @abstractmethod
    def deterministic(self) -> bool:
        """Whether `encode` ignores its random stream."""

    @abstractmethod
    def encode(
        self,
        tensors: Mapping[str, np.ndarray],
        layout: Layout,
        residual: Mapping[str, np.ndarray],
        rng: np.random.Generator,
    ) -> tuple[Payload, NamedTensors]:
        """Encodes `tensors`, in the layout's order.

        Args:
            tensors: float32, exactly the layout's, finite.
            layout: What both sides know from the plan.
            residual: What earlier rounds of this client left unsent; empty for codecs without memory.
            rng: The named stream of this client and round (stochastic rounding).

        Returns:
            The payload and the new residual (empty for codecs without memory).
        """

    @abstractmethod
    def decode(self, payload: Payload, layout: Layout) -> NamedTensors:
        """The tensors that the payload holds: float32, exactly the layout's.

        Raises:
            PayloadError: If a section's length is not what the layout demands, before anything is allocated,
                or if a value is not finite.
        """

    @abstractmethod
    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        """Upper bounds of the side and values sections; exact where `fixed_length`."""


CODECS: Registry[Codec] = Registry("codec")


def wire_id(codec: Codec) -> str:
    """The codec id of a frame: the id of the outermost part.

    Both sides know the whole codec with its options from the plan; the id in the frame only catches a payload
    of another codec before its sections are read.

    Raises:
        ConfigError: If the id does not fit the frame's field.
    """
    if not (codec.id.isascii() and 0 < len(codec.id) <= MAX_CODEC_ID_BYTES):
        raise ConfigError(
            f'The codec id "{codec.id}" does not fit the frame',
            expected=f"1 to {MAX_CODEC_ID_BYTES} ASCII characters",
            got=f"{len(codec.id)} characters",
        )
    return codec.id
