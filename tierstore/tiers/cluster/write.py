"""Writes to the cluster: a version's load, its deltas tag by tag, and its removal.

A version can be read once its tags have watermarks (`finish`), which is after all its rows. A delta goes to each tag by a script on the server, which
refuses an epoch that is too low and a seq that is not the next, and changes rows, watermark and epoch in one step. A large delta goes in chunks; the
watermark then says which delta is being applied, and moves with the last chunk.

A `Writer` is for one thread; it sends to several servers at once. Everything may be done again after a crash: rows are the same rows, an applied
delta is left alone, and a half applied delta is applied from its beginning.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.errors import Conflict, Corruption, Fenced, SequenceGap, StorageError
from tierstore.kernels import partitions
from tierstore.kernels.codec import address_of
from tierstore.threads import Pool
from tierstore.tiers.answers import reading
from tierstore.tiers.cluster.commands import Packed, call, call_if, command
from tierstore.tiers.cluster.redis_keys import (
    APPLYING,
    CHUNK,
    DIGEST,
    EPOCH,
    LOAD,
    SEQ,
    TO,
    UNDONE,
    WAS,
    before_digest,
    before_key,
    rows_key,
    slot_of,
    watermark_key,
)
from tierstore.tiers.cluster.row_requests import MOST_FIELDS
from tierstore.tiers.cluster.scripts import ALREADY, APPLIED, APPLY, FENCED, FORKED, GAP
from tierstore.tiers.cluster.topology import Cluster
from tierstore.tiers.joining import REPLACED
from tierstore.types import Keys, Rows
from tierstore.wire import resp

_CHUNK_BYTES = 512 << 10  # of a command of a load
_THREADS = 8

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


class Reached(NamedTuple):
    """What the tags of a line have, for a rollback.

    `newest`: the newest delta of which there are rows; `lowest`: the newest one that all tags have whole, None if tags are gone. `undone`: the newest
    delta when the rollback of a tag has ended, None if none has; `left`: the tags whose rollback has not. `begun`: the deltas to which tags are rolled
    back.
    """

    newest: int
    lowest: int | None
    undone: int | None
    left: tuple[int, ...]
    begun: frozenset[int]


class Writer:
    """Writes rows and watermarks of one version to the cluster. `row_bytes` is of each table, `line` that of the watermarks.

    `load`: the load that writes rows, which each tag compares: what a
    process sends that was stopped meanwhile, and whose load has ended, changes nothing. Empty: nothing is compared.
    """

    def __init__(
        self, cluster: Cluster, model: str, version: int, row_bytes: Mapping[str, int], tags: Sequence[bytes],
        *, line: int = 0, load: str = "", is_on: Callable[[], bool] = lambda: False, timeout_s: float = 30.0,
    ) -> None:  # fmt: skip
        """`is_on`: whether the load goes on, for a tag that has lost its name with a server."""
        self._cluster, self._model, self.version = cluster, model, version
        self._row_bytes, self._tags = dict(row_bytes), list(tags)
        self._slots, self.line = [slot_of(tag) for tag in tags], line
        self._load, self._is_on = load.encode(), is_on
        self._ended = b"-" + self._load if load else b""
        self._timeout_s = timeout_s
        self._script_bytes = cluster.engine.script_bytes
        self._threads = Pool(min(_THREADS, len(tags)), "tierstore-remote-write")

    def close(self) -> None:
        self._threads.shutdown()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- a load

    def begin(self, check: Callable[[], None] = lambda: None, *, remove_only: bool = False) -> None:
        """Remove the rows that are there, and let this load write from now on, and no other one; not if `remove_only`.

        A tag that has begun this load is left alone: another node may have written to it since. `check` raises if the load is over its beginning.
        """

        def begin(tag: int) -> None:
            key = self._watermark_key(tag)
            gone = [key, self._before_key(tag), *(self._rows_key(tag, table) for table in self._row_bytes)]
            packed = [command(b"UNLINK", one) for one in gone]
            if not remove_only:
                packed.append(command(b"HSET", key, LOAD, self._load))
            while (held := self._load_of(tag)) != self._load:
                check()
                if self._if_load(tag, held, packed)[0] is not None:
                    return

        self._on_tags(begin)

    def write_rows(self, table: str, codes: Keys, rows: Rows) -> None:
        """Write `rows` uint8 [n, row_bytes] of `codes` int64 [n] to the cluster, over existing rows.

        Raises RemoteUnavailable, StorageError (such as when the cluster has no memory), Conflict if the load has ended.
        """
        rows = self._checked(table, codes, rows)
        order, starts = self._grouped(codes)

        def write(tag: int) -> None:
            per_command = max(1, _CHUNK_BYTES // (rows.shape[1] + resp.KEY_BYTES))
            for start in range(starts[tag], starts[tag + 1], per_command):
                places = order[start : min(start + per_command, starts[tag + 1])]
                self._write(tag, [self._put_command(self._rows_key(tag, table), codes, places, rows)])

        self._on_tags(write, np.flatnonzero(np.diff(starts)).tolist())

    def finish(self, *, seq: int, epoch: int = 0) -> None:
        """Mark the load as complete, with every delta up to `seq`: from now on the version can be read."""
        fields = (SEQ, b"%d" % seq, APPLYING, b"%d" % seq, EPOCH, b"%d" % epoch, CHUNK, b"0", LOAD, self._ended)
        self._on_tags(lambda tag: self._write(tag, [command(b"HSET", self._watermark_key(tag), *fields)], ended=True))

    def _write(self, tag: int, packed: list[Packed], *, ended: bool = False) -> None:
        """Write for the load. `ended`: nothing, if the load of this tag has ended."""
        if not self._load:
            self._call(tag, packed)
            return
        key = self._watermark_key(tag)
        while True:
            replies, load = self._if_load(tag, self._load, packed)
            if replies is not None or (ended and load in (self._ended, b"")):  # b"": by a node of an earlier release
                return
            if load is not None or not self._is_on():
                raise Conflict(
                    f"version {self.version} of {self._model!r} is not being loaded by this load any more: another node has "
                    "ended it, or dropped the version"
                )
            # a server has lost it; a load that has ended leaves its mark, and another one puts its own there
            self._call(tag, [command(b"HSETNX", key, LOAD, self._load)])

    def _load_of(self, tag: int) -> bytes | None:
        held: bytes | None = self._call(tag, [command(b"HGET", self._watermark_key(tag), LOAD)])[0]
        return held

    def _if_load(self, tag: int, load: bytes | None, packed: Sequence[Packed]) -> tuple[list[Any] | None, bytes | None]:
        """Send commands if a tag is of this load; see `call_if`."""
        key, slot = self._watermark_key(tag), self._slots[tag]
        return call_if(self._cluster, slot, key, LOAD, load, packed, timeout_s=self._timeout_s)

    @_reading
    def counts(self, table: str) -> list[int]:
        """The number of a table's rows in each tag."""
        return self._on_tags(lambda tag: int(self._call(tag, [command(b"HLEN", self._rows_key(tag, table))])[0]))

    @_reading
    def read_rows(self, table: str, codes: Keys) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """Rows as they are now, whatever the watermarks say, uint8 [n, row_bytes], and which of them are there."""
        order, starts = self._grouped(codes)
        rows = np.zeros((len(codes), self._row_bytes[table]), np.uint8)
        found = np.zeros(len(codes), np.bool_)

        def read(tag: int) -> None:
            places = order[starts[tag] : starts[tag + 1]]
            rows[places], found[places] = self._rows_of_tag(tag, table, codes[places])

        self._on_tags(read, np.flatnonzero(np.diff(starts)).tolist())
        return rows, found

    @_reading
    def _rows_of_tag(self, tag: int, table: str, codes: Keys) -> tuple[Rows, npt.NDArray[np.bool_]]:
        """`read_rows` of codes that are all under one tag."""
        rows, found = np.zeros((len(codes), self._row_bytes[table]), np.uint8), np.zeros(len(codes), np.bool_)
        for start in range(0, len(codes), MOST_FIELDS):
            part = slice(start, start + MOST_FIELDS)
            fields = np.ascontiguousarray(codes[part]).view("V8").tolist()
            values = self._call(tag, [command(b"HMGET", self._rows_key(tag, table), *fields)])[0]
            there = np.array([value is not None for value in values], np.bool_)
            joined = np.frombuffer(b"".join(value for value in values if value is not None), np.uint8)
            rows[part][there], found[part] = joined.reshape(-1, rows.shape[1]), there
        return rows, found

    def verify(self, table: str, codes: Keys, sample: Rows) -> None:
        """Compare the rows of `codes`, which are distinct. Raises Corruption that says what differs."""
        got, found = self.read_rows(table, codes)
        wrong = ~found | (got != sample).any(axis=1)
        if wrong.any():
            raise Corruption(
                f"{self._model}, version {self.version}: {int(wrong.sum())} of {len(codes)} sampled rows of table "
                f"{table} differ in the cluster, code {int(codes[wrong.argmax()])} first"
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

    # ---- rollbacks

    def keep_before(self, epoch: int, seq: int, changes: Sequence[Change], digest: str = "") -> None:
        """Keep the rows that a delta will replace, before the first of them is changed. Fenced.

        What was kept is left alone once rows of the delta may be there; before that it may be of another delta of this seq, which the cluster has lost.
        While a rollback fills a line it is left alone if it is of a delta with the same digest.
        """
        grouped = [(change.table, change.codes, *self._grouped(change.codes)) for change in changes]

        def keep(tag: int) -> None:
            key, named = self._before_key(tag), digest.encode()
            asked = [command(b"HGET", self._watermark_key(tag), APPLYING), command(b"HGET", key, before_digest(seq))]
            applying, of = self._call(tag, asked)
            if of == named if applying is None else int(applying) >= seq:
                return
            parts = [(table, codes[order[starts[tag] : starts[tag + 1]]]) for table, codes, order, starts in grouped]
            pieces = [(table, codes, *self._rows_of_tag(tag, table, codes)) for table, codes in parts if len(codes)]
            self._guarded(
                tag, epoch, [command(b"HSET", key, b"%d" % seq, _packed_rows(pieces), before_digest(seq), named)]
            )

        self._on_tags(keep)

    @_reading
    def lack_before(self, seqs: Sequence[int], tags: Sequence[int] | None = None) -> list[int]:
        """The deltas, out of these, of which there are rows under a tag, out of `tags`, that has not kept what they replaced."""
        if not seqs:
            return []

        def lack(tag: int) -> set[int]:
            newest = self._newest(tag)
            sizes = [command(b"HSTRLEN", self._before_key(tag), b"%d" % seq) for seq in seqs]
            return {seq for seq, size in zip(seqs, self._call(tag, sizes), strict=True) if seq <= newest and not size}

        found = set().union(*self._on_tags(lack, tags))
        return [seq for seq in seqs if seq in found]

    @_reading
    def forget_before(self, upto: int) -> None:
        """Deltas up to `upto` are not rolled back any more."""

        def forget(tag: int) -> None:
            key = self._before_key(tag)
            fields = self._call(tag, [command(b"HKEYS", key)])[0]
            if old := [field for field in fields if int(field.split(b" ")[0]) <= upto]:
                self._call(tag, [command(b"HDEL", key, *old)])

        self._on_tags(forget)

    @_reading
    def _newest(self, tag: int) -> int:
        """The newest delta of which this line has rows under a tag, also after it was replaced."""
        applying, was = (
            int(field or 0)
            for field in self._call(tag, [command(b"HMGET", self._watermark_key(tag), APPLYING, WAS)])[0]
        )
        return was if applying == REPLACED else applying

    @_reading
    def reached(self) -> Reached:
        """What the tags have, also after this line was replaced."""

        def read(tag: int) -> tuple[int, bytes | None, bytes | None, bytes | None]:
            later = watermark_key(self._tags[tag], self._model, self.version, self.line + 1)
            asked = [command(b"HMGET", self._watermark_key(tag), SEQ, TO), command(b"HGET", later, UNDONE)]
            (seq, to), undone = self._call(tag, asked)
            return self._newest(tag), seq, to, undone

        newest, seqs, tos, ends = zip(*self._on_tags(read), strict=True)
        undone = max((int(end) for end in ends if end is not None), default=None)
        return Reached(
            max(newest),
            None if None in seqs else min(map(int, seqs)),
            undone,
            tuple(tag for tag, end in enumerate(ends) if end is None or int(end) != undone),
            frozenset(int(to) for to in tos if to is not None),
        )

    def replace_line(self, epoch: int, to: int) -> Writer:
        """Refuse reads of this line from now on. Returns the writer of the next one, which can be read after `end_line`. Fenced."""
        later = Writer(
            self._cluster, self._model, self.version, self._row_bytes, self._tags, line=self.line + 1,
            timeout_s=self._timeout_s,
        )  # fmt: skip

        def replace(tag: int) -> None:
            self._take(tag, epoch)
            key = self._watermark_key(tag)
            applying = int(self._call(tag, [command(b"HGET", key, APPLYING)])[0] or 0)
            if applying != REPLACED:
                words = (WAS, b"%d" % applying, TO, b"%d" % to, APPLYING, b"%d" % REPLACED)
                self._guarded(tag, epoch, [command(b"HSET", key, *words)])
            later._take(tag, epoch)

        self._on_tags(replace)
        return later

    def put_before(self, epoch: int, seq: int, tags: Sequence[int] | None = None) -> None:
        """Put back the rows that a delta has replaced under the tags that have rows of it. For the line that was replaced.

        Fenced; Corruption if they are not kept.
        """

        def put(tag: int) -> None:
            if self._newest(tag) < seq:
                return
            kept = self._call(tag, [command(b"HGET", self._before_key(tag), b"%d" % seq)])[0]
            if kept is None:
                raise Corruption(f"{self._model}, version {self.version}: the rows that delta {seq} replaced are gone")
            for table, codes, rows, found in _unpacked_rows(kept, self._row_bytes):
                self._set_rows(tag, epoch, Change(table, codes, rows, ~found))

        self._on_tags(put, tags)

    def put_rows(self, epoch: int, changes: Sequence[Change], tags: Sequence[int] | None = None) -> None:
        """Write a delta's rows to a line that cannot be read yet. Fenced."""
        grouped = [(change, *self._grouped(change.codes)) for change in changes]

        def put(tag: int) -> None:
            for change, order, starts in grouped:
                at = order[starts[tag] : starts[tag + 1]]
                self._set_rows(tag, epoch, Change(change.table, change.codes[at], change.rows[at], change.deleted[at]))

        self._on_tags(put, tags)

    def end_line(self, epoch: int, seq: int, digest: str, tags: Sequence[int] | None = None) -> None:
        """The rows are those of this line, with every delta up to `seq`: from now on it can be read. Fenced."""
        value = b"%d" % seq
        words = (SEQ, value, APPLYING, value, UNDONE, value, CHUNK, b"0", DIGEST, b"%s %s" % (value, digest.encode()))
        self._on_tags(lambda tag: self._guarded(tag, epoch, [command(b"HSET", self._watermark_key(tag), *words)]), tags)

    def _set_rows(self, tag: int, epoch: int, change: Change) -> None:
        key, rows = self._rows_key(tag, change.table), np.ascontiguousarray(change.rows)
        put, gone = np.flatnonzero(~change.deleted), np.flatnonzero(change.deleted)
        step = max(1, _CHUNK_BYTES // (rows.shape[1] + resp.KEY_BYTES))
        for start in range(0, len(put), step):
            self._guarded(tag, epoch, [self._put_command(key, change.codes, put[start : start + step], rows)])
        for start in range(0, len(gone), MOST_FIELDS):
            fields = np.ascontiguousarray(change.codes[gone[start : start + MOST_FIELDS]]).view("V8").tolist()
            self._guarded(tag, epoch, [command(b"HDEL", key, *fields)])

    def _take(self, tag: int, epoch: int) -> None:
        """Refuse writers of lower epochs. Fenced if there is a higher one."""
        key, value = self._watermark_key(tag), b"%d" % epoch
        held = self._call(tag, [command(b"HGET", key, EPOCH)])[0]
        while held != value:
            self._check_epoch(tag, epoch, held)
            if held is None:
                self._call(tag, [command(b"HSETNX", key, EPOCH, value)])
            else:
                call_if(
                    self._cluster, self._slots[tag], key, EPOCH, held, [command(b"HSET", key, EPOCH, value)],
                    timeout_s=self._timeout_s,
                )  # fmt: skip
            held = self._call(tag, [command(b"HGET", key, EPOCH)])[0]

    def _guarded(self, tag: int, epoch: int, packed: list[Packed]) -> None:
        """Send commands, if no other writer has a tag by now. Fenced."""
        replies, held = call_if(
            self._cluster, self._slots[tag], self._watermark_key(tag), EPOCH, b"%d" % epoch, packed,
            timeout_s=self._timeout_s,
        )  # fmt: skip
        if replies is None:
            self._check_epoch(tag, epoch, held)
            raise StorageError(
                f"{self._model}, version {self.version}, tag {self._tags[tag].decode()}: it lost its epoch"
            )

    def _check_epoch(self, tag: int, epoch: int, held: bytes | None) -> None:
        if held is not None and int(held) > epoch:
            raise Fenced(
                f"{self._model}, version {self.version}, tag {self._tags[tag].decode()}: epoch {epoch} is over, epoch "
                f"{int(held)} writes now; this node is not the ingester any more",
                epoch=int(held),
            )

    # ---- the end of a version

    def drop(self, *, pause_s: float = 0.1, check: Callable[[], None] | None = None) -> None:
        """Remove the version: first its watermarks, so that nobody reads half of it, then its rows, one hash at a time.

        The server frees a hash in the background (UNLINK); `pause_s` between two hashes keeps that from piling up. `check` is called between them and
        may raise. May be called again. Conflict, and nothing more is removed, if another load has begun under this number.
        """

        def remove(tag: int) -> None:
            lines = [watermark_key(self._tags[tag], self._model, self.version, line) for line in range(self.line + 1)]
            gone = [command(b"UNLINK", key) for key in (*lines, self._before_key(tag))]
            of_it = (None, b"", self._load, self._ended)  # b"": of an earlier release
            while (held := self._load_of(tag)) in of_it or not self._load:
                if self._if_load(tag, held, gone)[0] is not None:
                    return
            raise self._is_anew()

        self._on_tags(remove)
        for table in self._row_bytes:
            for tag in range(len(self._tags)):
                if check is not None:
                    check()
                replies, _ = self._if_load(tag, None, [command(b"UNLINK", self._rows_key(tag, table))])
                if replies is None:
                    raise self._is_anew()
                if replies[0]:
                    time.sleep(pause_s)

    def _is_anew(self) -> Conflict:
        return Conflict(
            f"version {self.version} of {self._model!r} is not removed: another load has begun under this number"
        )

    # ---- shared helpers

    @_reading
    def _call(self, tag: int, packed: list[Any]) -> list[Any]:
        return call(self._cluster, self._slots[tag], packed, timeout_s=self._timeout_s)

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
        return watermark_key(self._tags[tag], self._model, self.version, self.line)

    def _before_key(self, tag: int) -> bytes:
        return before_key(self._tags[tag], self._model, self.version)

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


def _packed_rows(pieces: Sequence[tuple[str, Keys, Rows, npt.NDArray[np.bool_]]]) -> bytes:
    """Rows of some tables as one value: a line of JSON, then by table the codes, which of them are there, and their rows."""
    head = json.dumps([[table, len(codes)] for table, codes, _, _ in pieces]).encode()
    parts = [
        part
        for _, codes, rows, found in pieces
        for part in (np.ascontiguousarray(codes).tobytes(), found.tobytes(), rows[found].tobytes())
    ]
    return b"\n".join([head, b"".join(parts)])


@_reading
def _unpacked_rows(value: bytes, row_bytes: Mapping[str, int]) -> list[tuple[str, Keys, Rows, npt.NDArray[np.bool_]]]:
    """What `_packed_rows` has packed; rows that were not there are zeros."""
    head, _, content = value.partition(b"\n")
    pieces, at = [], 0
    for table, count in json.loads(head):
        codes = np.frombuffer(content, np.int64, count, at)
        found = np.frombuffer(content, np.bool_, count, at + 8 * count)
        rows = np.zeros((count, row_bytes[table]), np.uint8)
        at += 9 * count
        there = int(np.count_nonzero(found))
        rows[found] = np.frombuffer(content, np.uint8, there * rows.shape[1], at).reshape(there, rows.shape[1])
        at += there * rows.shape[1]
        pieces.append((str(table), codes, rows, found))
    if at != len(content):
        raise ValueError(f"expected {at} bytes of rows, got {len(content)}")
    return pieces


def _chunked(pieces: Iterator[_Piece], most_bytes: int) -> Iterator[list[_Piece]]:
    """Small pieces grouped into chunks; one empty chunk if there are no pieces."""
    chunk: list[_Piece] = []
    for piece in pieces:
        if chunk and sum(one.size for one in chunk) + piece.size > most_bytes:
            yield chunk
            chunk = []
        chunk.append(piece)
    yield chunk
