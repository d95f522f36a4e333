"""The choices of a front: which version it serves, and which node it asks for what. Pure functions of the nodes'
reports.

A partition counts if a node that answers owns it; a node that does not answer decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, PlainValidator

from tierstore import types
from tierstore.tiers.upstream.connections import Document, ModelName, Seq
from tierstore.tiers.upstream.table import Ownership

Partitions = npt.NDArray[np.bool_]


def _partitions(document: Any) -> types.Partitions:
    try:
        return types.Partitions.of_document(document)
    except (LookupError, TypeError, OverflowError) as error:
        raise ValueError(f"expected a count and ranges, got something else: {error!r}") from error


@dataclass(frozen=True, slots=True)
class VersionState:
    """A version that a node can be asked for. `seq`: the newest delta of its rows there."""

    line: str
    seq: int


@dataclass(frozen=True, slots=True, eq=False)
class ReportedModel:
    """A model as one node reports it. `log`: (start, last), None if it has not begun. `own` bool[partitions].

    `digests`: by seq, of its newest deltas and of the one that the front serves.
    """

    active: int | None
    log: tuple[int, int] | None
    versions: Mapping[int, VersionState]
    own: Partitions
    digests: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: ModelDocument) -> ReportedModel:
        versions = {number: VersionState(of.line, of.seq) for number, of in model.versions.items()}
        own = np.ones(1, np.bool_) if model.partitions is None else model.partitions.is_own
        return cls(model.active, model.log, versions, own, model.digests)


class _VersionDocument(Document):
    line: str = Field(max_length=64)
    seq: Seq


class ModelDocument(Document):
    """See `ReportedModel`."""

    active: Seq | None
    log: tuple[Seq, Seq] | None
    versions: dict[Seq, _VersionDocument]
    partitions: Annotated[types.Partitions, PlainValidator(_partitions)] | None = None
    digests: dict[Seq, Annotated[str, Field(max_length=64)]] = Field(default_factory=dict)  # none by earlier releases


class ModelsDocument(Document):
    """A node's report of all its models."""

    models: dict[ModelName, ModelDocument]


States = Sequence[ReportedModel | None]  # by node; None if it does not answer, or does not have the model


def problem_of(states: States) -> str | None:
    """Why the nodes cannot be read together; None if they can."""
    counts = sorted({len(state.own) for state in states if state is not None} - {1})
    if len(counts) > 1:
        return (
            f"the nodes have different numbers of partitions: {', '.join(map(str, counts))}; load the same built "
            "version on all"
        )
    return None


def partitions_of(states: States) -> int:
    return max((len(state.own) for state in states if state is not None), default=1)


def _owners(states: States, answers: Callable[[ReportedModel], bool]) -> Partitions:
    """bool [nodes, partitions]: which node owns a partition, of those that `answers` is true for."""
    owns = np.zeros((len(states), partitions_of(states)), np.bool_)
    for at, state in enumerate(states):
        if state is not None and answers(state):
            owns[at] = state.own  # one that owns all of 1 owns all of any number
    return owns


def _covers(owners: Partitions, needed: Partitions) -> bool:
    return bool((owners.any(0) >= needed).all()) and bool(owners.any())


def line_of(states: States, number: int, before: str | None = None) -> str | None:
    """The line of a version that covers the most partitions; among equals the line of `before`.

    None if no node has the version.
    """
    lines = sorted({state.versions[number].line for state in states if state is not None and number in state.versions})
    if not lines:
        return None
    return max(lines, key=lambda line: (ownership(states, number, line).owns.any(0).sum(), line == before))


def ownership(states: States, number: int, line: str) -> Ownership:
    """Which node can be asked for which partition of a version."""
    return Ownership(
        _owners(states, lambda state: number in state.versions and state.versions[number].line == line), line
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice: `current` should be served, `wanted` made ready.

    `marks` and `lines` by version; `complete`: versions that all partitions can be asked for.
    """

    current: int | None
    wanted: int | None
    seq: int | None
    marks: Mapping[int, int]
    lines: Mapping[int, str]
    complete: frozenset[int]


def choose(states: States, served: int | None, lines: Mapping[int, str]) -> Choice:
    """The choice for a front that serves `served` and has opened `lines` of versions."""
    there = [state for state in states if state is not None]
    needed = _partitions_answered(states)
    numbers = sorted({number for state in there for number in state.versions})
    chosen = {number: line_of(states, number, lines.get(number)) or "" for number in numbers}
    owners = {number: ownership(states, number, line).owns for number, line in chosen.items()}
    complete = frozenset(number for number in numbers if _covers(owners[number], needed))
    active = {number: sum(state.active == number for state in there) for number in numbers}
    everywhere = [
        number for number in sorted(complete) if _covers(_where_active(states, number, owners[number]), needed)
    ]

    def best(among: Sequence[int]) -> int | None:
        return max(among, key=lambda number: (owners[number].any(0).sum(), active[number], number), default=None)

    current = served
    if served not in everywhere:
        switched = [number for number in numbers if active[number]]
        if everywhere:
            current = best(everywhere)
        elif served not in complete:
            current = best([number for number in switched if number in complete])
            if current is None:
                current = served if served in numbers else best(switched)
    others = [number for number in numbers if number != current and active[number] and number in complete]
    marks = {number: _lowest(owners[number], [_seq(state, number) for state in states]) for number in numbers}
    logs = [None if state is None or state.log is None else state.log[1] for state in states]
    with_log = _owners(states, lambda state: state.log is not None)
    return Choice(current, best(others), _lowest(with_log, logs) if with_log.any() else None, marks, chosen, complete)


def _partitions_answered(states: States) -> Partitions:
    return np.asarray(_owners(states, lambda _: True).any(0), np.bool_)


def _where_active(states: States, number: int, owners: Partitions) -> Partitions:
    """`owners` without the nodes on which another version is active."""
    active = np.array([state is not None and state.active == number for state in states])
    both: Partitions = owners & active[:, None]
    return both


def _seq(state: ReportedModel | None, number: int) -> int | None:
    return None if state is None or number not in state.versions else state.versions[number].seq


def _lowest(owners: Partitions, seqs: Sequence[int | None]) -> int:
    """The seq that every partition has on some node: the lowest, over partitions, of the newest of its owners."""
    of_nodes = np.array([-1 if seq is None else seq for seq in seqs], np.int64)
    newest = np.where(owners, of_nodes[:, None], -1).max(0)
    return int(newest[newest >= 0].min(initial=np.iinfo(np.int64).max))
