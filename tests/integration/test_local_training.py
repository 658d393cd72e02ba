"""A client's training and scoring on real, small models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from fedstrata.core.shape import global_layout
from fedstrata.core.tensors import HEAD, NamedTensors, Stratum
from fedstrata.errors import ClientError, DataError
from fedstrata.objective.base import Objective
from fedstrata.train.batches import collate, training_batches
from fedstrata.train.config import AdapterConfig, ModelConfig, TrainConfig
from fedstrata.train.evaluate import EvalSums, evaluate
from fedstrata.train.local import LocalResult, count_steps, train_locally
from fedstrata.train.lora import AdaptedModel
from fedstrata.train.model import load_model

CONFIGS: dict[str, Any] = {
    "bert": lambda: tf.BertConfig(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, vocab_size=300
    ),
    "gpt2": lambda: tf.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_inner=48, vocab_size=300, bos_token_id=1, eos_token_id=2, pad_token_id=2
    ),
}
SEED_PATH = (7, 3, "client-a")
RANK, ALPHA = 4, 16.0
Ranks = Mapping[Stratum, int]


@dataclass
class Texts:
    input_ids: list[np.ndarray] | None
    labels: np.ndarray
    token_type_ids: list[np.ndarray] | None = None
    pixel_values: np.ndarray | None = None


@dataclass(frozen=True)
class Plain(Objective):
    id: ClassVar[str] = "plain"

    @property
    def is_plain(self) -> bool:
        return True

    def penalty(self, trained: Mapping[str, Any], start: Mapping[str, Any]) -> Any:
        raise AssertionError("a plain objective has no penalty")


@dataclass(frozen=True)
class Pull(Objective):
    """mu/2 * squared distance to the start."""

    id: ClassVar[str] = "pull"
    mu: float = 1.0

    @property
    def is_plain(self) -> bool:
        return False

    def penalty(self, trained: Mapping[str, Any], start: Mapping[str, Any]) -> Any:
        return 0.5 * self.mu * sum(((trained[n] - start[n]) ** 2).sum() for n in trained)


def make_texts(count: int = 24) -> Texts:
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 300, rng.integers(3, 12)).astype(np.int32) for _ in range(count)]
    return Texts(ids, rng.integers(0, 3, count))


TEXTS = make_texts()
INDICES = np.arange(20)


def adapt(tmp_path: Path, architecture: str = "bert", **adapter: Any) -> AdaptedModel:
    folder = tmp_path / architecture
    if not folder.exists():
        with torch.random.fork_rng():
            torch.manual_seed(0)
            tf.AutoModel.from_config(CONFIGS[architecture]()).save_pretrained(folder)
    config = AdapterConfig(**({"max_rank": RANK, "alpha": ALPHA} | adapter))
    loaded = load_model(ModelConfig(source=str(folder)), config, label_names=["a", "b", "c"], seed=0, base_dir=tmp_path)
    return AdaptedModel(loaded, config)


def first_tensors(adapted: AdaptedModel, ranks: Ranks) -> NamedTensors:
    rng = np.random.default_rng(1)
    layout = global_layout(adapted.shape, adapted.adapter.kind, ranks)
    tensors = adapted.base_tensors(layout)
    for spec in layout:
        if spec.kind == "lora_A":
            tensors[spec.name] = rng.uniform(-0.2, 0.2, spec.shape).astype(np.float32)
        if spec.kind == "lora_B":
            tensors[spec.name] = np.zeros(spec.shape, np.float32)
    return {s.name: tensors[s.name] for s in layout}


def train(
    adapted: AdaptedModel,
    present: Ranks,
    trained: Ranks,
    *,
    objective: Objective | None = None,
    rate: float = 1e-2,
    **options: Any,
) -> tuple[LocalResult, NamedTensors, NamedTensors]:
    """One client's round; what it did, its start and its end."""
    start = first_tensors(adapted, present)
    kind = adapted.adapter.kind
    layout = global_layout(adapted.shape, kind, present)
    adapted.set_client(
        start, layout, global_layout(adapted.shape, kind, trained), dict.fromkeys(layout.targets, ALPHA / RANK)
    )
    result = train_locally(
        adapted,
        TEXTS,
        INDICES,
        config=TrainConfig(**({"local_steps": 6, "batch_size": 8} | options)),
        learning_rate=rate,
        objective=objective or Plain(),
        start=start,
        seed_path=SEED_PATH,
        threads=1,
    )
    return result, start, adapted.read(layout)


EVERYTHING: Ranks = {0: RANK, 1: RANK, 2: RANK, HEAD: 1}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_clients_round_equals_a_plain_peft_loop(tmp_path: Path, architecture: str) -> None:
    adapted = adapt(tmp_path, architecture)
    result, start, end = train(adapted, EVERYTHING, EVERYTHING)

    base = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / architecture, num_labels=3)
    fused = architecture == "gpt2"
    names = ["c_attn"] if fused else ["query", "value"]
    config = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=names, fan_in_fan_out=fused, task_type="SEQ_CLS")
    plain = get_peft_model(base, config).eval()
    by_name = {peft_name(n): p for n, p in plain.named_parameters() if p.requires_grad}
    assert set(by_name) == set(start)
    with torch.no_grad():
        for name, parameter in by_name.items():
            parameter.copy_(torch.from_numpy(start[name]))
    optimizer = torch.optim.AdamW(by_name.values(), lr=1e-2, weight_decay=0.0)
    lengths = np.array([len(TEXTS.input_ids[i]) for i in INDICES])  # type: ignore[index]
    losses = []
    for chosen in islice(training_batches(INDICES, lengths, 8, SEED_PATH), 6):
        loss = plain(**collate(TEXTS, chosen, adapted.pad_id)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(by_name.values()), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    worst = max(float(np.abs(end[n] - by_name[n].detach().numpy()).max()) for n in end)
    moved = max(float(np.abs(end[n] - start[n]).max()) for n in end)
    assert worst < 1e-6 < 1e-2 < moved
    assert result.num_steps == 6
    assert result.mean_loss == pytest.approx(np.mean(losses), abs=1e-6)
    assert result.last_loss == pytest.approx(losses[-1], abs=1e-6)


def test_the_same_round_twice_is_bit_equal_whatever_torchs_random_state(tmp_path: Path) -> None:
    adapted = adapt(tmp_path, dropout=0.3)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first, _, end = train(adapted, EVERYTHING, EVERYTHING)
    assert torch.equal(state, torch.random.get_rng_state())
    torch.manual_seed(2)
    second, _, again = train(adapt(tmp_path, dropout=0.3), EVERYTHING, EVERYTHING)
    assert first.mean_loss == second.mean_loss
    assert all(np.array_equal(end[n], again[n]) for n in end)


def test_dropout_changes_training_but_not_scoring(tmp_path: Path) -> None:
    dropped, plain = adapt(tmp_path, dropout=0.5), adapt(tmp_path)
    assert train(dropped, EVERYTHING, EVERYTHING)[0].last_loss != train(plain, EVERYTHING, EVERYTHING)[0].last_loss
    for adapted in (dropped, plain):
        layout = global_layout(adapted.shape, "lora", EVERYTHING)
        adapted.set_client(
            first_tensors(adapted, EVERYTHING), layout, layout, dict.fromkeys(layout.targets, ALPHA / RANK)
        )
    assert evaluate(dropped, TEXTS, INDICES) == evaluate(plain, TEXTS, INDICES)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("trained", [{2: RANK}, {1: RANK, HEAD: 1}, {HEAD: 1}, {0: RANK, 2: RANK}])
def test_what_was_planned_changes_and_nothing_else(tmp_path: Path, kind: str, trained: Ranks) -> None:
    adapted = adapt(tmp_path, kind=kind)
    _, start, end = train(adapted, EVERYTHING, trained)
    layout = global_layout(adapted.shape, adapted.adapter.kind, EVERYTHING)
    changed = {s.stratum for s in layout if not np.array_equal(start[s.name], end[s.name])}
    assert changed == set(trained)


def test_a_penalty_pulls_the_client_back_to_its_start(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)

    def distance(objective: Objective, steps: int) -> float:
        _, start, end = train(adapted, EVERYTHING, EVERYTHING, objective=objective, local_steps=steps)
        return float(np.sqrt(sum(((end[n] - start[n]) ** 2).sum() for n in end)))

    assert distance(Pull(1.0), 1) == distance(Plain(), 1)  # its gradient mu * (w - start) is zero at the start
    assert distance(Pull(10.0), 6) < 0.9 * distance(Plain(), 6)
    assert distance(Pull(0.0), 6) == pytest.approx(distance(Plain(), 6), rel=1e-6)


def test_steps_come_from_the_steps_or_the_epochs() -> None:
    assert count_steps(TrainConfig(), 100) == 5
    assert count_steps(TrainConfig(local_steps=0), 100) == 0
    assert count_steps(TrainConfig(local_epochs=2, batch_size=16), 33) == 6  # 2 * ceil(33 / 16)
    assert count_steps(TrainConfig(local_epochs=1, batch_size=16), 3) == 1


def test_a_round_without_steps_changes_nothing(tmp_path: Path) -> None:
    result, start, end = train(adapt(tmp_path), EVERYTHING, EVERYTHING, local_steps=0)
    assert (result.num_steps, result.mean_loss, result.num_examples) == (0, 0.0, 20)
    assert all(np.array_equal(start[n], end[n]) for n in start)


def test_gradients_are_clipped_together_before_the_step(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    ends = [train(adapted, EVERYTHING, {HEAD: 1}, clip_norm=c, local_steps=2)[2] for c in (1e-9, None)]
    assert not np.array_equal(ends[0]["classifier.weight"], ends[1]["classifier.weight"])


def test_a_loss_that_is_not_finite_is_this_clients_failure(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"client-a is not finite\n  where: round 3, step [2-6] of 6"):
        train(adapt(tmp_path), EVERYTHING, EVERYTHING, rate=1e30)


def test_a_client_without_examples_is_an_error(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    with pytest.raises(ClientError, match="no training examples"):
        train_locally(
            adapted,
            TEXTS,
            np.array([], np.int64),
            config=TrainConfig(),
            learning_rate=1e-2,
            objective=Plain(),
            start={},
            seed_path=SEED_PATH,
        )


def test_scores_are_the_sums_over_single_examples(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    loss, correct = 0.0, 0
    with torch.inference_mode():
        for i in INDICES:
            batch = collate(TEXTS, np.array([i]), adapted.pad_id)
            labels = batch.pop("labels")
            logits = adapted.logits(batch)
            loss += float(functional.cross_entropy(logits, labels))
            correct += int(logits.argmax() == labels[0])
    sums = evaluate(adapted, TEXTS, INDICES, batch_size=6)
    assert (sums.num_examples, sums.num_correct) == (20, correct)
    assert sums.loss_sum == pytest.approx(loss, rel=1e-6)
    assert sums.metrics() == {"accuracy": correct / 20, "loss": sums.loss_sum / 20, "num_examples": 20}


def test_scores_do_not_depend_on_the_order_of_the_examples(tmp_path: Path) -> None:
    adapted = adapt(tmp_path)
    shuffled = np.random.default_rng(0).permutation(INDICES)
    assert evaluate(adapted, TEXTS, shuffled, batch_size=6) == evaluate(adapted, TEXTS, INDICES, batch_size=6)


def test_scoring_nothing_has_no_means() -> None:
    with pytest.raises(DataError, match="no examples"):
        EvalSums(0, 0.0, 0).metrics()


def test_threads_are_restored_after_training(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    train(adapt(tmp_path), {HEAD: 1}, {HEAD: 1})
    assert torch.get_num_threads() == before


def peft_name(name: str) -> str:
    """Our name of a parameter of a PEFT model."""
    name = name.removeprefix("base_model.model.").replace(".modules_to_save.default", "")
    return name.removesuffix(".default.weight")


@pytest.mark.engine
@pytest.mark.parametrize("threads", [1, 2])
def test_minilm_trains_bit_equally_at_equal_threads(threads: int) -> None:
    rng = np.random.default_rng(0)
    texts = Texts([rng.integers(1000, 30000, 48).astype(np.int32) for _ in range(32)], rng.integers(0, 5, 32))
    ends = []
    for _ in range(2):
        config = AdapterConfig()
        loaded = load_model(ModelConfig(), config, label_names=list("abcde"), seed=0, base_dir=Path())
        adapted = AdaptedModel(loaded, config)
        ranks: Ranks = {4: 8, 5: 8, HEAD: 1}
        start, layout = first_tensors(adapted, ranks), global_layout(adapted.shape, "lora", ranks)
        adapted.set_client(start, layout, layout, dict.fromkeys(layout.targets, 2.0))
        train_locally(
            adapted,
            texts,
            np.arange(32),
            config=TrainConfig(local_steps=3),
            learning_rate=5e-3,
            objective=Plain(),
            start=start,
            seed_path=SEED_PATH,
            threads=threads,
        )
        ends.append(adapted.read(layout))
    assert all(np.array_equal(ends[0][n], ends[1][n]) for n in ends[0])
