"""As many blocks from the output as each kind of device can afford."""

from __future__ import annotations

from fedstrata.aggregate.holders import HoldersMean
from fedstrata.codec.floats import Float32
from fedstrata.method.base import Method
from fedstrata.method.registry import METHODS, MethodFacts
from fedstrata.objective.task_loss import TaskLoss
from fedstrata.plan.suffix import SuffixByDevice
from fedstrata.select.accept_all import AcceptAll


@METHODS.register(
    MethodFacts(
        paper="the given-depth form of LEGEND's and InclusiveFL's suffix plans",
        trains="the last blocks, how many depends on the device",
        sends="what it trained",
        exact=False,
        unequal_depth=True,
    ),
    aliases=("suffix", "depth_by_device"),
)
def suffix_by_device(depth: dict[str, int] | None = None, weight_by: str = "num_examples") -> Method:
    """Suffix by device: each device kind trains a given number of blocks, counted from the output.

    A block is averaged over the clients that trained it. Adapters below a client's depth stay in its forward pass,
    frozen.

    Args:
        depth: Blocks per device kind, e.g. `{"laptop-16gb" = 6, "jetson-tx2" = 1}`.
        weight_by: Weights of the mean.
    """
    return Method(
        planner=SuffixByDevice(depth),
        objective=TaskLoss(),
        codec=Float32(),
        aggregator=HoldersMean(weight_by),
        selector=AcceptAll(),
    )
