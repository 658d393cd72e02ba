"""Starts a model's forward pass in the middle, at the lowest trained block, from hidden states computed before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, final

import torch

from fedstrata.core.tensors import HEAD
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.skip import as_output, identity, put_forward

TOLERANCE = 1e-3
"""Largest relative difference that padding may make to a probe's states; a mask's rounding makes about 1e-6."""


@final
class Resume:
    """Splits an adapted model's forward pass before a block, by the model's own code.

    Blocks on the other side of the cut hand on what they are given: above the cut while states are computed, below it
    while they are put in. Embeddings, masks and positions are the model's own in both halves.

    Args:
        adapted: The model; it belongs to whoever made it.
    """

    def __init__(self, adapted: AdaptedModel) -> None:
        self._adapted = adapted
        self._blocks = adapted.blocks.modules
        self.size = (0, 0)  # tokens of a picture, width of a state; known once `problem` was asked

    @cached_property
    def problem(self) -> str | None:
        """What forbids that states are computed apart from their batch; None if nothing does.

        Looked at once, with every adapter off: the model is reset, and the next client has to be set. Beside what
        `can_skip_blocks` asks, states must be `[batch, tokens, width]` and come out the same twice, padding must not
        change them, no parameter of the head may stand before the end of the blocks, and a pass from the states must
        give the whole model's scores.

        Returns:
            A clause for a record, e.g. "padding changes the states of other tokens".
        """
        self._adapted.reset()
        with torch.random.fork_rng(devices=[]):
            found, _ = self._adapted.switch.found
            if found:
                return found
            return "a part of its head stands before its blocks" if self._head_is_below() else self._difference()

    def states(self, inputs: Mapping[str, torch.Tensor], block: int) -> torch.Tensor:
        """What enters a block, or leaves the last one: `[batch, tokens, width]`, outside autograd.

        Args:
            inputs: A batch without its labels.
            block: From 1 to the number of blocks.
        """
        found: list[torch.Tensor] = []

        def note(module: Any, args: Any, output: Any) -> None:
            found.append(output if isinstance(output, torch.Tensor) else output[0])

        handle = self._blocks[block - 1].register_forward_hook(note)  # after what adapters hooked on
        try:
            with self._forwards(range(block, len(self._blocks)), identity), torch.no_grad():
                self._adapted.logits(inputs)
        finally:
            handle.remove()
        return found[0]

    @contextmanager
    def replay(self, block: int) -> Iterator[Callable[[torch.Tensor], None]]:
        """Forward passes inside start at `block`, from the states that were put last; blocks below do not run.

        Yields:
            A function that puts the states of the next batch, `[batch, tokens, width]`.
        """
        current: list[torch.Tensor | None] = [None]

        def put(states: torch.Tensor) -> None:
            current[0] = states

        def give(length: int | None, *args: Any, **kwargs: Any) -> Any:
            return as_output(current[0], length)

        with self._forwards(range(block), give):
            yield put

    @contextmanager
    def _forwards(self, which: range, forward: Callable[..., Any]) -> Iterator[None]:
        """Puts a forward in the place of some blocks' own; it is told the number of the block's outputs."""
        _, lengths = self._adapted.switch.found
        with ExitStack() as stack:
            for adapter in self._adapted.bottlenecks[which.start : which.stop]:
                stack.enter_context(adapter.paused())
            for number in which:
                module = self._blocks[number]
                before = put_forward(module, partial(forward, lengths[number]))
                stack.callback(put_forward, module, before)
            yield

    def _head_is_below(self) -> bool:
        shape = self._adapted.shape
        names = {s.name for s in shape.head} | {s.name for s in shape.parameters if s.stratum == HEAD}
        head = [p for n, p in self._adapted.model.named_parameters() if n in names]
        found: list[Any] = []
        handle = self._blocks[-1].register_forward_hook(lambda module, args, output: found.append(output))
        try:
            for parameter in head:
                parameter.requires_grad_(True)
            with torch.enable_grad():
                self._adapted.logits(_sample(self._adapted, self._longest))
        finally:
            handle.remove()
            for parameter in head:
                parameter.requires_grad_(False)
        states = found[0] if isinstance(found[0], torch.Tensor) else found[0][0]
        return bool(states.requires_grad)

    @property
    def _longest(self) -> int:
        return min(3, self._adapted.shape.max_positions or 3)

    def _difference(self) -> str | None:
        """What goes wrong with two inputs of different lengths, cut in the middle of the model."""
        block, longest = max(1, len(self._blocks) // 2), self._longest
        if longest < 2:
            return "its inputs have one token"
        whole, short = _sample(self._adapted, longest), _sample(self._adapted, longest, 1)
        states = self.states(whole, block)
        self.size = (states.shape[1], states.shape[2]) if states.dim() == 3 else (0, 0)
        padded = _padded(whole, short, self._adapted.pad_id)
        together = self.states(padded, block)
        if states.dim() != 3 or ("input_ids" in whole and states.shape[:2] != whole["input_ids"].shape):
            return "its hidden states do not stand in rows of tokens"
        if not torch.equal(states, self.states(whole, block)):
            return "its hidden states are random"
        alone = self.states(short, block)
        if not _is_close(together[1:, : alone.shape[1]], alone):
            return "padding changes the states of other tokens"
        rows = torch.zeros_like(together)
        rows[0], rows[1, : alone.shape[1]] = states[0], alone[0]
        with torch.no_grad(), self.replay(block) as put:
            put(rows)
            resumed = self._adapted.logits(padded)
        with torch.no_grad():
            plain = self._adapted.logits(padded)
        return None if _is_close(resumed, plain) else "a pass from its hidden states gives other scores"


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).abs().max() <= TOLERANCE * other.abs().max())


def _sample(adapted: AdaptedModel, num_tokens: int, cut: int = 0) -> dict[str, torch.Tensor]:
    """One input: so many tokens, less a few at the end; or a picture, another one with `cut`."""
    config: Any = adapted.model.config
    if adapted.loaded.is_image_model:
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        values = torch.linspace(-1, 1, config.num_channels * height * width).reshape(1, -1, height, width)
        return {"pixel_values": -values if cut else values}
    tokens = [i for i in range(num_tokens + 1) if i != adapted.pad_id][: num_tokens - cut]
    ids = torch.tensor([tokens[::-1] if cut else tokens])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _padded(long: dict[str, torch.Tensor], short: dict[str, torch.Tensor], pad_id: int) -> dict[str, torch.Tensor]:
    """A batch of two."""
    if "pixel_values" in long:
        return {"pixel_values": torch.cat([long["pixel_values"], short["pixel_values"]])}
    missing = long["input_ids"].shape[1] - short["input_ids"].shape[1]
    fill = {"input_ids": pad_id, "attention_mask": 0}
    return {n: torch.cat([long[n], torch.nn.functional.pad(short[n], (0, missing), value=fill[n])]) for n in long}
