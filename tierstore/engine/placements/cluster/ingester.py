"""The ingester: the node with a model's lease applies acknowledged deltas to the rows in the cluster, and cleans up
there.

Every node has such a thread; the lease decides which one works. The others only check whether the rows are there. The
lease has an epoch, which each tag compares as it changes rows: a node that has lost the lease without knowing is
refused. A delta goes to all tags of a version before the next one does. It waits until every node that reports has the
delta and reads no view from before it, so that no request finds rows that are newer than its view. A silent node is
not waited for: it notices by the rows that it reads.

After a crash another node goes on from what the tags say; a delta that only some of them have is sent to all again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tierstore.config import Settings
from tierstore.engine.data.overlay import Overlay, encode_delta
from tierstore.engine.deltas.incoming import DecodedDeltas
from tierstore.engine.deltas.retention import may_go
from tierstore.engine.lifecycle.rules import is_to_serve, surplus_of
from tierstore.engine.model import Model
from tierstore.engine.placements.cluster.shared_load import SharedLoad
from tierstore.engine.placements.cluster.shared_model import SharedModel
from tierstore.engine.placements.cluster.target import DROPPING, LOADING, READY, Writers
from tierstore.engine.placements.cluster.undo import Undo, changes_of, graphs_of
from tierstore.engine.placements.following.followed import LogEntry, Pointer
from tierstore.engine.versions.info import VersionInfo
from tierstore.errors import DeltaError, Fenced, SequenceGap, StorageError, TierstoreError
from tierstore.threads import Thread
from tierstore.tiers.cluster.write import Writer
from tierstore.tiers.joining import REPLACED

log = logging.getLogger(__name__)

PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.1  # between two turns of the node with the lease: after work, and in quiet
CLEAN_EVERY_S = 5.0
STALLED_S = 10.0  # a node whose seq does not move for so long is not waited for
BATCH = 64


class LeaseLost(TierstoreError):
    """Another node may have the lease by now."""


class Ingester:
    """Applies deltas to one model's rows in the cluster while the node `node` has the lease."""

    def __init__(
        self, model: Model, shared: SharedModel, node: str, settings: Settings, open_writer: Writers,
        decoded: DecodedDeltas, open_load: Callable[[int], SharedLoad],
    ) -> None:  # fmt: skip
        # constant after construction
        self._model, self._shared, self._node, self._settings = model, shared, node, settings
        self._open_writer, self._decoded, self._open_load = open_writer, decoded, open_load
        self._undo = Undo(shared, self._writer_for, self._encode)
        self._thread = Thread(target=self._run, name=f"tierstore-ingest-{model.name}", daemon=True)
        self._stopping = threading.Event()
        # written by the thread; others may read
        self.epoch: int | None = None  # set while this node has the lease
        self.problem: str | None = None
        # for the thread
        self._acquired_s = 0.0
        self._above = 0  # the newest epoch for which a tag has refused this node
        self._writers: dict[int, Writer] = {}  # by version; their tags refuse epochs below `epoch`
        self._reached: dict[int, int] = {}  # by version, the seq that all tags have
        self._nodes: dict[str, tuple[int, float]] = {}  # node → its seq, and since when
        self._cleaned_s = 0.0
        self._lost_s: dict[int, float] = {}  # version → since when the log lacks deltas that its rows have
        self._failed: dict[int, str] = {}  # version → why deltas are not applied to it

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, and give the lease up. May be called if it was never started."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._forget()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            try:
                worked = self._turn()
                if self.epoch is None:
                    pause_s = self._settings.remote_lease_s / 5
                else:
                    pause_s = PAUSE_S if worked else min(LONGEST_PAUSE_S, pause_s * 1.5)
                self.problem = "; ".join(self._failed.values()) or None
            except (Fenced, LeaseLost) as error:
                log.warning("model %s: %s", self._model.name, error)
                self._above = max(self._above, error.epoch if isinstance(error, Fenced) else 0)
                self._forget()
                pause_s = self._settings.remote_lease_s / 5
            except Exception as error:
                if str(error) != self.problem:
                    log.error(
                        "model %s: deltas do not go on into the cluster: %s", self._model.name, error,
                        exc_info=not isinstance(error, TierstoreError),
                    )  # fmt: skip
                self.problem = str(error)
                self._forget()  # read again what the tags have
                pause_s = 0.5
        if self.epoch is not None or self._acquired_s:
            try:
                self._shared.release(self._node)
            except StorageError as error:
                log.warning("model %s: the lease ends by itself: %s", self._model.name, error)

    def _forget(self) -> None:
        for number in list(self._writers):
            self._close_writer(number)
        self._failed, self.epoch = {}, None

    def _close_writer(self, number: int) -> None:
        self._reached.pop(number, None)
        if (writer := self._writers.pop(number, None)) is not None:
            writer.close()

    def _turn(self) -> bool:
        """Check everything once. Returns whether there was something to do."""
        epoch = self._have_lease()
        if epoch is None:
            self._check_tags()
            return False
        before = dict(self._reached)
        pointer = self._shared.pointer()
        if pointer.rollback is not None:
            self._roll_back(pointer, epoch)
            return True
        upto = self._seen_by_all(pointer)
        for info in self._model.catalogue.infos():
            if self._stopping.is_set():
                return True
            if info.base == "remote" and self._is_there(info.number):
                try:
                    self._bring(info, pointer, upto, epoch)
                    self._failed.pop(info.number, None)
                except (StorageError, SequenceGap) as error:  # it does not stop other versions
                    if str(error) != self._failed.get(info.number):
                        log.error("model %s: deltas do not go on into the cluster: %s", self._model.name, error)
                    self._failed[info.number] = str(error)
                    self._close_writer(info.number)  # read again what its tags have
        if time.monotonic() - self._cleaned_s >= CLEAN_EVERY_S:
            self._clean(pointer, epoch)
            self._cleaned_s = time.monotonic()
        return self._reached != before

    def _have_lease(self) -> int | None:
        """The epoch; None if the lease is another node's."""
        if self.epoch is None or time.monotonic() - self._acquired_s > self._settings.remote_lease_s / 3:
            epoch = self._shared.acquire(self._node, self._settings.remote_lease_s, self._above)
            self._acquired_s = time.monotonic()
            if epoch != self.epoch:
                self._forget()
                self.epoch = epoch
                if epoch is not None:
                    log.info("model %s: this node brings deltas into the cluster, epoch %d", self._model.name, epoch)
        return self.epoch

    def _is_there(self, number: int) -> bool:
        record = self._shared.versions().get(number) if number not in self._writers else {"state": READY}
        return record is not None and record["state"] == READY

    def _keep_lease(self) -> None:
        before = self.epoch
        if self._have_lease() != before:
            raise LeaseLost("the lease is another node's")

    def _seen_by_all(self, pointer: Pointer) -> int:
        """The newest delta that no request of any node reads beneath."""
        newest = pointer.seq or 0
        now, lowest, nodes = time.monotonic(), newest, {}
        for name, report in self._shared.beat(self._node, None).items():
            seq = report.get("seq")
            if seq is None:
                continue
            stands = seq < newest and self._nodes.get(name, (None,))[0] == seq
            since_s = self._nodes[name][1] if stands else now
            nodes[name] = seq, since_s
            if now - since_s < STALLED_S:
                lowest = min(lowest, seq)
        self._nodes = nodes
        return lowest

    # --- deltas

    def _bring(self, info: VersionInfo, pointer: Pointer, upto: int, epoch: int) -> None:
        """Apply to a version the deltas up to `upto` that it lacks."""
        number, mark = info.number, pointer.marks.get(info.number)
        writer = self._writers.get(number)
        if is_new := writer is None:
            writer = self._writer_for(info)
            self._writers[number] = writer
            self._reached[number] = self._lowest_of_tags(number, writer)
            writer.fence(epoch)
        reached = self._reached[number]
        if is_new or _mark(info, pointer) < reached:
            if self._awaits_log(info, pointer, reached):
                return
            self._restore_heads(info, pointer, epoch)
        if reached < upto:
            entries = self._shared.read(reached, BATCH)
            if not entries or entries[0].seq != reached + 1:  # the log does not have what it lacks
                if number in (pointer.current, pointer.canary):
                    raise StorageError(
                        f"version {number} of {self._model.name!r} has deltas up to {reached}, and the log in the "
                        "cluster lacks those that follow: load a newer snapshot"
                    )
                return  # it is stale
            for entry in entries:
                if self._stopping.is_set() or entry.seq > upto or entry.seq != reached + 1:
                    break
                self._keep_lease()
                if pointer.undone.range_of(entry.seq) is None:
                    self._apply(writer, info, entry, epoch, has_heads=entry.seq <= _mark(info, pointer))
                else:
                    writer.apply_delta(epoch, entry.seq, [], entry.digest)
                reached = self._reached[number] = entry.seq
        if (-1 if mark is None else mark) < reached and not self._shared.progress(epoch, number, mark, reached):
            raise LeaseLost("the lease is another node's, or a server has lost how far the rows are")

    def _roll_back(self, pointer: Pointer, epoch: int) -> None:
        ready = {number for number, record in self._shared.versions().items() if record["state"] == READY}
        infos = [info for info in self._model.catalogue.infos() if info.base == "remote" and info.number in ready]
        wanted = ready if pointer.current is None else ready | {pointer.current}
        if missing := wanted - {info.number for info in infos}:
            raise StorageError(  # all are rolled back together: what is left out would keep undone deltas
                f"the rollback of {self._model.name!r} waits until this node has version {min(missing)} too"
            )
        self._undo.roll_back(pointer, infos, epoch, self._keep_lease)
        for number in list(self._writers):
            self._close_writer(number)  # their lines are not those that count any more

    def _writer_for(self, info: VersionInfo) -> Writer:
        row_bytes = {name: spec.row_bytes for name, spec in info.specs.items()}
        return self._open_writer(self._model.name, info.number, row_bytes, info.tags)

    def _check_tags(self) -> None:
        """On a node without the lease: notice if tags of served versions are gone."""
        if time.monotonic() - self._cleaned_s < CLEAN_EVERY_S:
            return
        self._cleaned_s, failed = time.monotonic(), dict[int, str]()
        if self._shared.pointer().rollback is not None:
            return
        for view in self._model.publisher.served.views:
            info = view.open_version.info
            with self._open_writer(self._model.name, info.number, {}, info.tags) as writer:
                try:
                    self._lowest_of_tags(info.number, writer)
                except StorageError as error:
                    failed[info.number] = str(error)
        self._failed = failed

    def _lowest_of_tags(self, number: int, writer: Writer) -> int:
        states = writer.states()
        if missing := sum(state is None for state in states):
            raise StorageError(
                f"version {number} of {self._model.name!r}: {missing} of its {len(states)} tags are gone from the "
                "cluster: a server has lost its rows; load the snapshot again under a new version"
            )
        if any(state.applying == REPLACED for state in states if state is not None):
            raise StorageError(
                f"version {number} of {self._model.name!r} was being rolled back to a delta, and the cluster has lost "
                "to which: send the rollback again"
            )
        return min(state.seq for state in states if state is not None)

    def _awaits_log(self, info: VersionInfo, pointer: Pointer, reached: int) -> bool:
        """Whether nodes may yet put back deltas that the rows have and the log has lost, with their dense parts."""
        is_lost, now_s = _mark(info, pointer) < reached and (pointer.seq or 0) < reached, time.monotonic()
        if is_lost and now_s - self._lost_s.setdefault(info.number, now_s) < STALLED_S:
            return True
        self._lost_s.pop(info.number, None)  # another loss is waited for anew
        return False

    def _restore_heads(self, info: VersionInfo, pointer: Pointer, epoch: int) -> None:
        """Have the cluster's dense parts of a version be those of its rows.

        A server may have lost those of deltas that the rows have; it has lost the mark then, which was written later.
        Those of a delta that not all rows have may be of one that the log has lost, or that is to be undone.
        """
        after, reached = _mark(info, pointer), self._reached[info.number]
        self._shared.put_heads_back(epoch, info.number, max(after, reached))
        while after < reached:
            entries = self._shared.read(after, BATCH)
            for entry in entries:
                if entry.seq <= reached and pointer.undone.range_of(entry.seq) is None:
                    graphs = graphs_of(self._encode(info, entry))
                    self._shared.put_heads(epoch, info.number, entry.seq, entry.digest, graphs)
            after = entries[-1].seq if entries else reached

    def _apply(self, writer: Writer, info: VersionInfo, entry: LogEntry, epoch: int, *, has_heads: bool) -> None:
        """Apply a delta to the rows. `has_heads`: the cluster has its dense parts, or newer ones, and a server has lost
        rows of it.
        """
        overlay = self._encode(info, entry)
        changes = changes_of(overlay)
        writer.keep_before(epoch, entry.seq, changes, entry.digest)
        if not has_heads:
            self._shared.put_heads(epoch, info.number, entry.seq, entry.digest, graphs_of(overlay))
        writer.apply_delta(epoch, entry.seq, changes, entry.digest)

    def _encode(self, info: VersionInfo, entry: LogEntry) -> Overlay:
        """The delta's rows, encoded as by nodes that serve the version: parts that do not fit it are skipped."""
        delta = self._decoded.read(entry.data, entry.digest)
        for_it = delta.base_version in (None, info.number)
        try:
            overlay = encode_delta(delta, info.specs, {}, for_this_version=for_it)
        except DeltaError:
            return Overlay(entry.seq, entry.seq, {})
        if overlay.heads:
            try:
                self._model.dense.check(delta, info.number)
            except DeltaError:
                overlay.heads = {}
        return overlay

    # --- cleaning up

    def _clean(self, pointer: Pointer, epoch: int) -> None:
        records = self._shared.versions()
        self._mark_surplus(records, pointer)
        self._drop(records)
        self._trim(records, pointer, epoch)
        for number, writer in list(self._writers.items()):
            if self._lowest_of_tags(number, writer) < self._reached[number]:
                log.warning(
                    "model %s: version %d has lost deltas in the cluster; applied again", self._model.name, number
                )
                self._close_writer(number)

    def _mark_surplus(self, records: Mapping[int, dict[str, Any]], pointer: Pointer) -> None:
        """Mark versions beyond the number to keep, and loads that nobody goes on with, to be dropped."""
        ready = [number for number, record in records.items() if record["state"] == READY]
        used, order = {pointer.canary, pointer.wanted}, pointer.order_of(ready)
        surplus = surplus_of(ready, pointer.current, used, self._settings.keep_versions, order)
        for number, record in records.items():
            is_old = record["state"] == LOADING and time.time() - record["since_s"] > self._settings.load_retention_s
            if is_old and self._open_load(number).claim(DROPPING):
                surplus.append(number)
        for number in surplus:
            if self._shared.record(number, records[number], {**records[number], "state": DROPPING}):
                log.info("model %s: version %d goes from the cluster", self._model.name, number)

    def _drop(self, records: Mapping[int, dict[str, Any]]) -> None:
        reports = self._shared.beat(self._node, None).values()
        serving = {report.get(what) for report in reports for what in ("active", "canary")}
        for number, record in records.items():
            if record["state"] != DROPPING or number in serving:
                continue
            self._close_writer(number)
            with self._writer_of(number, record) as writer:
                writer.drop(check=self._keep_lease)
            if self._shared.remove_files(number, record):
                self._shared.record(number, record, None)

    def _writer_of(self, number: int, record: Mapping[str, Any]) -> Writer:
        tags, load = [tag.encode() for tag in record["tags"]], record.get("token", "")
        return self._open_writer(self._model.name, number, record["tables"], tags, load=load)

    def _trim(self, records: Mapping[int, dict[str, Any]], pointer: Pointer, epoch: int) -> None:
        """Cut off the log's entries that every version has, also versions that are being loaded, once they are old
        enough.
        """
        entries = self._shared.read(0, BATCH)
        if not entries or not self._reached:
            return
        held, loading = [], []
        order = pointer.order_of(number for number, record in records.items() if record["state"] == READY)
        for number, record in records.items():
            if record["state"] == READY:
                serves = number in (pointer.current, pointer.canary, pointer.wanted)
                if number in self._failed and not serves and not is_to_serve(number, pointer.current, order):
                    continue  # what was rejected does not fill the cluster's memory
                loaded = int(record["record"]["manifest"]["delta_seq"])
                held.append(self._reached.get(number, max(loaded, pointer.marks.get(number, 0))))
            elif record["state"] == LOADING and "delta_seq" in record:
                loading.append(int(record["delta_seq"]))
        ages = ((entry.seq, entry.ms / 1000) for entry in entries)
        upto = may_go(ages, held, loading, entries[0].seq - 1, self._settings.log_kept_s)
        if upto is not None:
            self._forget_before(upto)
            for number, reached in self._reached.items():
                if reached >= pointer.marks.get(
                    number, 0
                ):  # otherwise its servers have lost rows, and no progress is noted
                    self._shared.progress(epoch, number, reached, reached, upto + 1)
                    break

    def _forget_before(self, upto: int) -> None:
        """What deltas have replaced is kept as long as they are in the log."""
        for number, writer in self._writers.items():
            writer.forget_before(upto)
            self._shared.forget_heads(number, upto)


def _mark(info: VersionInfo, pointer: Pointer) -> int:
    """The seq that all rows of a version have had, and its dense parts with them."""
    return max(pointer.marks.get(info.number, 0), info.manifest.delta_seq)
