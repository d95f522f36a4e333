"""One table of one version, read from the nodes that have its rows: each key from a node that owns its partition.

Any thread. Requests go to all nodes before the first answer is waited for. What a node does not answer is asked from
another one that owns the same partitions; what nobody answers fails, and the other keys do not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.errors import Closed, ClusterUnavailable, Corruption
from tierstore.formats.keys import partition_of
from tierstore.tiers.joining import Bounds, JoinedTable, Watermarks
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.connections import Broken, Connection, Node
from tierstore.tiers.upstream.options import Options
from tierstore.types import Keys, Rows, States, Tier

_ATTEMPTS = 4
_PAUSE_S = 0.05  # in which a node that refused is looked at again


class Nodes:
    """All nodes of a front, and the bytes that look-ups wait for."""

    def __init__(self, nodes: Sequence[Node], options: Options) -> None:
        # constant after construction
        self.nodes, self.options = tuple(nodes), options
        # guarded by _lock
        self._lock = threading.Lock()
        self._outstanding = self._turn = 0
        self._closed = False

    @property
    def timeout_s(self) -> float:
        """That a look-up may take without a deadline of its own."""
        return self.options.timeout_s

    def next_turn(self) -> int:
        """Which node is the first to be asked among several."""
        with self._lock:
            self._turn = (self._turn + 1) % len(self.nodes)
            return self._turn

    def reserve(self, size: int) -> bool:
        """Count bytes that a look-up waits for. False, and not counted, where there are too many already."""
        with self._lock:
            if self._outstanding and self._outstanding + size > self.options.outstanding_bytes:
                return False
            self._outstanding += size
            return True

    def release(self, size: int) -> None:
        with self._lock:
            self._outstanding -= size

    def check_open(self) -> None:
        if self._closed:
            raise Closed("the front was closed")

    def close(self) -> None:
        self._closed = True
        for node in self.nodes:
            node.close()


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which node can be asked for which partition of a version: `owns` bool [nodes, partitions]. `line`: what requests name."""

    owns: npt.NDArray[np.bool_]
    line: str


class Source(NamedTuple):
    """What a table's reads need to know, at each moment. `refresh` is called with a node that is not as it was said to be."""

    ownership: Callable[[], Ownership]
    refresh: Callable[[int], None]
    newest: Callable[[], int]  # the seq that rows may have where the reader names none


class UpstreamTable(JoinedTable):
    """Of one version. Its watermarks have one part."""

    def __init__(self, nodes: Nodes, model: str, version: int, table: str, row_bytes: int, source: Source) -> None:
        super().__init__(nodes, row_bytes, 1)
        # constant after construction
        self.nodes, self.row_bytes, self.source = nodes, row_bytes, source
        self.path = wire.rows_path(model, version, table)
        self.name = f"table {table} of {model}, version {version},"

    def _read(
        self, codes: Keys, places: Keys, rows: Rows, state: States, deadline_s: float, bounds: Bounds
    ) -> Watermarks:
        if bounds.upto is None:
            bounds = bounds._replace(upto=max(bounds.floor, self.source.newest()))
        return _Read(self, codes, rows, state, bounds).run(places, deadline_s)


class _Request(NamedTuple):
    node: int
    places: Keys
    connection: Connection | None  # None where it could not be sent


class _Read:
    """One batch, on one thread."""

    def __init__(self, table: UpstreamTable, codes: Keys, rows: Rows, state: States, bounds: Bounds) -> None:
        self._table, self._codes, self._rows, self._state = table, codes, rows, state
        self._bounds = bounds
        self._excluded: set[int] = set()  # nodes that are not asked again, but for those that may have changed since
        self._again: set[int] = set()
        self._patient = False  # all that could answer have been tried: from now on the deadline alone counts
        self._why: dict[str, None] = {}  # in order, each once
        self._low, self._high = Watermarks.none(1)

    def run(self, places: Keys, deadline_s: float) -> Watermarks:
        pending = places
        for _ in range(_ATTEMPTS):
            owned = self._table.source.ownership()
            groups, nobody = self._assign(pending, owned)
            pending = np.sort(np.concatenate([nobody, self._exchange(groups, owned, deadline_s)]))
            if not len(pending) or time.monotonic() >= deadline_s or not (groups or self._again):
                break
            if len(nobody) and self._again:  # what these nodes said of themselves is read anew
                time.sleep(max(0.0, min(_PAUSE_S, deadline_s - time.monotonic())))
                self._excluded -= self._again
                self._again.clear()
                self._patient = True
        if len(pending):
            why = "; ".join(list(self._why)[:3]) or "no node that answers owns their partitions"
            raise ClusterUnavailable(
                f"{len(pending)} keys of {self._table.name} could not be read: {why}",
                keys=self._codes[pending].tolist(),
            )
        return Watermarks(self._low, self._high)

    def _assign(self, places: Keys, owned: Ownership) -> tuple[dict[int, Keys], Keys]:
        """Places by the node to ask for them, and those that nobody can be asked for."""
        nodes, count = owned.owns.shape
        turn = self._table.nodes.next_turn()
        order = (np.arange(nodes) + turn) % nodes
        usable = owned.owns[order]
        usable[[number in self._excluded for number in order]] = False
        sound = usable.copy()  # one that has failed a moment ago is asked where there is no other
        sound[[self._table.nodes.nodes[number].suspect for number in order]] = False
        usable = np.where(sound.any(0), sound, usable)
        of_partition = np.where(usable.any(0), order[usable.argmax(0)], -1)
        if count == 1:
            target = np.full(len(places), of_partition[0])
        else:
            target = of_partition[partition_of(self._codes[places], count)]
        groups = {int(number): places[target == number] for number in np.unique(target) if number >= 0}
        return groups, places[target < 0]

    def _exchange(self, groups: dict[int, Keys], owned: Ownership, deadline_s: float) -> Keys:
        """Ask each node for its places, all at once. Returns those that were not answered."""
        at_once = wire.keys_at_once(self._table.row_bytes)
        failed: list[Keys] = [np.empty(0, np.int64)]
        while groups:
            until_s = self._until(groups, owned, deadline_s)
            sent = [self._send(number, places[:at_once], owned.line, until_s) for number, places in groups.items()]
            groups = {number: places[at_once:] for number, places in groups.items() if len(places) > at_once}
            failed += [self._receive(request, owned.line, until_s) for request in sent]
        return np.concatenate(failed)

    def _until(self, groups: dict[int, Keys], owned: Ownership, deadline_s: float) -> float:
        """How long to wait: shorter where another node could answer for one of them."""
        usable = owned.owns.copy()
        usable[list(self._excluded)] = False
        if (usable.sum(0) > 1).any() and not self._patient:
            return min(deadline_s, time.monotonic() + self._table.nodes.options.other_after_s)
        return deadline_s

    def _send(self, number: int, places: Keys, line: str, until_s: float) -> _Request:
        node = self._table.nodes.nodes[number]
        upto, floor = self._bounds
        assert upto is not None
        body = wire.encode_request(wire.RowsRequest(upto, floor, line, self._codes[places]))
        head = node.head("POST", self._table.path, len(body))
        for _ in range(2):
            try:
                connection = node.acquire()
            except OSError as error:
                self._note(number, error)
                break
            try:
                connection.send(head, body, until_s)
            except OSError as error:
                connection.close()
                if isinstance(error, Broken) and connection.used:
                    node.forget()  # the node has closed connections that were idle
                    continue
                self._note(number, error)
                break
            return _Request(number, places, connection)
        return _Request(number, places, None)

    def _receive(self, request: _Request, line: str, until_s: float) -> Keys:
        """Take over an answer. Returns the places that it does not have."""
        number, places, connection = request
        if connection is None:
            return places
        node = self._table.nodes.nodes[number]
        try:
            reply = connection.receive(until_s)
        except Broken as error:
            connection.close()
            if connection.used and error.unanswered:
                node.forget()
                return self._receive(self._send(number, places, line, until_s), line, until_s)
            self._note(number, error)
            return places
        except (OSError, ValueError) as error:
            connection.close()
            self._note(number, error)
            return places
        node.release(connection)
        if reply.status != 200:
            self._refused(number, f"{node} answers {reply.status}: {reply.problem}")
            return places
        try:
            answer = wire.decode_rows(reply.body, len(places), self._table.row_bytes)
        except Corruption as error:
            self._note(number, error)
            return places
        return self._store(number, places, answer)

    def _store(self, number: int, places: Keys, answer: wire.RowsReply) -> Keys:
        there = answer.states == wire.THERE
        self._rows[places[there]] = answer.rows
        self._state[places[there]] = Tier.REMOTE
        self._state[places[answer.states == wire.ABSENT]] = Tier.ABSENT
        self._low[0], self._high[0] = min(self._low[0], answer.seq), max(self._high[0], answer.seq)
        foreign: Keys = places[answer.states == wire.FOREIGN]
        if len(foreign):
            self._refused(number, f"{self._table.nodes.nodes[number]} does not own their partitions")
        return foreign

    def _refused(self, number: int, why: str) -> None:
        """A node is not as it was said to be, or does not answer."""
        self._excluded.add(number)
        self._again.add(number)
        self._why[why] = None
        self._table.source.refresh(number)

    def _note(self, number: int, error: Exception) -> None:
        """A node does not answer."""
        node = self._table.nodes.nodes[number]
        node.failed()
        self._refused(number, f"{node} does not answer: {error or type(error).__name__}")
