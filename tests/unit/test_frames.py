"""Frozen orthonormal factors, the layouts and first values of the newer adapters."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.core.frames import Frames, drawn_frames, frames_from_gradients
from fedstrata.core.lora import LoraTerm, client_scalings, init_lora
from fedstrata.core.rng import generator
from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import HEAD, Layout, TensorSpec, slice_tensors
from fedstrata.errors import AggregationError, ModelError, PayloadError, PlanError

HIDDEN = 6


def make_shape(num_blocks: int = 3, path: str = "bert.encoder.layer", hidden_size: int = HIDDEN) -> ModelShape:
    targets = [
        TargetShape(f"{path}.{b}.{name}", b, HIDDEN, n_out)
        for b in range(num_blocks)
        for name, n_out in (("attention.query", 4), ("attention.value", 9))
    ]
    inside = [TensorSpec(f"{t.name}.weight", (t.out_features, t.in_features), t.block) for t in targets]
    inside += [TensorSpec(f"{path}.{b}.norm.weight", (HIDDEN,), b) for b in range(num_blocks)]
    head = TensorSpec("classifier.weight", (3, HIDDEN), HEAD)
    return ModelShape("Tiny", num_blocks, hidden_size, None, tuple(targets), (head,), (*inside, head), 0)


def layout_as_text(layout: Layout) -> list[str]:
    return [f"{s.name} {list(s.shape)} {s.stratum} {s.kind}" for s in layout]


# Layouts


def test_square_layouts_hold_one_r_per_target_and_the_head() -> None:
    found = layout_as_text(global_layout(make_shape(), "square", {0: 2, 2: 3, HEAD: 1}))
    assert found == [
        "bert.encoder.layer.0.attention.query.lora_R [2, 2] 0 lora_R",
        "bert.encoder.layer.0.attention.value.lora_R [2, 2] 0 lora_R",
        "bert.encoder.layer.2.attention.query.lora_R [3, 3] 2 lora_R",
        "bert.encoder.layer.2.attention.value.lora_R [3, 3] 2 lora_R",
        "classifier.weight [3, 6] head weight",
    ]


def test_bottleneck_layouts_hold_three_tensors_per_block_and_the_head() -> None:
    layout = global_layout(make_shape(), "bottleneck", {1: 2, HEAD: 1})
    assert layout_as_text(layout) == [
        "bert.encoder.layer.1.adapter_down [2, 6] 1 adapter_down",
        "bert.encoder.layer.1.adapter_bias [2] 1 adapter_bias",
        "bert.encoder.layer.1.adapter_up [6, 2] 1 adapter_up",
        "classifier.weight [3, 6] head weight",
    ]
    assert layout.targets == ()


@pytest.mark.parametrize("path", ["bert.encoder.layer", "h", "model.0.blocks", "layers.1.inner"])
@pytest.mark.parametrize("num_blocks", [1, 2, 12])
def test_block_paths_follow_from_numbers_not_from_names(path: str, num_blocks: int) -> None:
    assert make_shape(num_blocks, path).block_paths == tuple(f"{path}.{b}" for b in range(num_blocks))


def test_an_unknown_width_or_a_block_without_maps_is_a_plan_error() -> None:
    with pytest.raises(PlanError, match="width of its output"):
        global_layout(make_shape(hidden_size=0), "bottleneck", {0: 1})
    shape = make_shape(2)
    bare = ModelShape("Tiny", 3, HIDDEN, None, shape.targets, shape.head, shape.parameters, 0)
    with pytest.raises(PlanError, match="Block 2 has no linear map"):
        global_layout(bare, "bottleneck", {0: 1})


# First values


def test_new_adapters_start_as_nothing_and_smaller_ones_are_their_slices() -> None:
    shape = make_shape()
    square = init_lora(7, global_layout(shape, "square", {0: 3}))
    assert all(not t.any() for t in square.values())
    large = global_layout(shape, "bottleneck", {0: 4, 2: 4})
    small = global_layout(shape, "bottleneck", {0: 3, 2: 1})
    first, cut = init_lora(7, large), init_lora(7, small)
    assert tuple(first) == large.names
    for name, tensor in first.items():
        assert tensor.any() == name.endswith("adapter_down")
    down = first["bert.encoder.layer.0.adapter_down"]
    # U(-1/sqrt(h), 1/sqrt(h)) from the stream named by the block's path
    bound = 1 / np.sqrt(HIDDEN)
    drawn = generator(7, "lora_init", "bert.encoder.layer.0").uniform(-bound, bound, (4, HIDDEN))
    assert np.array_equal(down, drawn.astype(np.float32))
    sliced = slice_tensors(first, small)
    assert all(np.array_equal(cut[n], sliced[n]) for n in small.names)


def test_bottlenecks_have_no_scaling_and_r_has_one() -> None:
    shape = make_shape(1)
    assert client_scalings({}, *(global_layout(shape, "bottleneck", {0: r}) for r in (4, 2)), 1.0) == {}
    target = shape.targets[0].name
    whole, mine = (global_layout(shape, "square", {0: r}) for r in (4, 2))
    # s_k = s (r / r_k)^p = 3 · (4 / 2)
    assert client_scalings(dict.fromkeys(whole.targets, 3.0), whole, mine, 1.0)[target] == 6.0


# Frames


def test_drawn_frames_are_orthonormal_named_and_leading_slices_of_each_other() -> None:
    shape = make_shape()
    frames = drawn_frames(3, shape.targets, {0: 4, 1: 2})
    assert list(frames.factors) == [t.name for t in shape.targets if t.block < 2]
    assert [frames.rank(t.name) for t in shape.targets] == [4, 4, 2, 2, 0, 0]
    frames.check(shape.targets)
    smaller, other = drawn_frames(3, shape.targets, {0: 2}), drawn_frames(4, shape.targets, {0: 2})
    for target in (t.name for t in shape.targets if t.block == 0):
        left, right = frames.of(target, 4)
        assert np.allclose(left.T @ left, np.eye(4), atol=1e-6)
        assert np.allclose(right @ right.T, np.eye(4), atol=1e-6)
        assert left.dtype == right.dtype == np.float32
        for mine, whole in zip(smaller.of(target, 2), frames.of(target, 2), strict=True):
            assert np.allclose(mine, whole, atol=1e-6)
        assert not np.allclose(other.of(target, 2)[0], frames.of(target, 2)[0], atol=0.1)


def test_drawn_frames_keep_the_sign_of_the_first_direction_that_was_drawn() -> None:
    # Gram-Schmidt with positive coefficients: the first direction is the drawn one, normalized
    target = make_shape().targets[1]
    drawn = generator(5, "frame", target.name).standard_normal((2, target.in_features + target.out_features))
    left, right = drawn_frames(5, [target], {0: 2}).of(target.name, 1)
    a, b = drawn[0, : target.in_features], drawn[0, target.in_features :]
    assert np.allclose(right[0], a / np.linalg.norm(a), atol=1e-6)
    assert np.allclose(left[:, 0], b / np.linalg.norm(b), atol=1e-6)


def test_the_norm_of_r_is_the_norm_of_the_update() -> None:
    target = make_shape().targets[1]
    left, right = drawn_frames(0, [target], {0: 3}).of(target.name, 3)
    square = np.random.default_rng(0).normal(size=(3, 3))
    assert np.linalg.norm(left @ square @ right) == pytest.approx(np.linalg.norm(square), rel=1e-6)


def test_frames_follow_the_mean_gradient() -> None:
    rng = np.random.default_rng(1)
    n_out, n_in, rank = 9, 6, 2
    shares, pairs = (0.25, 0.75), [(rng.normal(size=(n_out, 3)), rng.normal(size=(3, n_in))) for _ in range(2)]
    terms = [LoraTerm(a, b, weight=q) for q, (b, a) in zip(shares, pairs, strict=True)]
    mean = sum(q * b @ a for q, (b, a) in zip(shares, pairs, strict=True))
    left, right = frames_from_gradients({"t": terms}, {"t": rank}).of("t", rank)
    # the best approximation of rank 2 of G is B Bᵀ G Aᵀ A with B = U_2, A = V_2ᵀ
    u, s, vt = np.linalg.svd(mean)
    best = (u[:, :rank] * s[:rank]) @ vt[:rank]
    assert np.allclose(left @ left.T @ mean @ right.T @ right, best, atol=1e-5)
    assert np.allclose(left.T @ mean @ right.T, np.diag(s[:rank]), atol=1e-5)


def test_a_gradient_of_few_directions_is_completed() -> None:
    rng = np.random.default_rng(2)
    term = LoraTerm(rng.normal(size=(1, 6)), rng.normal(size=(9, 1)))
    zero = LoraTerm(np.zeros((1, 6)), np.zeros((9, 1)))
    frames = frames_from_gradients({"t": [term], "u": [zero]}, {"t": 6, "u": 3})
    frames.check([TargetShape("t", 0, 6, 9), TargetShape("u", 0, 6, 9)])
    first = frames.of("t", 1)[1][0]
    assert abs(first @ term.lora_A[0]) == pytest.approx(np.linalg.norm(term.lora_A), rel=1e-5)


def test_frames_survive_as_tensors() -> None:
    frames = drawn_frames(1, make_shape().targets, {0: 2, 2: 1})
    named = frames.to_tensors()
    back = Frames.from_tensors(named)
    assert all(
        np.array_equal(x, y) for t in frames.factors for x, y in zip(frames.of(t, 1), back.of(t, 1), strict=True)
    )
    assert {n: v.shape for n, v in back.to_tensors().items()} == {n: v.shape for n, v in named.items()}
    named.pop(next(iter(named)))
    with pytest.raises(PayloadError, match="not complete"):
        Frames.from_tensors(named)


def test_impossible_frames_are_refused() -> None:
    target = TargetShape("t", 0, 6, 9)
    frames = drawn_frames(0, [target], {0: 2})
    with pytest.raises(PlanError, match="of rank 7"):
        drawn_frames(0, [target], {0: 7})
    with pytest.raises(PlanError, match="of rank 3"):
        frames.of("t", 3)
    with pytest.raises(AggregationError, match="No client sent"):
        frames_from_gradients({}, {"t": 2})
    with pytest.raises(AggregationError, match="of rank 7"):
        frames_from_gradients({"t": [LoraTerm(np.ones((1, 6)), np.ones((9, 1)))]}, {"t": 7})
    with pytest.raises(ModelError, match="no map"):
        frames.check([TargetShape("other", 0, 6, 9)])
    left, right = frames.of("t", 2)
    for wrong in ((left * 1.01, right), (left, right * np.nan), (left[:, :1], right), (left.astype(float), right)):
        with pytest.raises(PayloadError, match="do not fit"):
            Frames({"t": wrong}).check([target])
