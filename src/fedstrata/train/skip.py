"""Leaves blocks out of a model's forward pass without touching a module: they become identities."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, final

import torch
from torch import nn

from fedstrata.errors import PlanError
from fedstrata.train.strata import Blocks, find_blocks


@dataclass(frozen=True, eq=False)
class _Call:
    """One block's part in a forward pass: the states that came in, and all that went out."""

    block: int
    states: torch.Tensor | None
    output: Any

    @property
    def result(self) -> torch.Tensor | None:
        """The states that went out; None where the output holds none."""
        first = self.output[0] if isinstance(self.output, tuple | list) and self.output else self.output
        return first if isinstance(first, torch.Tensor) else None


@final
class BlockSwitch:
    """Turns blocks off and on again. A block that is off hands its hidden states on, in its usual kind of output.

    The first time that a block is turned off the model is looked at, as `can_skip_blocks` does.

    Args:
        model: The model.
        blocks: Its blocks.
    """

    def __init__(self, model: nn.Module, blocks: Blocks) -> None:
        self._model, self._blocks = model, blocks
        self._off: dict[int, Any] = {}  # a forward of the block's own that stood on the instance, or None

    @property
    def is_any_off(self) -> bool:
        """Whether a block is left out now."""
        return bool(self._off)

    @cached_property
    def found(self) -> tuple[str | None, tuple[int | None, ...]]:
        """What `can_skip_blocks` says, and per block the number of its outputs, None where it returns the states alone.

        Looked at once, with every block on.
        """
        calls = _record(self._model, self._blocks)
        return _problem(self._model, self._blocks, calls), tuple(_length(c.output) for c in calls)

    def keep(self, blocks: Collection[int] | None) -> None:
        """Leaves on exactly these blocks; None: all.

        Raises:
            PlanError: If there is no such block, or the model's blocks cannot be left out.
        """
        every = range(len(self._blocks.modules))
        unknown = sorted(set(blocks or ()) - set(every))
        if unknown:
            raise PlanError(f"There is no block {unknown[0]}", expected=f"0 to {len(every) - 1}")
        off = set() if blocks is None else set(every) - set(blocks)
        problem, lengths = self.found if off else (None, ())
        if problem:
            raise PlanError(
                f"Blocks of {type(self._model).__name__} cannot be left out",
                got=problem,
                do="use a method that keeps all blocks, e.g. fedra_freeze instead of fedra_skip",
            )
        for block in sorted(set(self._off) - off):
            put_forward(self._blocks.modules[block], self._off.pop(block))
        for block in sorted(off - set(self._off)):
            self._off[block] = put_forward(self._blocks.modules[block], partial(identity, lengths[block]))


def can_skip_blocks(model: nn.Module) -> str | None:
    """What forbids that a client trains a model of some blocks only; None if nothing does.

    Looked at in forward passes over two tokens (or one blank picture): every block is called once, in order, gives
    states of the shape that it got, the next block gets these very states, and each block computes the same bits when
    no other block runs and only the others' states are replayed, so that nothing else passes from block to block.

    Args:
        model: A transformers model with weights, all its blocks on; it is left as it was.

    Returns:
        A clause for a `PlanError`, e.g. "block 2 changes the width of its states".

    Raises:
        ModelError: If the blocks cannot be found.
    """
    blocks = find_blocks(model)
    return _problem(model, blocks, _record(model, blocks))


def _problem(model: nn.Module, blocks: Blocks, calls: list[_Call]) -> str | None:
    if [c.block for c in calls] != list(range(len(blocks.modules))):
        return "its blocks do not run once each in their order"
    for before, call in zip([None, *calls], calls, strict=False):
        states, result = call.states, call.result
        if states is None or result is None:
            return f"the hidden states of block {call.block} cannot be told from its other inputs and outputs"
        if states.shape != result.shape or states.dtype != result.dtype:
            return f"block {call.block} changes the width of its states"
        if before is not None and states is not before.result:
            return f"something happens to the states between blocks {before.block} and {call.block}"
    more = "beside the states something else passes from block to block"
    _forward(model, 1)  # what blocks remember is now that of another input; from the last one, lower ones leave nothing
    for call in reversed(calls):
        try:
            alone = _replay(model, blocks, calls, call.block)
        except Exception as error:
            # Models fail in ways of their own where a block leaves nothing behind for the next.
            return f"{more} ({type(error).__name__})"
        if alone is None or call.result is None or not torch.equal(alone, call.result):
            return f"{more}: block {call.block} needs it"
    return None


def _record(model: nn.Module, blocks: Blocks) -> list[_Call]:
    """All calls of blocks in one forward pass."""
    calls: list[_Call] = []

    def note(number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.append(_Call(number, _states(args, kwargs), output))

    with _hooks(blocks.modules, note):
        _forward(model)
    return calls


def _replay(model: nn.Module, blocks: Blocks, calls: list[_Call], live: int) -> torch.Tensor | None:
    """What one block gives while the others' states are played from a record."""
    found: list[_Call] = []

    def note(number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        found.append(_Call(number, None, output))

    before: dict[int, Any] = {}
    try:
        for call in calls:
            if call.block != live:
                forward = partial(_constant, as_output(call.result, _length(call.output)))
                before[call.block] = put_forward(blocks.modules[call.block], forward)
        with _hooks((blocks.modules[live],), note):
            _forward(model)
    finally:
        for number, own in before.items():
            put_forward(blocks.modules[number], own)
    return found[0].result if found else None


@contextmanager
def _hooks(modules: tuple[nn.Module, ...], note: Callable[..., None]) -> Iterator[None]:
    handles = [m.register_forward_hook(partial(note, i), with_kwargs=True) for i, m in enumerate(modules)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _forward(model: nn.Module, which: int = 0) -> None:
    """A forward pass over as little as the model takes; one of two inputs."""
    config: Any = getattr(model, "config", None)
    first = next(model.parameters())
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        inputs = {
            "pixel_values": torch.full((1, config.num_channels, height, width), float(which), device=first.device)
        }
    else:
        tokens = [i for i in range(3) if i != getattr(config, "pad_token_id", None)]
        ids = torch.full((1, 2), tokens[which], dtype=torch.int64, device=first.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        model(**inputs)


def _length(output: Any) -> int | None:
    return len(output) if isinstance(output, tuple | list) else None


def as_output(states: torch.Tensor | None, length: int | None) -> Any:
    """States in a block's usual kind of output."""
    return states if length is None else (states, *[None] * (length - 1))


def _states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    states = args[0] if args else kwargs.get("hidden_states")
    return states if isinstance(states, torch.Tensor) else None


def put_forward(module: nn.Module, forward: Any) -> Any:
    """Puts a forward on this very module, None: takes it off; returns the one that stood there, or None."""
    before = module.__dict__.pop("forward", None)
    if forward is not None:
        module.__dict__["forward"] = forward
    return before


def identity(length: int | None, *args: Any, **kwargs: Any) -> Any:
    """A block's forward that hands its states on."""
    return as_output(_states(args, kwargs), length)


def _constant(output: Any, *args: Any, **kwargs: Any) -> Any:
    return output
