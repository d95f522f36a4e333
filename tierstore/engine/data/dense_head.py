"""A dense part as a view has it: one of those over the tables of a version, by the name of its head.

Immutable; any thread. The one without a name is the model's own, and served under the name of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.predict.session import DenseSession

GONE = b""  # the graph of a head that a delta took away


@dataclass(frozen=True, slots=True, eq=False)
class DenseHead:
    """`predictor` is the graph, ready to run; None where it cannot be served here, for the reason `unserved`.

    `graph`: its ONNX as a delta brought it; None where the files of the version have it.
    """

    predictor: DenseSession | None = None
    unserved: str | None = None
    graph: bytes | None = field(default=None, repr=False)

    def shares_plans_with(self, other: DenseHead) -> bool:
        """Whether what was planned for one holds for the other: graphs of the same bindings."""
        mine, its = self.predictor, other.predictor
        if mine is None or its is None:
            return mine is its
        return mine.bindings is its.bindings and mine.loose is its.loose


Heads = Mapping[str, DenseHead]


def with_brought(before: Heads, brought: Heads) -> dict[str, DenseHead]:
    """The heads there are once a delta has brought some, or taken them away."""
    return {name: head for name, head in {**before, **brought}.items() if head.graph != GONE}


def passed_over_after(before: Mapping[str, str], brought: Heads, passed_over: Mapping[str, str]) -> dict[str, str]:
    """Which newest graphs do not fit a version, and why, by head: those of before, but for heads that newer
    deltas have brought, and those that are newer still.
    """
    return {head: why for head, why in before.items() if head not in brought} | dict(passed_over)
