"""Frozen factors from the clients' gradients: what they answered, and what becomes of it (Fed-SB)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedstrata.codec.base import wire_id
from fedstrata.codec.floats import Float32
from fedstrata.core.frames import frames_from_gradients
from fedstrata.core.lora import LoraTerm
from fedstrata.core.merges import BaseLog
from fedstrata.core.tensors import Layout
from fedstrata.core.wire import REPLY, Bytes, unpack_frame
from fedstrata.errors import PayloadError, PlanError, RoundError
from fedstrata.message import reply_header
from fedstrata.server.setup import RoundSetup


def read_gradient(data: Bytes, client: str, server_round: int, *, layout: Layout) -> dict[str, Any]:
    """A client's gradient: `{"pairs": tensors of the layout, "count": examples}`.

    Raises:
        PayloadError: If the answer is not what was asked for.
    """
    where = f"gradient of client {client} in round {server_round}"
    frame = unpack_frame(data, REPLY, where=where)
    reply = reply_header(frame, where=where)
    if (reply.client, reply.server_round) != (client, server_round) or reply.num_examples < 1:
        raise PayloadError(
            "The answer is not what was asked for",
            where=where,
            expected=f"client {client} with at least one example",
            got=f"{reply}"[:200],
        )
    codec = Float32()
    if frame.codec_id != wire_id(codec):
        raise PayloadError("The gradient is encoded in another way", where=where, got=frame.codec_id)
    return {"pairs": codec.decode(frame.payload, layout), "count": reply.num_examples}


def frames_log(setup: RoundSetup, answers: Mapping[str, Any]) -> BaseLog:
    """Frozen factors along G = Σ_k (n_k/Σn)·G_k, as the one thing that every client's machine receives once.

    Raises:
        RoundError: If nobody answered.
        PlanError: If the factors would need more numbers than the maps themselves.
    """
    if not answers:
        raise RoundError("No client sent a gradient, so that there are no frozen factors", do="mend the clients")
    layout = setup.base_layout
    total = sum(a["count"] for a in answers.values())
    terms: dict[str, list[LoraTerm]] = {t: [] for t in layout.targets}
    for client in sorted(answers):
        pairs, share = answers[client]["pairs"], answers[client]["count"] / total
        for target in layout.targets:
            terms[target].append(LoraTerm(pairs[f"{target}.lora_A"], pairs[f"{target}.lora_B"], 1.0, share))
    ranks = {t: layout[f"{t}.lora_A"].rank for t in layout.targets}
    for target, rank in ranks.items():
        n_in, n_out = layout[f"{target}.lora_A"].shape[1], layout[f"{target}.lora_B"].shape[0]
        if rank * (n_in + n_out) > n_in * n_out:
            raise PlanError(
                f"Frozen factors of rank {rank} are larger than the map {target} itself", do="lower adapter.max_rank"
            )
    return BaseLog().append(frames_from_gradients(terms, ranks).factors)
