"""Look-ups in a cluster: one batch of keys of one table, read from all servers at once, with retries.

For one thread. The first try goes to the masters, by kernels over sockets (`wire/resp.py`). What failed is tried again, at the new server of a slot
or at a replica; a slot that is being migrated is read by redis-py's own client, which handles that.

The keys of a tag are a piece. Where the engine answers each connection on a thread of its own, many keys of a tag are several pieces,
which are asked for over several connections: their reads from the drive go beside each other.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.errors import ConfigError, RemoteUnavailable
from tierstore.kernels import partitions
from tierstore.kernels.codec import address_of
from tierstore.tiers.answers import reading
from tierstore.tiers.cluster.connections import ServerConnection, driver
from tierstore.tiers.cluster.options import ServerAddress, port_of
from tierstore.tiers.cluster.redis_keys import APPLYING, SEQ
from tierstore.tiers.cluster.row_requests import TableLayout
from tierstore.tiers.cluster.topology import Cluster
from tierstore.tiers.joining import Watermarks
from tierstore.types import Keys, Rows, States, Tier
from tierstore.wire import resp

_ATTEMPTS = 4
_LANE_KEYS = 128  # of a connection, at least, where a server is asked over several
_PAUSE_S = 0.02  # before another try if the server says that it is not ready


class Cause(Enum):
    STALE = "has closed an idle connection"
    UNREACHABLE = "does not answer"
    BUSY = "is not ready"
    SUSPECT = "is not asked for a moment"
    BEHIND = "is a replica that is behind"
    MOVED = "has given the slot away"
    MIGRATING = "is giving the slot away"
    MISSING = "does not have the version"
    REFUSED = "refuses"


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a piece was not read."""

    cause: Cause
    address: ServerAddress | None
    text: str
    slot: int = -1
    target: ServerAddress | None = None

    def __str__(self) -> str:
        return f"{self.address} {self.cause.value}: {self.text}" if self.address else self.text


_BY_WORD = {
    "CLUSTERDOWN": Cause.BUSY, "LOADING": Cause.BUSY, "MASTERDOWN": Cause.BUSY, "BUSY": Cause.BUSY,
    "TRYAGAIN": Cause.MIGRATING,
    "ASK": Cause.MIGRATING, "MOVED": Cause.MOVED,
}  # fmt: skip


class Read:
    """A read of the places `wanted` of `codes`, into the same places of `rows` and `state`.

    A replica without the delta `floor` is not used.
    """

    def __init__(
        self, cluster: Cluster, table: TableLayout, codes: Keys, wanted: Keys, rows: Rows, state: States, floor: int = 0
    ) -> None:
        self._floor = floor
        self._behind: dict[int, Failure] = {}  # piece → the answer of its replicas
        self._cluster, self._table = cluster, table
        self._codes, self._rows, self._state = codes, rows, state
        tags = len(table.tags)
        self._order = np.empty(len(wanted), np.int64)
        starts = np.empty(tags + 1, np.int64)
        partitions.group(codes, wanted, np.arange(tags), self._order, starts)
        self._lanes = cluster.engine.lanes
        self._tags, self._starts = (
            (np.arange(tags), starts) if self._lanes == 1 else _cut(starts, self._most_keys(len(wanted)))
        )
        self._marks = np.full((len(self._tags), 2), -1, np.int64)
        self._errors = np.zeros((len(self._tags), resp.ERROR_BYTES), np.uint8)
        self._failures: dict[int, Failure] = {}

    def run(self, deadline_s: float) -> Watermarks:
        """Read until done, or until the deadline (of `time.monotonic`).

        Raises RemoteUnavailable for keys that were not read, after all others were.
        """
        pending = np.flatnonzero(np.diff(self._starts)).tolist()
        read = list(pending)
        attempts = 0
        while attempts < _ATTEMPTS:
            topology = self._cluster.topology
            groups, until_s = self._assign(pending, deadline_s, first=attempts == 0 and not self._behind)
            self._exchange(groups, until_s)
            self._clear_failed()
            pending = sorted(self._failures)
            if not pending or time.monotonic() >= deadline_s or not self._prepare_retry(topology, deadline_s):
                break
            if migrating := [piece for piece in pending if self._failures[piece].cause is Cause.MIGRATING]:
                self._read_by_client(migrating)
                pending = sorted(self._failures)
                if not pending:
                    break
            attempts += not self._behind.keys() >= self._failures.keys()  # these have until the deadline
        if pending:
            raise self._error(pending)
        marks = Watermarks.none(len(self._table.tags))
        np.minimum.at(marks.low, self._tags[read], self._marks[read, 0])
        np.maximum.at(marks.high, self._tags[read], self._marks[read, 1])
        return marks

    def _most_keys(self, wanted: int) -> int:
        """The most keys of a piece: as many pieces for each server as there are connections to it."""
        topology = self._cluster.topology
        servers = len({topology[slot][0] for slot in self._table.slots if slot in topology})
        return max(_LANE_KEYS, -(-wanted // (max(1, servers) * self._lanes)))

    def _places(self, piece: int) -> Keys:
        return self._order[self._starts[piece] : self._starts[piece + 1]]

    def _slot(self, piece: int) -> int:
        return self._table.slots[int(self._tags[piece])]

    def _assign(
        self, pieces: Iterable[int], deadline_s: float, *, first: bool
    ) -> tuple[list[tuple[ServerAddress, bool, list[int]]], float]:
        """The pieces by the connection that asks for them (to which server, and whether as a replica), and how long to wait for it."""
        cluster, pools, options = self._cluster, self._cluster.pools, self._cluster.options
        failures = self._failures
        self._failures = {}
        groups: dict[tuple[ServerAddress, bool], list[int]] = defaultdict(list)
        others = False
        for piece in pieces:
            slot = self._slot(piece)
            try:
                master = cluster.master_of(slot)
            except RemoteUnavailable as error:
                self._failures[piece] = Failure(Cause.BUSY, None, str(error))
                continue
            replicas = cluster.replicas_of(slot) if options.other_after_s > 0 else ()
            others |= bool(replicas)
            before = failures.get(piece)
            if not pools.is_suspect(master) or (before is not None and before.cause is Cause.BEHIND):
                groups[master, False].append(piece)
            elif sound := [one for one in replicas if not pools.is_suspect(one)]:
                groups[sound[0], True].append(piece)
            else:
                text = "it has failed a moment ago" if before is None else before.text
                self._failures[piece] = Failure(Cause.SUSPECT, master, text)
        until_s = deadline_s
        if first and others:
            until_s = min(until_s, time.monotonic() + options.other_after_s)
        return [(*server, lane) for server, of in groups.items() for lane in self._in_lanes(of)], until_s

    def _in_lanes(self, pieces: list[int]) -> list[list[int]]:
        """The pieces of a server by the connection to it."""
        keys = int(np.diff(self._starts)[pieces].sum())
        lanes = min(self._lanes, max(1, keys // _LANE_KEYS))
        return [pieces[lane::lanes] for lane in range(min(lanes, len(pieces)))]

    def _exchange(self, groups: list[tuple[ServerAddress, bool, list[int]]], until_s: float) -> None:
        """Ask all servers at once; fill rows and states, and `_failures`."""
        table = self._table
        opened: list[tuple[ServerConnection, bool, list[int]]] = []
        commands: list[tuple[int, int, int, int]] = []
        servers = resp.SERVER.new(len(groups))
        requests: list[npt.NDArray[np.uint8]] = []
        try:
            for address, replica, pieces in groups:
                try:
                    wait_s = max(0.001, (until_s - time.monotonic()) / 2)  # the others still get their time
                    connection = self._cluster.connections.acquire(address, replica=replica, timeout_s=wait_s)
                except (RemoteUnavailable, ConfigError) as error:
                    cause = Cause.UNREACHABLE if isinstance(error, RemoteUnavailable) else Cause.REFUSED
                    self._failures.update((piece, Failure(cause, address, str(error))) for piece in pieces)
                    continue
                connection.fit(table.element_bytes)
                server = servers[len(opened)]
                opened.append((connection, replica, pieces))
                server["command"] = len(commands)
                requests.append(table.request(pieces, self._tags, self._codes, self._order, self._starts, commands))
                server["end"], server["item"] = len(commands), -1
                server["send_at"], server["send_bytes"] = address_of(requests[-1]), len(requests[-1])
                server["buffer_at"], server["buffer_bytes"] = address_of(connection.buffer), connection.buffer_bytes
                server["fd"] = connection.socket.fileno()
            servers = servers[: len(opened)]
            self._marks[[piece for _, _, pieces in opened for piece in pieces]] = -1
            self._errors[:] = 0
            program = np.array(commands, resp.COMMAND.dtype)
            self._transfer([one for one, _, _ in opened], servers, requests, program, until_s)
        except BaseException:
            for connection, _, _ in opened:
                connection.close()
            raise
        for (connection, replica, pieces), status in zip(opened, servers["status"].tolist(), strict=True):
            self._judge(connection, replica, pieces, status)

    def _transfer(
        self,
        connections: list[ServerConnection],
        servers: npt.NDArray[Any],
        requests: list[npt.NDArray[np.uint8]],
        commands: npt.NDArray[Any],
        until_s: float,
    ) -> None:
        table, rows = self._table, self._rows
        targets = resp.TARGETS.make(
            commands=address_of(commands), order_at=address_of(self._order), rows_at=address_of(rows),
            stride=rows.strides[0],
            row_bytes=table.row_bytes, head=table.head, head_bytes=table.head_bytes, states_at=address_of(self._state),
            marks_at=address_of(self._marks), errors_at=address_of(self._errors),
        )  # fmt: skip
        if not self._cluster.endpoints.tls:
            polled = np.empty(len(servers), np.int64)
            resp.exchange(address_of(servers), polled, int(until_s * 1e9), address_of(targets))
            early = (servers["status"] == resp.DONE) & (servers["sent"] < servers["send_bytes"])
            servers["status"][early] = resp.UNEXPECTED  # replies that follow could not be matched to requests
            return
        for connection, server, request in zip(connections, servers, requests, strict=True):
            server["status"] = _status_of(lambda c=connection, r=request: c.send(r, until_s))
        for i, (connection, server) in enumerate(zip(connections, servers, strict=True)):
            while server["status"] == resp.RUNNING:
                server["status"] = _status_of(lambda c=connection, s=server: c.receive(s, until_s))
                if server["status"] == resp.RUNNING:
                    resp.parse(address_of(servers[i:]), address_of(targets))

    def _judge(self, connection: ServerConnection, replica: bool, pieces: list[int], status: int) -> None:
        """After an exchange: keep the connection or close it, and note which pieces were not read."""
        address = connection.address
        if status == resp.DONE:
            self._cluster.connections.release(connection, replica=replica)
            for piece in pieces:
                if failure := self._failure_of(piece, address, replica):
                    self._failures[piece] = failure
            return
        connection.close()
        if status == resp.TIMED_OUT:
            failure = Failure(Cause.UNREACHABLE, address, "no complete answer in time")
        elif status == resp.UNEXPECTED:
            failure = Failure(
                Cause.REFUSED,
                address,
                f"its answer is not rows of {self._table.row_bytes} bytes, as {self._table} has them",
            )
        elif connection.used:
            failure = Failure(Cause.STALE, address, "the connection was closed")
        else:
            failure = Failure(Cause.UNREACHABLE, address, "it closed the connection")
        self._failures.update(dict.fromkeys(pieces, failure))

    def _failure_of(self, piece: int, address: ServerAddress, replica: bool) -> Failure | None:
        """The failure that the replies for one piece report, or None."""
        if self._errors[piece, 0]:
            text = self._errors[piece].tobytes().rstrip(b"\0").decode(errors="replace")
            word, _, details = text.partition(" ")
            target = None
            if word == "MOVED":
                host, _, port = details.rpartition(" ")[2].rpartition(":")
                with suppress(ValueError):
                    target = ServerAddress(host or address.host, port_of(port))
            return Failure(_BY_WORD.get(word, Cause.REFUSED), address, text, self._slot(piece), target)
        if self._marks[piece, 0] < 0 or self._marks[piece, 1] < 0:
            return Failure(
                Cause.MISSING,
                address,
                f"there is no watermark of {self._table} under the tag {self._table.tags[self._tags[piece]].decode()}",
            )
        if replica and self._marks[piece, 0] < self._floor:
            text = f"it has deltas up to {self._marks[piece, 0]}, and its master had them up to {self._floor}"
            self._behind[piece] = Failure(Cause.BEHIND, address, text)
            return self._behind[piece]
        return None

    def _clear_failed(self) -> None:
        for piece in self._failures:
            self._state[self._places(piece)] = Tier.PENDING

    def _prepare_retry(self, seen: Any, deadline_s: float) -> bool:
        """Decide from the failures where to ask next. False if another try is of no use."""
        cluster = self._cluster
        causes = {failure.cause for failure in self._failures.values()}
        if causes <= {Cause.REFUSED, Cause.MISSING, Cause.SUSPECT}:
            return False
        for failure in set(self._failures.values()):
            if failure.address is None:
                continue
            if failure.cause is Cause.STALE:
                cluster.pools.forget(failure.address)
            elif failure.cause is Cause.UNREACHABLE or failure.text.startswith("LOADING"):
                cluster.pools.suspect(failure.address)
        if causes & {Cause.UNREACHABLE, Cause.BUSY, Cause.MOVED}:
            try:
                cluster.refresh(seen, deadline_s)
            except (RemoteUnavailable, ConfigError):
                return Cause.STALE in causes
            for failure in set(self._failures.values()):
                if failure.target is not None:
                    cluster.moved(failure.slot, failure.target)
        if causes & {Cause.BUSY, Cause.BEHIND}:
            time.sleep(max(0.0, min(_PAUSE_S, deadline_s - time.monotonic())))
        return True

    def _read_by_client(self, pieces: list[int]) -> None:
        """Read pieces whose slot is being migrated: redis-py follows it from server to server."""
        redis = driver()
        table, client = self._table, self._cluster.client
        for piece in pieces:
            tag, places = self._tags[piece], self._places(piece)
            fields = np.ascontiguousarray(self._codes[places]).view("V8").tolist()
            try:
                with reading(f"what the cluster answers for slot {table.slots[tag]}"):
                    (low, _), values, marks = (
                        client.execute_command("HMGET", table.watermark_keys[tag], SEQ, APPLYING),
                        client.execute_command("HMGET", table.rows_keys[tag], *fields),
                        client.execute_command("HMGET", table.watermark_keys[tag], SEQ, APPLYING),
                    )
                    found = np.array([value is not None for value in values], np.bool_)
                    joined = np.frombuffer(b"".join(value for value in values if value is not None), np.uint8)
                    there = joined.reshape(int(np.count_nonzero(found)), table.row_bytes)
                    if len(found) != len(places):
                        raise ValueError(f"expected {len(places)} rows, got {len(found)}")
                    bounds = int(low or 0), max(int(mark or 0) for mark in marks)
                    if not 0 <= bounds[0] <= bounds[1] < 1 << 63:
                        raise ValueError(f"expected a watermark, got {bounds}")
            except (redis.RedisError, OSError) as error:
                self._failures[piece] = Failure(Cause.BUSY, None, f"slot {table.slots[tag]} is being migrated: {error}")
                continue
            if low is None or marks[0] is None:
                self._failures[piece] = Failure(
                    Cause.MISSING, None, f"there is no watermark of {table} while its slot moves"
                )
                continue
            del self._failures[piece]
            self._rows[places[found]] = there
            self._state[places] = np.where(found, Tier.REMOTE, Tier.ABSENT)
            self._marks[piece] = bounds

    def _error(self, pending: list[int]) -> RemoteUnavailable:
        keys = np.sort(np.concatenate([self._codes[self._places(piece)] for piece in pending]))
        failures = [
            failure for piece in pending for failure in (self._failures[piece], self._behind.get(piece)) if failure
        ]
        reasons = dict.fromkeys(map(str, failures))
        return RemoteUnavailable(
            f"{len(keys)} keys of {self._table} could not be read: {'; '.join(list(reasons)[:3])}", keys=keys.tolist()
        )


def _cut(starts: Keys, most: int) -> tuple[Keys, Keys]:
    """Cut what begins at `starts` into pieces of at most `most`: of which part each piece is, and where pieces begin."""
    counts = np.diff(starts)
    per_part = np.maximum(1, -(-counts // most))
    parts = np.repeat(np.arange(len(counts)), per_part)
    number = np.arange(len(parts)) - np.repeat(np.cumsum(per_part) - per_part, per_part)
    begins = starts[parts] + number * counts[parts] // per_part[parts]
    return parts, np.append(begins, starts[-1])


def _status_of(call: Any) -> int:
    """The status of a transfer through Python."""
    try:
        return resp.RUNNING if call() else resp.CLOSED
    except TimeoutError:
        return resp.TIMED_OUT
    except OSError:
        return resp.CLOSED
