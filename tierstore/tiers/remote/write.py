"""Writes to the cluster: a version's load, its deltas tag by tag, and its removal.

A version can be read once its tags have watermarks (`finish`), which is after all its rows. A delta goes to each tag by a script on the server, which
refuses an epoch that is too low and a seq that is not the next, and changes rows, watermark and epoch in one step. A large delta goes in chunks; the
watermark then says which delta is being applied, and moves with the last chunk.

A `Writer` is for one thread; it sends to several servers at once. Everything may be done again after a crash: rows are the same rows, an applied
delta is left alone, and a half applied delta is applied from its beginning.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.errors import Corruption, Fenced, RemoteUnavailable, SequenceGap, StorageError
from tierstore.kernels import partitions
from tierstore.kernels.codec import address_of
from tierstore.threads import Pool
from tierstore.tiers.answers import reading
from tierstore.tiers.remote.calls import call, command
from tierstore.tiers.remote.cluster import Cluster
from tierstore.tiers.remote.layout import APPLYING, CHUNK, DIGEST, EPOCH, SEQ, rows_key, slot_of, watermark_key
from tierstore.tiers.remote.scripts import ALREADY, APPLIED, APPLY, FENCED, FORKED, GAP
from tierstore.tiers.remote.tier import RemoteTable
from tierstore.types import Keys, Rows, Tier
from tierstore.wire import resp

_CHUNK_BYTES = 512 << 10  # of a command of a load
_THREADS = 8
_FIRST_STEP = 10_000

T = TypeVar("T")
_reading = reading("what the cluster answers")


class Change(NamedTuple):
    """The changes of a delta to one table: distinct codes int64 [n], rows uint8 [n, row_bytes], and bool [n], True for deleted keys."""

    table: str
    codes: Keys
    rows: Rows
    deleted: npt.NDArray[np.bool_]


class TagState(NamedTuple):
    """A tag's watermark, as stored."""

    seq: int
    applying: int
    epoch: int
    chunk: int
    digest: str = ""  # of the delta `applying`; empty if it is unknown


class Writer:
    """Writes rows and watermarks of one version to the cluster. `row_bytes` is of each table.

    `wait_replicas`: a write counts once so many replicas have it (`WAIT`).
    """

    def __init__(
        self, cluster: Cluster, model: str, version: int, row_bytes: Mapping[str, int], tags: Sequence[bytes],
        *, timeout_s: float = 30.0, wait_replicas: int = 0,
    ) -> None:  # fmt: skip
        self._cluster, self._model, self.version = cluster, model, version
        self._row_bytes, self._tags = dict(row_bytes), list(tags)
        self._slots = [slot_of(tag) for tag in tags]
        self._timeout_s, self._wait_replicas = timeout_s, wait_replicas
        self._script_bytes = cluster.engine.script_bytes
        self._threads = Pool(min(_THREADS, len(tags)), "tierstore-remote-write")

    def close(self) -> None:
        self._threads.shutdown()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- a load

    def write_rows(self, table: str, codes: Keys, rows: Rows) -> None:
        """Write `rows` uint8 [n, row_bytes] of `codes` int64 [n] to the cluster, over existing rows.

        Raises RemoteUnavailable, StorageError (such as when the cluster has no memory).
        """
        rows = self._checked(table, codes, rows)
        order, starts = self._grouped(codes)

        def write(tag: int) -> None:
            per_command = max(1, _CHUNK_BYTES // (rows.shape[1] + resp.KEY_BYTES))
            for start in range(starts[tag], starts[tag + 1], per_command):
                places = order[start : min(start + per_command, starts[tag + 1])]
                self._call(tag, [self._put_command(self._rows_key(tag, table), codes, places, rows)])

        self._on_tags(write, np.flatnonzero(np.diff(starts)).tolist())

    def finish(self, *, seq: int, epoch: int = 0) -> None:
        """Mark the load as complete, with every delta up to `seq`: from now on the version can be read."""
        fields = (SEQ, b"%d" % seq, APPLYING, b"%d" % seq, EPOCH, b"%d" % epoch, CHUNK, b"0")
        self._on_tags(lambda tag: self._call(tag, [command(b"HSET", self._watermark_key(tag), *fields)]))

    @_reading
    def counts(self, table: str) -> list[int]:
        """The number of a table's rows in each tag."""
        return self._on_tags(lambda tag: int(self._call(tag, [command(b"HLEN", self._rows_key(tag, table))])[0]))

    def count(self, table: str) -> int:
        """The number of a table's rows in the cluster."""
        return sum(self.counts(table))

    def verify(self, table: str, rows: int, codes: Keys, sample: Rows) -> None:
        """Compare the number of rows, and the rows of `codes`. Raises Corruption that says what differs.

        After `finish`. `codes` are ascending and distinct.
        """
        found = self.count(table)
        if found != rows:
            raise Corruption(
                f"{self._model}, version {self.version}: table {table} has {found} rows in the cluster, expected {rows}"
            )
        reader = RemoteTable(self._cluster, self._model, self.version, table, self._tags, self._row_bytes[table])
        for start in range(0, len(codes), _FIRST_STEP):
            part = codes[start : start + _FIRST_STEP]
            got, state = np.zeros((len(part), self._row_bytes[table]), np.uint8), np.zeros(len(part), np.uint8)
            reader.fetch(part, got, state, deadline_s=time.monotonic() + self._timeout_s)
            wrong = (state != Tier.REMOTE) | (got != sample[start : start + _FIRST_STEP]).any(axis=1)
            if wrong.any():
                raise Corruption(
                    f"{self._model}, version {self.version}: {int(wrong.sum())} of {len(part)} sampled rows of table "
                    f"{table} differ in the cluster, code {int(part[wrong.argmax()])} first"
                )

    # ---- deltas

    @_reading
    def states(self) -> list[TagState | None]:
        """The watermark of each tag; None if it has none, because the version is not complete or was dropped."""

        def read(tag: int) -> TagState | None:
            request = command(b"HMGET", self._watermark_key(tag), SEQ, APPLYING, EPOCH, CHUNK, DIGEST)
            *numbers, digest = self._call(tag, [request])[0]
            if numbers[0] is None:
                return None
            seq, applying, epoch, chunk = (int(value or 0) for value in numbers)
            named, _, of = (digest or b"").decode().partition(" ")  # earlier releases leave it as it was
            return TagState(seq, applying, epoch, chunk, of if named == str(applying) else "")

        return self._on_tags(read)

    def fence(self, epoch: int) -> None:
        """Refuse, from now on, writes under a lower epoch than this. Raises Fenced if there is a higher one already."""
        self._on_tags(lambda tag: self._run(tag, epoch, 0, "", 0, True, []))

    def apply_delta(self, epoch: int, seq: int, changes: Sequence[Change], digest: str = "") -> list[bool]:
        """Apply delta `seq` to every tag, also to tags that it does not change. Returns for each tag whether the delta was new.

        Raises Fenced, SequenceGap (a tag lacks deltas before this one; `expected_seq` is the lowest), RemoteUnavailable. Some tags may have it then:
        apply it again. Corruption if a tag has rows of this seq from a delta with another digest.
        """
        grouped = [
            (change, self._checked(change.table, change.codes, change.rows), *self._grouped(change.codes))
            for change in changes
        ]

        def apply(tag: int) -> bool:
            chunks = list(_chunked(self._of_tag(tag, grouped), self._script_bytes))
            outcome = ALREADY
            for number, chunk in enumerate(chunks):
                outcome = self._run(tag, epoch, seq, digest, number, number == len(chunks) - 1, chunk)
                if outcome == ALREADY:
                    break
            return outcome == APPLIED

        return self._on_tags(apply)

    def _of_tag(self, tag: int, grouped: Sequence[tuple[Change, Rows, Keys, Keys]]) -> Iterator[_Piece]:
        """A tag's part of the changes, in pieces of the size for one script."""
        for change, rows, order, starts in grouped:
            places = order[starts[tag] : starts[tag + 1]]
            gone = places[change.deleted[places]]
            put = places[~change.deleted[places]]
            step = max(1, self._script_bytes // (8 + rows.shape[1]))
            for start in range(0, len(put), step):
                part = put[start : start + step]
                yield _Piece(change.table, rows.shape[1], change.codes[part].tobytes(), rows[part].tobytes(), b"")
            for start in range(0, len(gone), self._script_bytes // 8):
                yield _Piece(
                    change.table,
                    rows.shape[1],
                    b"",
                    b"",
                    change.codes[gone[start : start + self._script_bytes // 8]].tobytes(),
                )

    @_reading
    def _run(
        self, tag: int, epoch: int, seq: int, digest: str, chunk: int, last: bool, pieces: Sequence[_Piece]
    ) -> int:
        """Run the script on one tag: APPLIED or ALREADY."""
        keys = [self._watermark_key(tag), *(self._rows_key(tag, piece.table) for piece in pieces)]
        arguments = [b"%d" % epoch, b"%d" % seq, b"%d" % (seq - 1), digest.encode(), b"%d" % chunk, b"%d" % last]
        for piece in pieces:
            arguments += [b"%d" % piece.row_bytes, piece.codes, piece.rows, piece.gone]
        outcome, value = self._call(tag, [command(b"EVAL", APPLY, b"%d" % len(keys), *keys, *arguments)])[0]
        what = f"{self._model}, version {self.version}, tag {self._tags[tag].decode()}"
        if outcome == FENCED:
            raise Fenced(
                f"{what}: epoch {epoch} is over, epoch {int(value)} writes now; this node is not the ingester any more",
                epoch=int(value),
            )
        if outcome == GAP:
            raise SequenceGap(f"{what}: expected delta {int(value) + 1}, got {seq}", expected_seq=int(value) + 1)
        if outcome == FORKED:
            raise Corruption(
                f"{what}: it has rows of another delta {seq} than the log has: the cluster has lost that one, and no "
                "node had it any more; load a newer snapshot"
            )
        if outcome not in (APPLIED, ALREADY):
            raise StorageError(f"{what}: there is no watermark: the version is incomplete, or was dropped")
        return int(outcome)

    # ---- the end of a version

    def drop(self, *, pause_s: float = 0.1, check: Callable[[], None] | None = None) -> None:
        """Remove the version: first its watermarks, so that nobody reads half of it, then its rows, one hash at a time.

        The server frees a hash in the background (UNLINK); `pause_s` between two hashes keeps that from piling up. `check` is called between them and
        may raise. May be called again.
        """
        self._on_tags(lambda tag: self._call(tag, [command(b"UNLINK", self._watermark_key(tag))]))
        for table in self._row_bytes:
            for tag in range(len(self._tags)):
                if check is not None:
                    check()
                if self._call(tag, [command(b"UNLINK", self._rows_key(tag, table))])[0]:
                    time.sleep(pause_s)

    # ---- shared helpers

    @_reading
    def _call(self, tag: int, packed: list[Any]) -> list[Any]:
        if not self._wait_replicas:
            return call(self._cluster, self._slots[tag], packed, timeout_s=self._timeout_s)
        wait = command(b"WAIT", b"%d" % self._wait_replicas, b"%d" % int(self._timeout_s * 1000))
        *replies, have = call(self._cluster, self._slots[tag], [*packed, wait], timeout_s=self._timeout_s)
        if have < self._wait_replicas:
            raise RemoteUnavailable(
                f"{have} replicas have what was written to slot {self._slots[tag]}, expected {self._wait_replicas} "
                "(`remote_wait_replicas`): check the cluster's replicas"
            )
        return replies

    def _on_tags(self, work: Callable[[int], T], tags: Sequence[int] | None = None) -> list[T]:
        """`work(tag)` for all tags, several at a time; raises the first error after all have ended."""
        futures = [self._threads.submit(work, tag) for tag in (range(len(self._tags)) if tags is None else tags)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        return [future.result() for future in futures]

    def _grouped(self, codes: Keys) -> tuple[Keys, Keys]:
        order, starts = np.empty(len(codes), np.int64), np.empty(len(self._tags) + 1, np.int64)
        partitions.group(np.ascontiguousarray(codes), np.arange(len(codes)), np.arange(len(self._tags)), order, starts)
        return order, starts

    def _checked(self, table: str, codes: Keys, rows: Rows) -> Rows:
        if rows.shape != (len(codes), self._row_bytes[table]) or rows.dtype != np.uint8:
            raise ValueError(
                f"expected rows uint8[{len(codes)}, {self._row_bytes[table]}], got {rows.dtype}{list(rows.shape)}"
            )
        return np.ascontiguousarray(rows)

    def _put_command(self, key: bytes, codes: Keys, places: Keys, rows: Rows) -> memoryview:
        """The HSET command for the rows at `places`."""
        row_bytes = rows.shape[1]
        head = b"$%d\r\n" % row_bytes
        begin = b"*%d\r\n$4\r\nHSET\r\n$%d\r\n%s\r\n" % (2 + 2 * len(places), len(key), key)
        out = np.empty(len(begin) + len(places) * (resp.KEY_BYTES + len(head) + row_bytes + 2), np.uint8)
        out[: len(begin)] = np.frombuffer(begin, np.uint8)
        resp.encode_rows(
            np.ascontiguousarray(codes), places, address_of(rows), row_bytes, row_bytes, int.from_bytes(head, "little"),
            len(head), address_of(out) + len(begin),
        )  # fmt: skip
        return out.data

    def _watermark_key(self, tag: int) -> bytes:
        return watermark_key(self._tags[tag], self._model, self.version)

    def _rows_key(self, tag: int, table: str) -> bytes:
        return rows_key(self._tags[tag], self._model, self.version, table)


class _Piece(NamedTuple):
    table: str
    row_bytes: int
    codes: bytes
    rows: bytes
    gone: bytes

    @property
    def size(self) -> int:
        return len(self.codes) + len(self.rows) + len(self.gone)


def _chunked(pieces: Iterator[_Piece], most_bytes: int) -> Iterator[list[_Piece]]:
    """Small pieces grouped into chunks; one empty chunk if there are no pieces."""
    chunk: list[_Piece] = []
    for piece in pieces:
        if chunk and sum(one.size for one in chunk) + piece.size > most_bytes:
            yield chunk
            chunk = []
        chunk.append(piece)
    yield chunk
