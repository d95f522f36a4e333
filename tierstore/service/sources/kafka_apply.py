"""Applying deltas that were read from a topic, or parking them. Only on the Kafka source's thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime

from tierstore.engine.deltas.origin import Origin
from tierstore.engine.store import Store
from tierstore.errors import (
    Conflict,
    InvalidInput,
    NotFound,
    Overloaded,
    SequenceGap,
    StorageError,
    TierstoreError,
    TooLarge,
)
from tierstore.formats.delta.source import DeltaSource
from tierstore.kafka.messages import KafkaMessage, check_digest
from tierstore.kafka.parked import Parked, make_id
from tierstore.kafka.reader import TopicReader
from tierstore.kafka.reorder_window import Held, ReorderWindow
from tierstore.service.sources.kafka_positions import Positions
from tierstore.service.sources.kafka_status import KafkaStats
from tierstore.service.traces import Traces

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # after an error of a model that is not ready, or of the disk
LONGEST_RETRY_S = 10.0
MOST_RUN, RUN_BYTES = 64, 8 << 20  # deltas that are applied together, and bytes of their messages
STANDBY_S = 2.0  # how long a delta may take to come from the leading node, before this one applies it


class Applier:
    """Applies deltas of the window in the order of their seqs, each logged with the positions at that moment."""

    def __init__(
        self,
        store: Store,
        topic: str,
        positions: Positions,
        stats: KafkaStats,
        stopping: threading.Event,
        traces: Traces | None = None,
    ) -> None:
        self._store, self._topic, self._positions, self.stats = store, topic, positions, stats
        self._parked, self._max_delta, self._stopping = store.parked_files, store.settings.max_delta, stopping
        self._traces = traces
        self._window = ReorderWindow(0)
        self._reader: TopicReader | None = None
        self._seen: dict[str, int] = {}  # model → its log's newest seq at the last look
        self._not_before: dict[str, float] = {}  # model → when to try its next delta again
        self._awaited: dict[
            str, tuple[int, float]
        ] = {}  # model → (a seq that the leading node should apply, since when)
        self._standing_in: set[str] = set()  # models whose deltas the leading node did not apply
        self.too_large: list[Held] = []  # to be parked
        self.why: dict[str, str] = {}  # model → why its next delta cannot be applied yet
        self.resume_s = 0.0  # until then the store accepts nothing

    def begin(self, window: ReorderWindow, reader: TopicReader) -> None:
        """Apply deltas from this window and this reader."""
        self._window, self._reader, self.too_large = window, reader, []

    def last(self, model: str) -> int | None:
        """The newest seq of a model's log; None if there is none."""
        try:
            return self._store.model(model).log.last
        except NotFound:
            return None

    def park_message(self, message: KafkaMessage, reason: str) -> None:
        held = Held("", 0, message.partition, 1, None, timestamp_ms=message.timestamp_ms)
        held.values[1], held.offsets[1] = message.value, message.offset
        self._park_delta(held, reason, None, None)

    def park_cut(self, held: Held) -> None:
        """Park the parts that came of a delta, so that it can be skipped. They are held all the same."""
        reason = (
            f"only {len(held.values)} of {held.parts} parts came: what wrote it ended between them, or they were "
            f"deleted; write delta {held.seq} again, or skip it"
        )
        self._park_delta(held, reason, held.model, held.seq)

    def _park(self, held: Held, reason: str) -> None:
        self._park_delta(held, reason, held.model, held.seq)
        self._window.remove(held)

    def _park_delta(self, held: Held, reason: str, model: str | None, seq: int | None) -> None:
        data = held.data()
        name = make_id(held.partition, held.first_offset, data)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        record = Parked(
            name, self._topic, held.partition, held.first_offset, len(held.values), model, seq, held.complete, reason,
            held.timestamp_ms, now, name.rpartition("-")[2], len(data),
        )  # fmt: skip
        if self._parked.add(record, data):
            self.stats.parked += 1
            logger.warning(
                "kafka: %s is parked as %s: %s", f"delta {seq} of {model}" if model else "a message", name, reason
            )

    def apply_ready(self) -> None:
        """Apply the next delta of each model. StorageError if something should be parked and could not be."""
        while self.too_large:
            self._park(self.too_large[0], f"it has more than {self._max_delta} bytes (max_delta)")
            del self.too_large[0]
        if time.monotonic() < self.resume_s:
            return
        for model in self._window.models():
            if time.monotonic() < self._not_before.get(model, 0.0):
                continue
            while not self._stopping.is_set() and (last := self.last(model)) is not None:
                self._drop_held(model, last)
                ready = self._ready(model, last)
                if not ready or not self._is_ours(ready[0]) or not (self._try_run(ready) or self._try(ready[0])):
                    break
            if time.monotonic() < self.resume_s:
                return

    def _ready(self, model: str, last: int) -> list[Held]:
        """The next deltas of a model, as many as were read whole and can be applied together."""
        ready: list[Held] = []
        for seq in range(last + 1, last + 1 + MOST_RUN):
            complete = next((held for held in self._window.at(model, seq) if held.complete), None)
            if complete is None or (ready and sum(held.nbytes for held in (*ready, complete)) > RUN_BYTES):
                break
            ready.append(complete)
        return ready

    def _try_run(self, ready: list[Held]) -> bool:
        """Apply deltas together; False if none of them could be. Traces want to know what one delta took."""
        if len(ready) < 2 or self._traces is not None:
            return False
        run: list[tuple[int, DeltaSource, Origin]] = []
        for number, held in enumerate(ready, 1):
            data = held.data()
            try:
                check_digest(data, held.digest)
            except InvalidInput:  # it is parked in its turn
                break
            run.append((held.seq, data, self._origin(ready[:number])))
        try:
            applied = ready[: self._store.apply_run(ready[0].model, run)] if len(run) > 1 else []
        except TierstoreError:  # what is wrong is said of the first by itself
            return False
        for held in applied:
            self._applied(held)
        return bool(applied)

    def _is_ours(self, held: Held) -> bool:
        """Whether this node should apply a delta now.

        Of several nodes that use one cluster it is the leading one, while it can.
        """
        if held.model in self._standing_in or self._leads(held.model):
            return True
        now = time.monotonic()
        seq, since_s = self._awaited.get(held.model, (0, now))
        if seq != held.seq:
            self._awaited[held.model] = held.seq, now
            return False
        if now - since_s < STANDBY_S:
            return False
        self._standing_in.add(held.model)
        return True

    def _leads(self, model: str) -> bool:
        return self._store.placed(self._store.model(model)).leads()

    def _drop_held(self, model: str, last: int) -> None:
        """Drop deltas that the log has; park those that differ from the log's."""
        for held in list(self._window.upto(model, last)):
            if not held.complete:
                if self._seen.get(model) != last:  # the log went on without it
                    self.stats.abandoned += 1
                    logger.warning(
                        "kafka: %d of %d parts of delta %d of %s are dropped: the log has that delta",
                        len(held.values),
                        held.parts,
                        held.seq,
                        model,
                    )
                    self._window.remove(held)
                continue
            if not self._try(held):
                return
        self._seen[model] = last

    def _try(self, held: Held) -> bool:
        """Apply or park a delta; False if it must be tried again."""
        try:
            applied = self._apply_now(held)
        except (Overloaded, StorageError) as error:
            self.wait(error)
            return False
        except (InvalidInput, Conflict, TooLarge) as error:
            if isinstance(error, SequenceGap):  # a delta came another way, and is gone again
                return False
            self._park(held, str(error))
            return True
        except TierstoreError as error:  # nothing serves yet
            self._not_before[held.model] = time.monotonic() + RETRY_S
            self.why[held.model] = str(error)
            return False
        self._applied(held, applied)
        return True

    def _applied(self, held: Held, applied: bool = True) -> None:
        self._window.remove(held)
        self._not_before.pop(held.model, None)
        self.why.pop(held.model, None)
        if applied:
            self.stats.applied += 1
        else:
            self.stats.duplicates += 1
            self._standing_in.discard(held.model)  # another node has applied it

    def _apply_now(self, held: Held) -> bool:
        data = held.data()
        check_digest(data, held.digest)
        with self._traced(held):
            origin = self._origin([held])
            return self._store.apply_delta(data, model=held.model, seq=held.seq, origin=origin).applied

    def _origin(self, run: Sequence[Held]) -> Origin:
        """What is logged with the last delta of `run`, once all of them are applied."""
        reader, held = self._reader, run[-1]
        assert reader is not None
        resume = {
            partition: self._window.needed(partition, position, without=run)
            for partition, position in reader.positions.items()
        }
        return self._positions.origin(resume, partition=held.partition, offsets=sorted(held.offsets.values()))

    def _traced(self, held: Held) -> AbstractContextManager[None]:
        """Report what the block does with a delta, if that is wanted, by OpenTelemetry's conventions for messages."""
        if self._traces is None:
            return nullcontext()
        attributes = {
            "messaging.system": "kafka", "messaging.destination.name": self._topic,
            "messaging.destination.partition.id": str(held.partition),
            "messaging.kafka.offset": held.first_offset, "tierstore.model": held.model, "tierstore.seq": held.seq,
        }  # fmt: skip
        return self._traces.delta(held.trace, attributes)

    def wait(self, error: TierstoreError) -> None:
        """Read nothing for a while, because the store accepts nothing now."""
        seconds = error.retry_after_s if isinstance(error, Overloaded) else RETRY_S
        self.resume_s = time.monotonic() + max(0.05, min(seconds, LONGEST_RETRY_S))
        if self.stats.waits(str(error)):
            logger.warning("kafka: reading pauses: %s", error)
