"""One table of one version on upstream nodes: each key is read from a node that owns its partition.

Any thread. Kernels send all requests before they wait for an answer, and copy the rows to their places (`reads.py`). Keys that a node does not answer
are requested from another owner of the same partitions; keys that nobody answers fail, and the others do not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierstore.errors import Corruption, RemoteUnavailable
from tierstore.kernels.codec import address_of
from tierstore.kernels.partitions import group
from tierstore.tiers.connection_pools import ConnectionPools
from tierstore.tiers.joining import Bounds, JoinedTable, Watermarks
from tierstore.tiers.upstream import reads as kernel
from tierstore.tiers.upstream import wire
from tierstore.tiers.upstream.connections import Broken, NodeConnection, NodeReply, UpstreamNode
from tierstore.tiers.upstream.options import NodeAddress
from tierstore.types import Keys, Rows, States

_ATTEMPTS = 4
_ERROR_BYTES = 64 << 10  # of an answer without rows
_PAUSE_S = 0.05  # after which a node that refused is asked about its state again


class Nodes:
    """All nodes of a front. `pools` has their shared limits and connections."""

    def __init__(self, nodes: Sequence[UpstreamNode], pools: ConnectionPools[NodeAddress, NodeConnection]) -> None:
        self.nodes, self.pools = tuple(nodes), pools  # constant after construction
        self._turn = 0  # a lost step does no harm

    def next_turn(self) -> int:
        """The number of the node to ask first among several."""
        self._turn = (self._turn + 1) % len(self.nodes)
        return self._turn


@dataclass(frozen=True, slots=True)
class Ownership:
    """Which node has which partition of a version: `owns` bool [nodes, partitions]. `line`: the line that requests name."""

    owns: npt.NDArray[np.bool_]
    line: str


class OwnerSource(NamedTuple):
    """The current state that a table's reads need.

    `refresh` is called with a node whose state differs from what it last reported.
    """

    ownership: Callable[[], Ownership]
    refresh: Callable[[int], None]
    newest: Callable[[], int]  # the seq for readers that name none


class UpstreamTable(JoinedTable):
    """A table of a version whose rows are on other nodes. Its watermarks have one part."""

    def __init__(self, nodes: Nodes, model: str, version: int, table: str, row_bytes: int, source: OwnerSource) -> None:
        super().__init__(nodes.pools, row_bytes, 1)
        # constant after construction
        self.nodes, self.source = nodes, source
        self.path = wire.rows_path(model, version, table)
        self.name = f"table {table} of {model}, version {version},"

    def _read(
        self, codes: Keys, places: Keys, rows: Rows, state: States, deadline_s: float, bounds: Bounds
    ) -> Watermarks:
        if bounds.upto is None:
            bounds = bounds._replace(upto=max(bounds.floor, self.source.newest()))
        return _Read(self, codes, rows, state, bounds).run(places, deadline_s)


class _Request(NamedTuple):
    """A request to one node for the rows of `places`."""

    node: int
    places: Keys
    connection: NodeConnection
    whole: bytes


class _Read:
    """One batch of keys, on one thread."""

    def __init__(self, table: UpstreamTable, codes: Keys, rows: Rows, state: States, bounds: Bounds) -> None:
        self._table, self._codes, self._rows, self._state = table, codes, rows, state
        self._bounds = bounds
        self._excluded: set[int] = set()  # nodes that are not asked again, unless they may have changed since
        self._again: set[int] = set()
        self._patient = False  # every possible node was tried: from now on only the deadline counts
        self._why: dict[str, None] = {}  # reasons, in order, each once
        self._low, self._high = Watermarks.none(1)

    def run(self, places: Keys, deadline_s: float) -> Watermarks:
        pending = places
        for _ in range(_ATTEMPTS):
            owned = self._table.source.ownership()
            groups, nobody = self._assign(pending, owned)
            pending = np.sort(np.concatenate([nobody, self._exchange(groups, owned, deadline_s)]))
            if not len(pending) or time.monotonic() >= deadline_s or not (groups or self._again):
                break
            if len(nobody) and self._again:  # read again what these nodes report of themselves
                time.sleep(max(0.0, min(_PAUSE_S, deadline_s - time.monotonic())))
                self._excluded -= self._again
                self._again.clear()
                self._patient = True
        if len(pending):
            why = "; ".join(list(self._why)[:3]) or "no node that answers owns their partitions"
            raise RemoteUnavailable(
                f"{len(pending)} keys of {self._table.name} could not be read: {why}",
                keys=self._codes[pending].tolist(),
            )
        return Watermarks(self._low, self._high)

    def _assign(self, places: Keys, owned: Ownership) -> tuple[dict[int, Keys], Keys]:
        """Places by the node to ask for them, and the places for which there is no node."""
        pools, (nodes, _) = self._table.nodes.pools, owned.owns.shape
        turn = self._table.nodes.next_turn()
        order = (np.arange(nodes) + turn) % nodes
        usable = owned.owns[order]
        usable[[number in self._excluded for number in order]] = False
        sound = usable.copy()  # a node that failed a moment ago is asked only if there is no other
        sound[[pools.is_suspect(self._table.nodes.nodes[number].address) for number in order]] = False
        usable = np.where(sound.any(0), sound, usable)
        of_partition = np.where(usable.any(0), order[usable.argmax(0)], -1)
        ordered, starts = np.empty(len(places), np.int64), np.empty(nodes + 1, np.int64)
        group(self._codes, places, of_partition, ordered, starts)
        bounds = starts.tolist()
        groups = {number: ordered[bounds[number] : bounds[number + 1]] for number in range(nodes)}
        return {number: of for number, of in groups.items() if len(of)}, ordered[bounds[nodes] :]

    def _exchange(self, groups: dict[int, Keys], owned: Ownership, deadline_s: float) -> Keys:
        """Ask each node for its places, all at once. Returns the places that were not answered."""
        at_once = wire.keys_at_once(self._table.row_bytes)
        failed: list[Keys] = [np.empty(0, np.int64)]
        while groups:
            until_s = self._until(owned, deadline_s)
            now = {number: places[:at_once] for number, places in groups.items()}
            failed += self._request(now, owned.line, until_s)
            groups = {number: places[at_once:] for number, places in groups.items() if len(places) > at_once}
        return np.concatenate(failed)

    def _until(self, owned: Ownership, deadline_s: float) -> float:
        """How long to wait: shorter if another node could answer for one of them."""
        usable = owned.owns.copy()
        usable[list(self._excluded)] = False
        if (usable.sum(0) > 1).any() and not self._patient:
            return min(deadline_s, time.monotonic() + self._table.nodes.pools.options.other_after_s)
        return deadline_s

    def _request(self, groups: dict[int, Keys], line: str, until_s: float) -> list[Keys]:
        """Ask each node once. Returns the places that were not answered."""
        failed: list[Keys] = []
        requests: list[_Request] = []
        stale: dict[int, Keys] = {}  # of nodes that had closed an idle connection
        try:
            for number, places in groups.items():
                try:
                    connection = self._table.nodes.nodes[number].acquire()
                except OSError as error:
                    self._note(number, error)
                    failed.append(places)
                else:
                    requests.append(_Request(number, places, connection, self._encode(number, places, line)))
            replies = self._transfer(requests, until_s)
        except BaseException:
            for request in requests:
                request.connection.close()
            raise
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(reply, Broken) and reply.unanswered and request.connection.used:
                request.connection.close()
                self._table.nodes.pools.forget(self._table.nodes.nodes[request.node].address)
                stale[request.node] = request.places
            else:
                failed.append(self._judge(request, reply))
        return failed + self._request(stale, line, until_s) if stale else failed

    def _encode(self, number: int, places: Keys, line: str) -> bytes:
        upto, floor = self._bounds
        assert upto is not None
        body = wire.encode_request(wire.RowsRequest(upto, floor, line, self._codes[places]))
        return self._table.nodes.nodes[number].head("POST", self._table.path, len(body)) + body

    def _transfer(self, requests: list[_Request], until_s: float) -> list[NodeReply | Exception]:
        """The answer to each request, or its OSError or ValueError. Python handles TLS."""
        replies: dict[int, NodeReply | Exception] = {}
        coded = [at for at, request in enumerate(requests) if request.connection.tls]
        plain = [at for at, request in enumerate(requests) if not request.connection.tls]
        for at in coded:
            try:
                requests[at].connection.send(requests[at].whole, until_s)
            except OSError as error:
                replies[at] = error
        if plain:
            replies.update(zip(plain, self._transfer_plain([requests[at] for at in plain], until_s), strict=True))
        for at in coded:
            if at not in replies:
                try:
                    most = wire.answer_bytes(len(requests[at].places), self._table.row_bytes)
                    replies[at] = requests[at].connection.receive(until_s, max(most, _ERROR_BYTES))
                except (OSError, ValueError) as error:
                    replies[at] = error
        return [replies[at] for at in range(len(requests))]

    def _transfer_plain(self, requests: list[_Request], until_s: float) -> list[NodeReply | Exception]:
        nodes = kernel.NODE.new(len(requests))
        buffers = []
        for node, request in zip(nodes, requests, strict=True):
            buffer = request.connection.buffer(wire.answer_bytes(len(request.places), self._table.row_bytes))
            node["fd"], node["body_bytes"] = request.connection.fd, -1
            node["send_at"], node["send_bytes"] = address_of(np.frombuffer(request.whole, np.uint8)), len(request.whole)
            node["buffer_at"], node["buffer_bytes"] = address_of(buffer), len(buffer)
            buffers.append(buffer)
        kernel.exchange(address_of(nodes), np.empty(len(requests), np.int64), int(until_s * 1e9))
        return [
            self._reply(request.connection, node, buffer)
            for request, node, buffer in zip(requests, nodes, buffers, strict=True)
        ]

    @staticmethod
    def _reply(connection: NodeConnection, node: Any, buffer: npt.NDArray[np.uint8]) -> NodeReply | Exception:
        """The answer that a kernel has read, still in the connection's buffer."""
        status = int(node["status"])
        if status == kernel.DONE:
            begin = int(node["body_at"])
            connection.answered(closes=bool(node["closes"] or node["sent"] < node["send_bytes"]))
            return NodeReply(int(node["http_status"]), buffer[begin : begin + int(node["body_bytes"])].data)
        if status == kernel.TIMED_OUT:
            return TimeoutError("timed out")
        if status == kernel.UNEXPECTED:
            return ValueError("its answer is not HTTP, or longer than expected")
        why = "the connection was closed" if status == kernel.CLOSED else os.strerror(-status)
        return Broken(why, unanswered=bool(node["received"] == 0))

    def _judge(self, request: _Request, reply: NodeReply | Exception) -> Keys:
        """Take over an answer. Returns the places that it lacks."""
        number, places, connection, _ = request
        node = self._table.nodes.nodes[number]
        if isinstance(reply, Exception):
            connection.close()
            self._note(number, reply)
            return places
        if reply.status != 200:
            self._refused(number, f"{node} answers {reply.status}: {reply.problem}")
            node.release(connection)
            return places
        foreign = self._store(number, places, reply)
        node.release(connection)  # its memory has the answer
        return foreign

    def _store(self, number: int, places: Keys, reply: NodeReply) -> Keys:
        """Copy rows and states to their places. Returns the places whose codes the node does not own."""
        seq, body, rows = np.empty(1, np.int64), np.frombuffer(reply.body, np.uint8), self._rows
        foreign = kernel.scatter(
            address_of(body), len(body), places, address_of(rows), rows.strides[0], self._table.row_bytes,
            address_of(self._state), seq,
        )  # fmt: skip
        if foreign == kernel.MALFORMED:
            self._note(
                number,
                Corruption(
                    f"expected rows of {self._table.row_bytes} bytes for {len(places)} keys, got {len(body)} bytes "
                    "of another form"
                ),
            )
            return places
        self._low[0], self._high[0] = min(self._low[0], seq[0]), max(self._high[0], seq[0])
        if foreign:
            self._refused(number, f"{self._table.nodes.nodes[number]} does not own their partitions")
        return places[:foreign]

    def _refused(self, number: int, why: str) -> None:
        """Note that a node does not answer, or that its state differs from what it last reported."""
        self._excluded.add(number)
        self._again.add(number)
        self._why[why] = None
        self._table.source.refresh(number)

    def _note(self, number: int, error: Exception) -> None:
        """Note that a node does not answer."""
        node = self._table.nodes.nodes[number]
        node.pools.suspect(node.address)
        self._refused(number, f"{node} does not answer: {error or type(error).__name__}")
