"""The server takes over everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedstrata.aggregate.base import Proposal
from fedstrata.core.tensors import stratum_order
from fedstrata.select.base import SELECTORS, SelectContext, Selector


@SELECTORS.register
@dataclass(frozen=True)
class AcceptAll(Selector):
    """Accepts the whole proposal."""

    id: ClassVar[str] = "accept_all"

    def init(self) -> dict[str, Any]:
        """No state."""
        return {}

    def select(
        self, state: dict[str, Any], proposal: Proposal, context: SelectContext
    ) -> tuple[Proposal, dict[str, Any], dict[str, Any]]:
        """The proposal as it is, and the names of its strata."""
        accepted = [str(s) for s in sorted(proposal.holders, key=stratum_order)]
        return proposal, state, {"rule": self.id, "accepted": accepted}
