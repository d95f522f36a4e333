"""A dense part in a view: one of the dense parts over a version's tables, by the name of its head.

Immutable; any thread. The head without a name is the model's own, served under the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.predict.session import DenseSession

GONE = b""  # the graph of a head that a delta has removed


@dataclass(frozen=True, slots=True, eq=False)
class DenseHead:
    """One dense part. `session` is the graph, ready to run; None if it cannot be served here, for the reason
    `unserved`.

    `graph`: its ONNX as a delta brought it; None if the version's files have it.
    """

    session: DenseSession | None = None
    unserved: str | None = None
    graph: bytes | None = field(default=None, repr=False)

    def shares_plans_with(self, other: DenseHead) -> bool:
        """Whether plans made for one are valid for the other: graphs with the same bindings."""
        mine, its = self.session, other.session
        if mine is None or its is None:
            return mine is its
        return mine.bindings is its.bindings and mine.loose is its.loose


Heads = Mapping[str, DenseHead]


def with_brought(before: Heads, brought: Heads) -> dict[str, DenseHead]:
    """The heads after a delta has brought or removed some."""
    return {name: head for name, head in {**before, **brought}.items() if head.graph != GONE}


def passed_over_after(before: Mapping[str, str], brought: Heads, passed_over: Mapping[str, str]) -> dict[str, str]:
    """The newest graphs that do not fit a version, by head, and why: those of before, without heads that newer
    deltas have brought, and those of newer deltas.
    """
    return {head: why for head, why in before.items() if head not in brought} | dict(passed_over)
