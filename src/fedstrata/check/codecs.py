"""The laws of codecs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedstrata.check.common import config_law, copied, first_difference, same_bits, show_values
from fedstrata.check.law import Law, LeftOut, Trial
from fedstrata.codec.base import CODECS, Codec, wire_id
from fedstrata.core.rng import generator
from fedstrata.core.tensors import HEAD, Layout, NamedTensors, Stratum, TensorSpec
from fedstrata.core.wire import REPLY, Payload, pack_frame, unpack_frame
from fedstrata.errors import PayloadError

_SHAPES: tuple[tuple[int, ...], ...] = ((1,), (3,), (2, 3), (), (0,), (5, 7), (1, 130), (33, 9), (4, 0), (64, 65))


@dataclass(frozen=True)
class _Case:
    layout: Layout
    tensors: NamedTensors


def _case(trial: Trial) -> _Case:
    """From one value to several tensors; zeros of both signs, large and small magnitudes come with the index."""
    num_tensors = 1 + min(trial.index // 4, 3)
    rng = trial.rng("tensors")
    specs, tensors = [], {}
    for i in range(num_tensors):
        shape = _SHAPES[(trial.index + 3 * i) % len(_SHAPES)]
        stratum: Stratum = HEAD if i == 3 else i
        specs.append(TensorSpec(f"t{i}", shape, stratum))
        magnitude = 2.0 ** (rng.integers(-12, 10) if trial.index else 0)
        values = np.asarray(rng.standard_normal(shape) * magnitude)
        if trial.index % 3 == 2:
            values = np.where(rng.random(shape) < 0.3, np.copysign(0.0, values), values)
        tensors[f"t{i}"] = values.astype(np.float32)
    trial.note(f"tensors: {show_values(tensors)}")
    return _Case(Layout(tuple(specs)), tensors)


def _encode(
    codec: Codec, case: _Case, trial: Trial, residual: NamedTensors | None = None
) -> tuple[Payload, NamedTensors]:
    return codec.encode(case.tensors, case.layout, residual or {}, trial.rng("encode"))


def _round_trip(codec: Codec, trial: Trial) -> None:
    case = _case(trial)
    before = copied(case.tensors)
    payload, _ = _encode(codec, case, trial)
    trial.demand(same_bits(before, case.tensors), "encode changed its input", first_difference(before, case.tensors))
    framed = unpack_frame(pack_frame(REPLY, wire_id(codec), {"client": "a"}, payload), REPLY).payload
    decoded = codec.decode(framed, case.layout)
    try:
        case.layout.check(decoded)
    except PayloadError as error:
        trial.broken("decode does not give the layout's tensors", str(error))
    if codec.lossless:
        trial.demand(same_bits(decoded, case.tensors), "it says lossless", first_difference(decoded, case.tensors))
    _check_bound(codec, case, decoded, trial)


def _check_bound(codec: Codec, case: _Case, decoded: NamedTensors, trial: Trial) -> None:
    """Compares with what the codec itself promises: an optional method `error_bound(tensor)`, per value."""
    promise: Any = getattr(codec, "error_bound", None)
    if promise is None:
        return
    for name, tensor in case.tensors.items():
        error = np.abs(decoded[name].astype(np.float64) - tensor)
        bound = np.broadcast_to(np.asarray(promise(tensor), np.float64), tensor.shape)
        worse = np.argwhere(~(error <= bound))
        if len(worse):
            at = tuple(int(i) for i in worse[0])
            trial.broken(
                f"{name}{list(at)}: {tensor[at]!r} became {decoded[name][at]!r}",
                f"error {error[at]:.7g}, error_bound says {bound[at]:.7g}",
            )


def _length(codec: Codec, trial: Trial) -> None:
    case = _case(trial)
    payload, _ = _encode(codec, case, trial)
    lengths, bounds = (len(payload.side), len(payload.values)), tuple(codec.max_bytes(case.layout))
    fits = all(n <= most for n, most in zip(lengths, bounds, strict=True))
    trial.demand(fits, f"side and values have {lengths} bytes, max_bytes says {bounds}")
    trial.demand(
        not codec.fixed_length or lengths == bounds,
        f"it says fixed_length; side and values have {lengths} bytes, max_bytes says {bounds}",
    )


def _determinism(codec: Codec, trial: Trial) -> None:
    case = _case(trial)
    rng = trial.rng("encode")
    before = rng.bit_generator.state
    first, _ = codec.encode(case.tensors, case.layout, {}, rng)
    again, _ = _encode(codec, case, trial)
    same = (bytes(first.side), bytes(first.values)) == (bytes(again.side), bytes(again.values))
    trial.demand(same, "the same tensors and the same stream gave other bytes")
    drew = rng.bit_generator.state != before
    trial.demand(not (drew and codec.deterministic), "it says deterministic and draws from its stream")
    one, two = codec.decode(first, case.layout), codec.decode(first, case.layout)
    trial.demand(same_bits(one, two), "decoding the same bytes twice differs", first_difference(one, two))


def _residual(codec: Codec, trial: Trial) -> None:
    """Σ decoded + residual = Σ tensors, over rounds whose plans differ."""
    case = _case(trial)
    sent = {n: np.zeros(t.shape) for n, t in case.tensors.items()}
    residual: NamedTensors = {}
    wanted, largest = copied(sent), 0.0
    for server_round in range(3):
        strata = case.layout.strata
        keep = case.layout.restrict(s for i, s in enumerate(strata) if i == 0 or (i + server_round) % 2 == 0)
        part = {n: case.tensors[n] * np.float32(1 + server_round) for n in keep.names}
        payload, residual = codec.encode(part, keep, residual, trial.rng("encode", server_round))
        for name, tensor in codec.decode(payload, keep).items():
            sent[name] += tensor
            wanted[name] += part[name]
            largest = max(largest, float(np.abs(part[name]).max(initial=0)))
    if not residual:
        raise LeftOut("it keeps no residual")
    for name in residual:
        gap = np.abs(sent[name] + residual[name] - wanted[name]).max(initial=0)
        trial.demand(
            bool(gap <= 1e-5 * max(largest, 1e-30)),
            f"{name}: decoded so far + residual differs from what was to be sent by {gap:.3g}",
            f"decoded {show_values({name: sent[name]})}",
            f"residual {show_values({name: residual[name]})}",
            f"wanted {show_values({name: wanted[name]})}",
        )


def _hostile(codec: Codec, trial: Trial) -> None:
    case = _case(trial)
    rng = trial.rng("hostile")
    sizes = codec.max_bytes(case.layout)
    payload, _ = _encode(codec, case, trial)
    honest = [bytes(payload.side), bytes(payload.values)]
    attacks = [
        [b"", b""],
        [rng.bytes(int(rng.integers(0, 65))) for _ in sizes],
        [rng.bytes(size) for size in sizes],
        [b"\xff" * size for size in sizes],
    ]
    for which in (0, 1):
        if honest[which]:
            flipped = bytearray(honest[which])
            flipped[int(rng.integers(len(flipped)))] ^= 1 << int(rng.integers(8))
            attacks.append([bytes(flipped) if i == which else honest[i] for i in (0, 1)])
    for sections in attacks:
        _decode_or_refuse(codec, sections, case.layout, trial)
    for which in (0, 1):
        cut = [honest[which][: int(rng.integers(len(honest[which])))]] if honest[which] else []
        for section in [*cut, honest[which] + b"\x01"]:
            sections = [section if i == which else honest[i] for i in (0, 1)]
            refused = _decode_or_refuse(codec, sections, case.layout, trial)
            trial.demand(
                refused,
                f"{('side', 'values')[which]} of {len(section)} instead of {len(honest[which])} bytes: accepted",
            )


def _decode_or_refuse(codec: Codec, sections: list[bytes], layout: Layout, trial: Trial) -> bool:
    """Whether the bytes were refused; anything but a refusal or a valid result breaks the law."""
    try:
        decoded = codec.decode(Payload(*sections), layout)
    except PayloadError:
        return True
    except Exception as error:  # the very thing that the law forbids
        trial.broken(
            f"side = {sections[0][:24].hex() or 'nothing'} ({len(sections[0])} bytes), "
            f"values = {sections[1][:24].hex() or 'nothing'} ({len(sections[1])} bytes)",
            f"decode raised {type(error).__name__}: {error}; only PayloadError may come out of bytes",
        )
    try:
        layout.check(decoded)
    except PayloadError as error:
        trial.broken(
            f"side = {sections[0][:24].hex()} ({len(sections[0])} bytes), values = {sections[1][:24].hex()}",
            "decode accepted bytes whose result is not the layout's",
            str(error),
        )
    return False


def _extreme(codec: Codec, trial: Trial) -> None:
    """Any finite float32 is encoded to something finite, or refused by name."""
    words = np.array([0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x80000000], "<u4")
    picked = words[generator(trial.seed, "extreme", trial.index).integers(len(words), size=1 + trial.index)]
    tensors = {"t": picked.view(np.float32)}
    layout = Layout((TensorSpec("t", (len(picked),), 0),))
    trial.note(f"tensors: {show_values(tensors)}")
    try:
        payload, _ = codec.encode(tensors, layout, {}, trial.rng("encode"))
    except PayloadError:
        return
    decoded = codec.decode(payload, layout)
    layout.check(decoded)
    if codec.lossless:
        trial.demand(same_bits(decoded, tensors), "it says lossless", first_difference(decoded, tensors))


CODEC_LAWS: tuple[Law[Codec], ...] = (
    config_law(CODECS),
    Law("round trip", "decode gives the layout's tensors: bit for bit where lossless, within error_bound", _round_trip),
    Law("extreme values", "any finite value is encoded, or refused with PayloadError", _extreme),
    Law("length", "a payload is never longer than max_bytes, and just as long where fixed_length", _length),
    Law("determinism", "the same tensors and stream give the same bytes", _determinism),
    Law("residual", "what is decoded and what is kept add up to what was to be sent", _residual),
    Law("hostile bytes", "bytes from anywhere decode to the layout's tensors or raise PayloadError", _hostile),
)
