"""GradualDiff-Fed (Faiyaz and Salman, 2025): clients send quantized differences."""

from __future__ import annotations

from typing import Literal

from fedstrata.aggregate.factors import FactorMean
from fedstrata.codec.base import Codec
from fedstrata.codec.blockwise import Int4, Int8
from fedstrata.codec.floats import Float32
from fedstrata.codec.nf4 import Nf4
from fedstrata.codec.wrap import ErrorFeedback
from fedstrata.method.base import Method
from fedstrata.method.citation import Citation
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.blocks import AllStrata
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        citation=Citation(
            "faiyaz2025gradualdiff",
            ("Amir Faiyaz", "Tara Salman"),
            "GradualDiff-Fed: A Federated Learning Specialized Framework for Large Language Model",
            2025,
            arxiv="2506.19164",
        ),
        trains="LoRA factors of all blocks at one rank",
        sends="A and B as 4-bit differences",
        exact=False,
    ),
    aliases=("gradualdiff-fed", "gradual diff"),
)
def gradualdiff(
    bits: Literal[4, 8, 32] = 4,
    block: int = 64,
    quantile: bool = True,
    send: Literal["delta", "weights"] = "delta",
    error_feedback: bool = False,
    weight_by: str = "uniform",
) -> Method:
    """GradualDiff-Fed: the client sends Δ = local − start, quantized block by block; the server adds the mean.

    W ← W + (1/K)·Σ_k decode(encode(Δ_k)). With a lossless codec this is uniform FedAvg. Defaults of the paper that the
    experiment sets: every client in every round, 15 rounds, rank 64. The downlink stays float32 unless set.

    Args:
        bits: Of one value on the uplink; 32 sends float32.
        block: Values that share a scale.
        quantile: With 4 bits, the levels of NF4 (quantiles of a normal distribution) instead of equal steps.
        send: `delta`, or `weights`: the values themselves, for a comparison at equal bytes.
        error_feedback: Whether what quantization lost is added to the next difference (ours).
        weight_by: Weights of the mean; the method's are uniform.

    References:
        Faiyaz and Salman, 2025 (arXiv 2506.19164). Differs in: bytes are counted in both directions; error feedback,
        8 bits and the levels are options of ours.
    """
    codecs: dict[int, Codec] = {4: Nf4(block) if quantile else Int4(block), 8: Int8(block), 32: Float32()}
    codec = codecs[bits]
    return Method(
        planner=AllStrata(),
        objective=TaskLoss(),
        codec=ErrorFeedback(codec) if error_feedback else codec,
        aggregator=FactorMean(weight_by),
        selector=AcceptAll(),
        send=send,
        adapters=frozenset({"lora"}),
    )
