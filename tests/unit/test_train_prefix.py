"""States below the lowest trained block, computed once: equal to the plain loop, and the same bits whoever asks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import nn

from fedstrata.core.merges import BaseLog, Merge
from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, NamedTensors, Stratum
from fedstrata.message import Task
from fedstrata.train.batches import collate
from fedstrata.train.config import AdapterConfig, ModelConfig
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model
from fedstrata.train.prefix import PrefixCache, PrefixStates, compute_states
from fedstrata.train.resume import Resume
from fedstrata.train.trainer import TorchTrainer

NUM_BLOCKS = 4
SMALL: dict[str, Any] = {"vocab_size": 300, "initializer_range": 0.1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: tf.BertConfig(
        hidden_size=32, num_hidden_layers=NUM_BLOCKS, num_attention_heads=4, intermediate_size=48, **SMALL
    ),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=32, n_layer=NUM_BLOCKS, n_head=4, n_inner=48, bos_token_id=1, eos_token_id=2, **SMALL
    ),
    "llama": lambda: tf.LlamaConfig(
        hidden_size=32, num_hidden_layers=NUM_BLOCKS, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, **SMALL,
    ),
    "vit": lambda: tf.ViTConfig(
        hidden_size=32, num_hidden_layers=NUM_BLOCKS, num_attention_heads=4, intermediate_size=48,
        image_size=12, patch_size=4, initializer_range=0.1,
    ),
}  # fmt: skip
ARCHITECTURES = sorted(CONFIGS)
ALL: dict[Stratum, int] = {0: 2, 1: 4, 2: 3, 3: 1, HEAD: 1}
NUM_EXAMPLES = 23
TRAIN = {"local_epochs": 3, "batch_size": 4, "learning_rate": 0.01}


@dataclass
class Examples:
    input_ids: list[np.ndarray] | None
    labels: np.ndarray
    token_type_ids: list[np.ndarray] | None = None
    pixel_values: np.ndarray | None = None


def make_examples(architecture: str, seed: int = 0) -> Examples:
    rng = np.random.default_rng(seed)
    labels = np.arange(NUM_EXAMPLES) % 3
    if architecture == "vit":
        pixels = rng.normal(0, 1, (NUM_EXAMPLES, 3, 12, 12)).astype(np.float32)
        return Examples(None, labels, pixel_values=pixels)
    ids = [rng.integers(3, 300, rng.integers(2, 12)).astype(np.int32) for _ in range(NUM_EXAMPLES)]
    types = [(np.arange(len(i)) > len(i) // 2).astype(np.int32) for i in ids] if architecture == "bert" else None
    return Examples(ids, labels, types)


class World:
    """One trainer over one model, and tasks for it."""

    def __init__(self, folder: Path, architecture: str = "bert", memory: int = 1 << 29, **adapter: Any) -> None:
        CONFIGS[architecture]().to_json_file(folder / f"{architecture}.json")
        kind = adapter.get("kind", "lora")
        given = {} if kind == "full" else {"max_rank": 4, "targets": "all-linear"}
        config = AdapterConfig(**(given | adapter))
        source = ModelConfig(source=f"config:{architecture}.json")
        loaded = load_model(source, config, label_names=["a", "b", "c"], seed=0, base_dir=folder)
        self.adapted = AdaptedModel(loaded, config)
        ranks: dict[Stratum, int] = ALL if kind != "full" else {EMBEDDINGS: 1, **dict.fromkeys(ALL, 1)}
        self.layout = global_layout(self.adapted.shape, kind, ranks)
        self.trainer = TorchTrainer(
            self.adapted,
            self.layout,
            dict.fromkeys(self.layout.targets, 1.5),
            make_examples(architecture),
            train_indices={c: np.arange(i, NUM_EXAMPLES, 2) for i, c in enumerate(("even", "odd"))},
            validation_indices={},
            splits={},
            seed=0,
            threads=1,
            eval_batch_size=8,
            reuse_memory_bytes=memory,
        )

    def tensors(self, seed: int = 0) -> NamedTensors:
        rng = np.random.default_rng(seed)
        first = self.trainer.initial(self.layout)
        if self.adapted.adapter.kind == "full":
            return first
        return {n: (v + rng.normal(0, 0.1, v.shape)).astype(np.float32) for n, v in first.items()}

    def train(
        self,
        trained: dict[Stratum, int],
        reuse: Any = "always",
        *,
        client: str = "even",
        tensors: NamedTensors | None = None,
        **changes: Any,
    ) -> Any:
        """Trains some strata, all others present; the work's tensors are the trained ones."""
        reads = {s: 1 if isinstance(s, str) else ALL[s] for s in self.layout.strata if s not in trained}
        if self.adapted.adapter.kind == "full":
            reads = dict.fromkeys(reads, 1)
        task = Task(
            "train",
            client,
            3,
            seed=7,
            ranks={str(s): r for s, r in trained.items()},
            reads={str(s): r for s, r in reads.items()},
            learning_rate=0.01,
            train=dict(TRAIN),
            objective={"id": "task_loss"},
            reuse=reuse,
        )
        task = replace(task, **changes)
        layouts = task.layouts(self.layout)
        whole = tensors or self.tensors()
        start = {s.name: np.ascontiguousarray(whole[s.name][tuple(map(slice, s.shape))]) for s in layouts.present}
        return self.trainer.train(task, layouts, start)

    @contextmanager
    def counting(self, block: int = 0) -> Iterator[list[bool]]:
        """Notes every real forward pass of a block: whether its output belonged to a graph."""
        seen: list[bool] = []
        part = next(m for m in self.adapted.blocks.modules[block].modules() if isinstance(m, nn.Linear))
        handle = part.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
        try:
            yield seen
        finally:
            handle.remove()


def bits(work: Any) -> str:
    digest = hashlib.sha256(repr((work.loss, work.numbers, work.num_steps)).encode())
    for name, tensor in work.tensors.items():
        digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()


def assert_close(one: Any, other: Any) -> None:
    assert one.loss == pytest.approx(other.loss, abs=1e-5)
    for name, tensor in one.tensors.items():
        np.testing.assert_allclose(tensor, other.tensors[name], rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("trained", [{3: 1, HEAD: 1}, {2: 3, 3: 1, HEAD: 1}, {1: 2, 3: 1}, {HEAD: 1}], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_reuse_trains_as_the_plain_loop_does(tmp_path: Path, architecture: str, trained: dict[Stratum, int]) -> None:
    world = World(tmp_path, architecture)
    plain, reused = world.train(trained, "off"), world.train(trained)
    assert "reused_below" not in plain.numbers
    assert reused.numbers["reused_below"] == min((s for s in trained if isinstance(s, int)), default=NUM_BLOCKS)
    assert reused.warnings == ()
    assert reused.num_steps == plain.num_steps == 9
    assert any(not np.array_equal(plain.tensors[n], world.tensors()[n]) for n in plain.tensors)
    assert_close(reused, plain)


@pytest.mark.parametrize("kind", ["full", "square", "bottleneck"])
def test_reuse_trains_as_the_plain_loop_does_whatever_the_adapter(tmp_path: Path, kind: str) -> None:
    more = {} if kind == "full" else {"max_rank": 4}
    world = World(tmp_path, "bert", kind=kind, **more)
    trained: dict[Stratum, int] = {2: 1, 3: 1, HEAD: 1}
    plain, reused = world.train(trained, "off"), world.train(trained)
    assert reused.numbers["reused_below"] == 2
    assert_close(reused, plain)
    assert bits(world.train(trained)) == bits(reused)  # a hit


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_below_run_once_per_chunk_and_never_in_a_graph(tmp_path: Path, architecture: str) -> None:
    world = World(tmp_path, architecture)
    world.train({3: 1, HEAD: 1})  # the model was looked at
    with world.counting(0) as plain:
        world.train({2: 3, HEAD: 1}, "off")
    with world.counting(1) as below, world.counting(2) as lowest:
        world.train({2: 3, HEAD: 1})
    chunks = -(-12 // TRAIN["batch_size"])
    assert (plain, below) == ([False] * 9, [False] * chunks)
    assert len(lowest) == 9


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_states_of_a_row_do_not_depend_on_its_batch(tmp_path: Path, architecture: str) -> None:
    world = World(tmp_path, architecture)
    resume, examples = Resume(world.adapted), make_examples(architecture)
    assert resume.problem is None
    args = {"block": 2, "chunk_size": 4, "pad_id": world.adapted.pad_id}
    states = compute_states(resume, examples, np.arange(NUM_EXAMPLES), **args)
    shuffled = compute_states(resume, examples, np.random.default_rng(0).permutation(NUM_EXAMPLES), **args)
    assert torch.equal(states.values, shuffled.values)
    assert not states.values.requires_grad
    chosen = np.array([7, 2, 19])
    batch = collate(examples, chosen, world.adapted.pad_id)
    batch.pop("labels")
    plain, found = resume.states(batch, 2), states.batch(chosen)
    assert found.shape == plain.shape
    for row, index in enumerate(chosen):
        length = plain.shape[1] if examples.input_ids is None else len(examples.input_ids[index])
        torch.testing.assert_close(found[row, :length], plain[row, :length], rtol=1e-5, atol=1e-5)
        assert not found[row, length:].any()


def test_a_model_is_left_as_it_was(tmp_path: Path) -> None:
    world = World(tmp_path)
    before = bits(world.train({2: 3, HEAD: 1}, "off"))
    world.train({2: 3, HEAD: 1})
    assert not any("forward" in m.__dict__ for m in world.adapted.blocks.modules)
    assert bits(world.train({2: 3, HEAD: 1}, "off")) == before


def test_dropout_draws_the_same_numbers_with_and_without_reuse(tmp_path: Path) -> None:
    world = World(tmp_path, "bert", dropout=0.3)
    plain, reused = world.train({2: 3, HEAD: 1}, "off"), world.train({2: 3, HEAD: 1})
    assert_close(reused, plain)
    assert bits(world.train({2: 3, HEAD: 1})) == bits(reused)
    other = World(tmp_path, "bert").train({2: 3, HEAD: 1})
    assert abs(other.loss - reused.loss) > 1e-4


def test_found_computed_anew_or_evicted_states_give_the_same_bits(tmp_path: Path) -> None:
    plan: dict[Stratum, int] = {2: 3, HEAD: 1}
    world = World(tmp_path)
    first = world.train(plan)
    with world.counting(0) as runs:
        hit = world.train(plan)
        assert runs == []
        world.train(plan, client="odd")
        assert world.trainer.reuse.cache.clients == ("even", "odd")
        world.trainer.reuse.cache.clear()
        miss = world.train(plan)
    assert len(runs) == 6
    resumed = World(tmp_path).train(plan)  # a process that knows nothing
    room = world.trainer.reuse.num_bytes(np.arange(0, NUM_EXAMPLES, 2)) + 1
    small = World(tmp_path, memory=room)
    evicted = [small.train(plan, client=c) for c in ("even", "odd", "even")]
    assert small.trainer.reuse.cache.clients == ("even",)
    assert len({bits(w) for w in (first, hit, miss, resumed, evicted[0], evicted[2])}) == 1


def test_kept_states_stay_within_their_memory_and_the_oldest_go_first(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.trainer.reuse.problem(2, np.arange(4)) is None
    examples, cache = make_examples("bert"), PrefixCache(0)
    clients = {f"c{i}": np.arange(i, i + 5) for i in range(12)}
    sizes = {c: world.trainer.reuse.num_bytes(i) for c, i in clients.items()}
    cache = PrefixCache(3 * max(sizes.values()))
    peak: list[int] = []

    def compute(indices: np.ndarray) -> PrefixStates:
        peak.append(cache.num_bytes)  # room was made before
        return compute_states(world.trainer.reuse.resume, examples, indices, block=2, chunk_size=4, pad_id=0)

    for client, indices in clients.items():
        states = cache.get(client, "key", sizes[client], lambda indices=indices: compute(indices))  # type: ignore[misc]
        assert states.num_bytes == sizes[client]
        assert peak[-1] + sizes[client] <= cache.limit_bytes
        assert cache.num_bytes <= cache.limit_bytes
    assert cache.clients[-1] == "c11"
    assert "c0" not in cache.clients
    kept = cache.clients[0]
    cache.get(kept, "key", sizes[kept], lambda: pytest.fail("it is kept"))
    assert cache.clients[-1] == kept
    cache.get(kept, "another key", sizes[kept], lambda: compute(clients[kept]))
    assert cache.clients.count(kept) == 1


def changed(tensors: NamedTensors, name: str) -> NamedTensors:
    return {n: v + np.float32(0.01) if n == name else v for n, v in tensors.items()}


def test_whatever_is_below_the_block_makes_another_key_and_nothing_else_does(tmp_path: Path) -> None:
    world = World(tmp_path)
    tensors, plan = world.tensors(), {2: 3, HEAD: 1}
    names = {s.stratum: s.name for s in world.layout}
    world.train(plan)

    def runs_below(plan: dict[Stratum, int] = plan, **changes: Any) -> int:
        """How often the lowest block ran: 0 where the states were kept."""
        with world.counting(0) as runs:
            world.train(plan, **changes)
        return len(runs)

    assert runs_below() == 0
    assert runs_below(tensors=changed(tensors, names[2])) == 0
    assert runs_below(tensors=changed(tensors, names[3])) == 0
    assert runs_below(tensors=changed(tensors, names[HEAD])) == 0
    assert runs_below(learning_rate=0.5, server_round=9) == 0
    for block in (0, 1):
        assert runs_below(tensors=changed(tensors, names[block])) > 0
    assert runs_below() > 0  # back to the first values
    assert runs_below(reads={"1": 4, "3": 1}) > 0  # one adapter fewer
    assert runs_below(reads={"0": 1, "1": 4, "3": 1}) > 0  # another rank
    assert runs_below(reads={"0": 1, "1": 4}) == 0  # what is above the block does not count
    assert runs_below(train={**TRAIN, "batch_size": 5}) > 0
    assert runs_below(threads=2) > 0
    assert runs_below(scaling_power=1.0, reads={"0": 1, "1": 4, "3": 1}) > 0
    assert runs_below({3: 1, HEAD: 1}) > 0
    assert runs_below({1: 3, HEAD: 1}) > 0


def test_a_base_that_moves_below_makes_another_key_and_one_that_moves_above_does_not(tmp_path: Path) -> None:
    world = World(tmp_path)
    targets = {t.block: t for t in world.adapted.shape.targets}
    plan: dict[Stratum, int] = {2: 3, HEAD: 1}
    first = world.train(plan)

    def merged(block: int, number: int) -> tuple[Any, int]:
        target = targets[block]
        rng = np.random.default_rng(block)
        b, a = (rng.normal(0, 0.1, s).astype(np.float32) for s in ((target.out_features, 2), (2, target.in_features)))
        world.trainer.stand_at(BaseLog(number, merges=(Merge(number, {target.name: (b, a)}),)))
        with world.counting(0) as runs:
            work = world.train(plan)
        return work, len(runs)

    above, above_runs = merged(3, 1)
    below, below_runs = merged(1, 2)
    assert (above_runs, below_runs) == (0, 3)
    assert_close(below, world.train(plan, "off"))
    world.trainer.stand_at(BaseLog())
    assert len({bits(w) for w in (first, above, below)}) == 3
    assert bits(world.train(plan)) == bits(first)


@pytest.mark.parametrize(
    ("options", "trained", "changes", "reason"),
    [
        ({"kind": "full"}, {EMBEDDINGS: 1, 3: 1, HEAD: 1}, {}, "nothing below its trained blocks is frozen"),
        ({}, {0: 2, 3: 1}, {}, "nothing below its trained blocks is frozen"),
        ({}, {2: 3, HEAD: 1}, {"skip_blocks": True}, "blocks that are not trained are left out"),
        ({"memory": 1000}, {2: 3, HEAD: 1}, {}, "of compute.reuse_memory_bytes = 1000"),
    ],
)
def test_where_states_cannot_be_kept_the_plain_loop_runs_and_says_so_if_asked(
    tmp_path: Path, options: dict[str, Any], trained: dict[Stratum, int], changes: dict[str, Any], reason: str
) -> None:
    world = World(tmp_path, **options)
    plain, auto, always = (world.train(trained, reuse, **changes) for reuse in ("off", "auto", "always"))
    assert auto.numbers["reused_below"] == always.numbers["reused_below"] == 0.0
    assert auto.warnings == ()
    assert len(always.warnings) == 1
    assert reason in always.warnings[0]
    for name, tensor in plain.tensors.items():
        assert np.array_equal(tensor, always.tensors[name])
        assert np.array_equal(tensor, auto.tensors[name])
    assert world.trainer.reuse.cache.clients == ()


class Mixing(nn.Module):
    """A convolution over tokens: padding reaches its neighbours."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + 0.5 * states.roll(-1, dims=1)


def test_a_model_whose_padding_reaches_other_tokens_is_not_split(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.adapted.model.bert.embeddings.LayerNorm = Mixing()
    assert Resume(world.adapted).problem == "padding changes the states of other tokens"


def test_a_model_with_random_states_is_not_split(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.adapted.model.bert.embeddings.LayerNorm.register_forward_hook(lambda m, a, o: o + torch.rand_like(o))
    before = torch.random.get_rng_state()
    assert Resume(world.adapted).problem is not None
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_model_with_a_part_of_its_head_below_is_not_split(tmp_path: Path) -> None:
    folder = tmp_path / "lacking"
    model = tf.AutoModel.from_config(CONFIGS["bert"]())
    state = {n: v for n, v in model.state_dict().items() if n != "embeddings.token_type_embeddings.weight"}
    model.save_pretrained(folder, state_dict=state)
    config = AdapterConfig(max_rank=4)
    loaded = load_model(ModelConfig(source=str(folder)), config, label_names=["a", "b"], seed=0, base_dir=tmp_path)
    assert "bert.embeddings.token_type_embeddings.weight" in loaded.missing
    assert Resume(AdaptedModel(loaded, config)).problem == "a part of its head stands before its blocks"
