"""One client's training in one round."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from fedstrata.core.rng import derive_seed
from fedstrata.errors import ClientError
from fedstrata.objective.base import Objective
from fedstrata.train.batches import Examples, collate, lengths_of, training_batches
from fedstrata.train.config import TrainConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.prefix import Prefix
from fedstrata.train.threads import torch_threads

DEFAULT_STEPS = 5
BETAS = (0.9, 0.999)
EPSILON = 1e-8


@dataclass(frozen=True)
class LocalResult:
    """What one client's training did.

    Attributes:
        num_examples: Distinct examples of the client, whether or not a step reached them.
        num_steps: Optimizer steps.
        num_tokens: Token positions that went through the model, padding included; 0 for pictures.
        mean_loss: Mean over the steps of what was minimized (task loss and penalty); 0.0 without a step.
        last_loss: Of the last step; 0.0 without one.
        train_s: Seconds in the step loop, batches included.
    """

    num_examples: int
    num_steps: int
    num_tokens: int
    mean_loss: float
    last_loss: float
    train_s: float


def count_steps(config: TrainConfig, num_examples: int) -> int:
    """Optimizer steps of a round: `local_steps`, or `local_epochs` passes with the last short batch kept."""
    if config.local_epochs is not None:
        return config.local_epochs * -(-num_examples // config.batch_size)
    return DEFAULT_STEPS if config.local_steps is None else config.local_steps


def train_locally(
    adapted: AdaptedModel,
    examples: Examples,
    indices: np.ndarray,
    *,
    config: TrainConfig,
    learning_rate: float,
    objective: Objective,
    start: Mapping[str, np.ndarray],
    seed_path: tuple[int, int, str],
    threads: int = 1,
    prefix: Prefix | None = None,
) -> LocalResult:
    """Trains what `adapted.set_client` made trainable.

    AdamW(0.9, 0.999, 1e-8) at a constant rate; the gradient of all trained tensors together is clipped to
    `config.clip_norm`. Optimizer, data order and dropout are new in every call and follow from `seed_path`.

    Args:
        adapted: The client's model; read the result with `adapted.read`.
        examples: All encoded examples.
        indices: The client's own, `[n]`.
        config: Steps, batch size, clipping, weight decay.
        learning_rate: Of this round.
        objective: A penalty on top of the task's loss; skipped if plain.
        start: Values at the start of the round, at least of everything trained.
        seed_path: Seed, server round and client.
        threads: Torch threads while training.
        prefix: The states of all of `indices` that enter the lowest trained block; None computes them in every step.
            Both differ by rounding only.

    Raises:
        ClientError: If the client has no examples or the loss is not finite.
    """
    seed, server_round, client = seed_path
    indices = np.asarray(indices, np.int64)
    if len(indices) == 0:
        raise ClientError(f"Client {client} has no training examples", where=f"round {server_round}")
    num_steps = count_steps(config, len(indices))
    parameters = adapted.trained_parameters()
    if num_steps == 0 or not parameters:
        return LocalResult(len(indices), 0, 0, 0.0, 0.0, 0.0)
    tensors = list(parameters.values())
    penalized = not objective.is_plain
    anchors = {n: torch.from_numpy(np.array(start[n], np.float32)) for n in parameters} if penalized else {}
    losses = torch.empty(num_steps)
    num_tokens = 0
    began = time.perf_counter()
    with torch_threads(threads), torch.random.fork_rng(devices=[]), adapted.dropout(), _replay(prefix) as put:
        torch.manual_seed(derive_seed(seed, "dropout", server_round, client) % 2**63)
        optimizer = torch.optim.AdamW(
            tensors, lr=learning_rate, betas=BETAS, eps=EPSILON, weight_decay=config.weight_decay, fused=True
        )
        order = training_batches(indices, lengths_of(examples, indices), config.batch_size, seed_path)
        for step, chosen in zip(range(num_steps), order, strict=False):
            batch = collate(examples, chosen, adapted.pad_id)
            labels = batch.pop("labels")
            put(chosen)
            loss = functional.cross_entropy(adapted.logits(batch), labels)
            if penalized:
                loss = loss + objective.penalty(parameters, anchors)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            if config.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(tensors, config.clip_norm)
            optimizer.step()
            losses[step] = loss.detach()
            num_tokens += batch["input_ids"].numel() if "input_ids" in batch else 0
    train_s = time.perf_counter() - began
    for tensor in tensors:
        tensor.grad = None
    _check_finite(losses, client, server_round)
    return LocalResult(
        num_examples=len(indices),
        num_steps=num_steps,
        num_tokens=num_tokens,
        mean_loss=float(losses.double().mean()),
        last_loss=float(losses[-1]),
        train_s=train_s,
    )


@contextmanager
def _replay(prefix: Prefix | None) -> Iterator[Callable[[np.ndarray], None]]:
    if prefix is None:
        yield lambda chosen: None
    else:
        with prefix.replay() as put:
            yield put


def _check_finite(losses: torch.Tensor, client: str, server_round: int) -> None:
    bad = torch.nonzero(~torch.isfinite(losses))
    if len(bad):
        step = int(bad[0, 0])
        raise ClientError(
            f"The loss of client {client} is not finite",
            where=f"round {server_round}, step {step + 1} of {len(losses)}",
            got=str(float(losses[step])),
            do="lower train.learning_rate, or look at this client's data",
        )
