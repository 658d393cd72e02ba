"""Hidden states that enter a client's lowest trained block: computed once per example, kept while they hold.

Whatever is below that block is frozen, so that an example's states are the same at every visit. They are computed in
fixed chunks, which follow from the client's examples alone and never from a batch: found or computed anew, in this
round or the next, in this process or another, they have the same bits.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from fedstrata.core.tensors import EMBEDDINGS, Layout
from fedstrata.train.batches import Examples, collate, evaluation_batches, lengths_of
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.resume import Resume
from fedstrata.train.threads import torch_threads

BYTES_PER_VALUE = 4


@dataclass(frozen=True, eq=False)
class PrefixStates:
    """The states of some examples, each cut to its own length.

    Attributes:
        block: The block that they enter; the number of blocks for those that leave the last one.
        indices: The examples, ascending, `[n]`.
        starts: Where each one's rows begin, `[n]`.
        lengths: How many rows each one has, `[n]`.
        values: float32 `[rows, width]`.
    """

    block: int
    indices: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    values: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Size of the values."""
        return self.values.numel() * self.values.element_size()

    def batch(self, chosen: np.ndarray) -> torch.Tensor:
        """The states of a batch, `[batch, longest, width]`, zeros behind the shorter ones.

        Masks hide what stands there, in the plain loop too.
        """
        places = np.searchsorted(self.indices, chosen)
        lengths, starts = self.lengths[places].tolist(), self.starts[places].tolist()
        states = self.values.new_zeros((len(chosen), max(lengths), self.values.shape[1]))
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            states[row, :length] = self.values[start : start + length]
        return states


@dataclass(frozen=True, eq=False)
class Prefix:
    """A client's states, ready to train on."""

    resume: Resume
    states: PrefixStates

    @contextmanager
    def replay(self) -> Iterator[Callable[[np.ndarray], None]]:
        """Forward passes inside start at the lowest trained block; the function says which examples come next."""
        with self.resume.replay(self.states.block) as put:
            yield lambda chosen: put(self.states.batch(chosen))


def compute_states(
    resume: Resume, examples: Examples, indices: np.ndarray, *, block: int, chunk_size: int, pad_id: int
) -> PrefixStates:
    """Computes the states of a client's examples, outside autograd.

    The chunks are the examples in ascending length, then index, `chunk_size` at a time, each padded to its longest.

    Args:
        resume: The model, as `set_client` left it.
        examples: All encoded examples.
        indices: The client's own, `[n]`, n ≥ 1; their order does not matter.
        block: The block that the states enter, from 1.
        chunk_size: Examples per forward pass.
        pad_id: Token that fills short texts.
    """
    indices = np.sort(np.asarray(indices, np.int64))
    lengths, values = lengths_of(examples, indices), torch.empty(0)
    is_text, starts = bool(lengths.any()), np.empty(0, np.int64)
    for chosen in evaluation_batches(indices, lengths, chunk_size):
        batch = collate(examples, chosen, pad_id)
        batch.pop("labels")
        states = resume.states(batch, block)
        if not len(starts):
            lengths = lengths if is_text else np.full(len(indices), states.shape[1], np.int64)
            starts = np.cumsum(lengths) - lengths
            values = states.new_empty((int(lengths.sum()), states.shape[2]))
        for row, place in enumerate(np.searchsorted(indices, chosen)):
            start, length = int(starts[place]), int(lengths[place])
            values[start : start + length] = states[row, :length]
    return PrefixStates(block, indices, starts, lengths, values)


def prefix_key(
    adapted: AdaptedModel,
    tensors: Mapping[str, np.ndarray],
    present: Layout,
    scaling: Mapping[str, float],
    *,
    block: int,
    indices: np.ndarray,
    chunk_size: int,
    threads: int,
    base_number: int,
) -> str:
    """SHA-256 over everything that the states entering a block depend on.

    The base model by its files, and by the number of its merge where that moved a map below; what stands below the
    block as the client decoded it, with its scaling; the examples, their chunks and the threads.

    Args:
        adapted: The model, on the base that the client trains on.
        tensors: Values of everything in `present`.
        present: What stands in the forward pass.
        scaling: Per target of `present`.
        block: The block.
        indices: The client's examples, ascending.
        chunk_size: Examples per forward pass.
        threads: Torch threads.
        base_number: The merge at which the base, or the frozen factors around square matrices, stand.
    """
    below = [s for s in present if s.stratum == EMBEDDINGS or (isinstance(s.stratum, int) and s.stratum < block)]
    moves = any(s.kind == "lora_R" for s in below) or any(
        t.name in adapted.moved for t in adapted.shape.targets if t.block < block
    )
    header: dict[str, Any] = {
        "model": [adapted.loaded.identity, adapted.adapter.kind],
        "base": base_number if moves else 0,
        "block": block,
        "chunk_size": chunk_size,
        "threads": threads,
        "tensors": [[s.name, list(s.shape), scaling.get(s.target)] for s in below],
    }
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    digest.update(np.ascontiguousarray(indices, "<i8").tobytes())
    for spec in below:
        digest.update(np.ascontiguousarray(tensors[spec.name], "<f4").tobytes())
    return digest.hexdigest()


@final
class PrefixCache:
    """The states of the clients that were trained last, up to a number of bytes.

    A client has at most one entry: when what is below its block changes, the old one goes.

    Args:
        limit_bytes: What all entries together may take.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._entries: OrderedDict[str, tuple[str, PrefixStates]] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """What all entries together take now."""
        return sum(states.num_bytes for _, states in self._entries.values())

    @property
    def clients(self) -> tuple[str, ...]:
        """Who has an entry, the one that was used last at the end."""
        return tuple(self._entries)

    def clear(self) -> None:
        """Forgets everything."""
        self._entries.clear()

    def get(self, client: str, key: str, num_bytes: int, compute: Callable[[], PrefixStates]) -> PrefixStates:
        """The entry of a client under this key, or a new one; room for it is made before it is computed.

        Args:
            client: Whose.
            key: See `prefix_key`.
            num_bytes: Size of a new entry; beyond the limit it is computed and not kept.
            compute: Makes it.
        """
        held, states = self._entries.pop(client, ("", None))
        if states is None or held != key:
            states = None  # the old entry's memory is free before the new one takes its own
            while self._entries and self.num_bytes + num_bytes > self.limit_bytes:
                self._entries.popitem(last=False)
            states = compute()
        if states.num_bytes <= self.limit_bytes:
            self._entries[client] = (key, states)
        return states


@final
class PrefixReuse:
    """What a trainer knows about reuse: the model's two halves, and the states that it keeps.

    Args:
        adapted: The model.
        examples: All encoded examples.
        limit_bytes: What the kept states may take. A client whose own take more is trained in the plain loop.
    """

    def __init__(self, adapted: AdaptedModel, examples: Examples, limit_bytes: int) -> None:
        self._adapted, self._examples = adapted, examples
        self.resume = Resume(adapted)
        self.cache = PrefixCache(limit_bytes)

    def problem(self, block: int, indices: np.ndarray) -> str | None:
        """Why a client is trained in the plain loop; None if its states are computed once.

        A function of the model, the block, the client's examples and the limit alone. It may reset the model.
        """
        if block == 0:
            return "nothing below its trained blocks is frozen"
        found = self.resume.problem
        if found:
            return found
        size, limit = self.num_bytes(indices), self.cache.limit_bytes
        return f"they take {size} bytes of compute.reuse_memory_bytes = {limit}" if size > limit else None

    def num_bytes(self, indices: np.ndarray) -> int:
        """Size of the states of some examples, once `problem` has found none."""
        tokens, width = self.resume.size
        lengths = lengths_of(self._examples, indices)
        num_tokens = int(lengths.sum()) if lengths.any() else tokens * len(indices)
        return BYTES_PER_VALUE * num_tokens * width

    def prefix(
        self,
        client: str,
        indices: np.ndarray,
        tensors: Mapping[str, np.ndarray],
        present: Layout,
        scaling: Mapping[str, float],
        *,
        chunk_size: int,
        threads: int,
        base_number: int,
    ) -> Prefix:
        """The states of a client whose model is set; see `prefix_key` and `compute_states`."""
        indices, block = np.sort(np.asarray(indices, np.int64)), self._adapted.lowest_trained
        key = prefix_key(
            self._adapted,
            tensors,
            present,
            scaling,
            block=block,
            indices=indices,
            chunk_size=chunk_size,
            threads=threads,
            base_number=base_number,
        )

        def compute() -> PrefixStates:
            with torch_threads(threads):
                return compute_states(
                    self.resume,
                    self._examples,
                    indices,
                    block=block,
                    chunk_size=chunk_size,
                    pad_id=self._adapted.pad_id,
                )

        return Prefix(self.resume, self.cache.get(client, key, self.num_bytes(indices), compute))
