"""Compares all rows of two nodes: by digests at one seq, then the keys that differ.

Only reads, through the public interface. One thread a node carries its requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tierstore.client.replicas import POLL_S
from tierstore.errors import Conflict, TierstoreError
from tierstore.threads import Pool

ROWS_A_BUCKET, MOST_BUCKETS = 16, 65536
LISTED_ROWS = 65536  # of a table, about so many whose digests are compared one by one
MOST_KEYS = 1000  # that are named
LASTS_S = 3600  # that a comparison takes at most, and clocks may differ by: what expires meanwhile counts as absent


class ComparedNode(Protocol):
    """A node that is compared: a client of a service, or a store in this process."""

    def status(self, model: str | None = None, /) -> Any: ...
    def digests(
        self, model: str, *, version: int | str | None = None, seq: int | None = None, buckets: int = 1024,
        listed: Mapping[str, Any] | None = None, expired_at_s: int | None = None,
    ) -> dict[str, Any]: ...  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """A key whose row differs, as its code: `on` names the nodes that have a row for it."""

    key: int
    on: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ComparedTable:
    """`differing`: keys of rows that differ, at most `MOST_KEYS`; `more`: whether there are others besides."""

    rows: dict[str, int]  # by node
    differing: list[Difference] = field(default_factory=list)
    more: bool = False


@dataclass(frozen=True, slots=True)
class WholeComparison:
    """A model of two nodes, at `seq`. `problems`: what differs, in sentences that name nodes."""

    model: str
    version: int
    seq: int
    tables: dict[str, ComparedTable]
    problems: list[str]


Nodes = Mapping[str, ComparedNode]  # by the name that is shown


def compare_whole(nodes: Nodes, model: str, *, wait_s: float = 60.0) -> WholeComparison:
    """Compare every row of a model that nodes serve. Rows that are expired, or will be within an hour, count as absent.

    Conflict where they serve other versions, or were not at one seq within `wait_s`. Raises what a
    node raises, with its name in the message.
    """
    with Pool(len(nodes), "tierstore-compare") as threads:
        return _Comparison(nodes, model, wait_s, threads).run()


class _Comparison:
    """One run."""

    def __init__(self, nodes: Nodes, model: str, wait_s: float, threads: Pool) -> None:
        self._nodes, self._model, self._wait_s, self._threads = nodes, model, wait_s, threads
        self._version = 0
        self._expired_at_s = int(time.time()) + LASTS_S

    def run(self) -> WholeComparison:
        states = {
            name: state["models"][self._model]
            for name, state in self._each(lambda node: node.status(self._model)).items()
        }
        versions = {name: state["active_version"] for name, state in states.items()}
        if len(set(versions.values())) > 1 or None in versions.values():
            served = ", ".join(f"{version or 'none'} on {name}" for name, version in versions.items())
            raise Conflict(f"model {self._model!r}: expected one version on every node, got {served}")
        (self._version,) = set(versions.values())
        most = max((table["rows"] for state in states.values() for table in state["tables"].values()), default=0)
        buckets = min(MOST_BUCKETS, max(64, 1 << (most // ROWS_A_BUCKET).bit_length()))
        seq, answers = self._at_one_seq({"buckets": buckets})
        names = {name: sorted(answer["tables"]) for name, answer in answers.items()}
        if len({str(tables) for tables in names.values()}) > 1:
            problems = [f"{name} has the tables {', '.join(tables)}" for name, tables in names.items()]
            return WholeComparison(self._model, self._version, seq, {}, problems)
        tables = {table: ComparedTable({name: answer["tables"][table]["rows"] for name, answer in answers.items()})
                  for table in next(iter(names.values()))}  # fmt: skip
        parts = {table: parts for table in tables if len(parts := _differing(answers, table))}
        problems = (
            [f"dense parts differ at seq {seq}"] if len({answer["dense"] for answer in answers.values()}) > 1 else []
        )
        if parts:
            problems += [f"rows of table {table!r} differ at seq {seq}" for table in parts]
            tables |= self._find(tables, parts, buckets)
        return WholeComparison(self._model, self._version, seq, tables, problems)

    def _find(
        self, tables: Mapping[str, ComparedTable], parts: Mapping[str, list[int]], buckets: int
    ) -> dict[str, ComparedTable]:
        """Tables with the keys that differ, of as many buckets as may be listed."""
        listed = {}
        for table, numbers in parts.items():
            each = max(tables[table].rows.values()) / buckets
            listed[table] = numbers[: max(1, int(LISTED_ROWS / max(1.0, each)))]
        _, answers = self._at_one_seq({"buckets": buckets, "listed": listed})
        found = {}
        for table, numbers in listed.items():
            keys = _differing_keys({name: answer["tables"][table] for name, answer in answers.items()})
            more = len(keys) > MOST_KEYS or len(numbers) < len(parts[table])
            found[table] = ComparedTable(tables[table].rows, keys[:MOST_KEYS], more)
        return found

    def _at_one_seq(self, wanted: Mapping[str, Any]) -> tuple[int, dict[str, dict[str, Any]]]:
        """What every node answers at one seq. Nodes read nothing at another one, so to ask again costs little."""
        until = time.monotonic() + self._wait_s
        while True:
            marks = self._each(lambda node: node.status(self._model)["models"][self._model]["watermark"])
            if len(set(marks.values())) == 1:
                (seq,) = set(marks.values())
                options = {"version": self._version, "seq": seq, "expired_at_s": self._expired_at_s, **wanted}
                answers = self._each(partial(self._digests, options))
                if all(answer["tables"] is not None for answer in answers.values()):
                    return seq, answers
                marks = {name: answer["seq"] for name, answer in answers.items()}
            if time.monotonic() >= until:
                at = ", ".join(f"{mark} on {name}" for name, mark in marks.items())
                raise Conflict(
                    f"watermarks of model {self._model!r} differ, and did not meet within {self._wait_s:g} s: {at}"
                )
            time.sleep(POLL_S)

    def _digests(self, options: Mapping[str, Any], node: ComparedNode) -> dict[str, Any]:
        return node.digests(self._model, **options)

    def _each(self, request: Any) -> dict[str, Any]:
        def named(name: str) -> Any:
            try:
                return request(self._nodes[name])
            except TierstoreError as error:
                error.add_note(f"node {name}")
                raise

        return dict(zip(self._nodes, self._threads.map(named, self._nodes), strict=True))


def _values(text: str) -> npt.NDArray[np.uint64]:
    return np.frombuffer(bytes.fromhex(text), ">u8")


def _differing(answers: Mapping[str, Mapping[str, Any]], table: str) -> list[int]:
    """The buckets whose digests differ."""
    first, *others = (_values(answer["tables"][table]["digests"]) for answer in answers.values())
    differs = np.zeros(len(first), np.bool_)
    for other in others:
        differs |= first != other
    buckets: list[int] = np.flatnonzero(differs).tolist()
    return buckets


def _differing_keys(listed: Mapping[str, Mapping[str, Any]]) -> list[Difference]:
    """The keys whose rows differ, ascending."""
    rows = {name: dict(zip(of["keys"], _values(of["digests"]).tolist(), strict=True)) for name, of in listed.items()}
    found = []
    for key in sorted(set().union(*rows.values())):
        on = tuple(name for name, digests in rows.items() if key in digests)
        if len(on) < len(rows) or len({digests[key] for digests in rows.values()}) > 1:
            found.append(Difference(key, on))
    return found
