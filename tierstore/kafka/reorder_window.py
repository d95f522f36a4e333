"""The reorder window: messages that were read and not yet applied, put in the order of their seqs.

It holds a bounded number of bytes. Beyond that it forgets the deltas furthest ahead, and remembers from which offset
they have to be read again. One thread.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from tierstore.kafka.messages import KafkaMessage, MessageHeaders, digest_of

MESSAGE_BYTES = 300  # about what a message takes beside its content


@dataclass(slots=True, eq=False)
class Held:
    """A delta of which some parts, or all, were read. All parts are in one partition."""

    model: str
    seq: int
    partition: int
    parts: int
    digest: str | None  # that the headers say
    offsets: dict[int, int] = field(default_factory=dict)  # part → offset
    values: dict[int, bytes] = field(default_factory=dict)  # part → content
    timestamp_ms: int = 0
    trace: dict[str, str] = field(default_factory=dict)  # headers of its messages
    nbytes: int = 0

    @property
    def complete(self) -> bool:
        return len(self.values) == self.parts

    @property
    def first_offset(self) -> int:
        return min(self.offsets.values())

    def data(self) -> bytes:
        """All parts that are there, in their order."""
        return b"".join(self.values[part] for part in sorted(self.values))


_LEAST_HEAP = 64  # offsets, below which those that were removed may stay


class _Offsets:
    """A multiset of offsets that gives its smallest one."""

    def __init__(self) -> None:
        self._heap: list[int] = []
        self._count: Counter[int] = Counter()

    def add(self, offset: int) -> None:
        self._count[offset] += 1
        heapq.heappush(self._heap, offset)

    def remove(self, offset: int) -> None:
        self._count[offset] -= 1
        if not self._count[offset]:
            del self._count[offset]
            if len(self._heap) > 2 * len(self._count) + _LEAST_HEAP:  # while a gap is open its own offset stays on top
                self._heap = list(self._count)
                heapq.heapify(self._heap)

    def smallest(self) -> int | None:
        while self._heap and self._heap[0] not in self._count:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None


class ReorderWindow:
    """Deltas by model and seq. `limit` is in bytes; the lowest seq of each model is held in any case."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._models: dict[str, dict[int, list[Held]]] = {}
        self._bytes: Counter[str] = Counter()  # by model
        self._offsets: dict[int, _Offsets] = {}
        self.nbytes = 0
        self.forgotten: dict[str, dict[int, int]] = {}  # model → partition → the offset to read again from

    def add(self, message: KafkaMessage, headers: MessageHeaders) -> Held | None:
        """Hold a message. Returns its delta; None where it is held already."""
        same_seq = self._models.setdefault(headers.model, {}).setdefault(headers.seq, [])
        for held in same_seq:
            if (held.partition, held.parts) == (message.partition, headers.parts) and held.digest == headers.digest:
                if self._put(held, message, headers):
                    break
                return None
            if held.complete and headers.parts == 1 and (held.digest or digest_of(held.data())) == headers.digest:
                return None  # the same delta, in another partition or in other parts
        else:
            held = Held(headers.model, headers.seq, message.partition, headers.parts, headers.digest)
            same_seq.append(held)
            self._put(held, message, headers)
        held.timestamp_ms = max(held.timestamp_ms, message.timestamp_ms)
        held.trace.update(headers.trace)
        self._shrink()
        return held

    def _put(self, held: Held, message: KafkaMessage, headers: MessageHeaders) -> bool:
        before = held.values.get(headers.part)
        if before == message.value:
            return False
        if before is not None:
            if headers.part == 1:  # an attempt of which nothing else is needed any more
                for part in list(held.values):
                    self._drop_part(held, part)
            else:
                self._drop_part(held, headers.part)
        held.values[headers.part], held.offsets[headers.part] = message.value, message.offset
        self._count(held, len(message.value), 1)
        self._offsets.setdefault(held.partition, _Offsets()).add(message.offset)
        return True

    def _drop_part(self, held: Held, part: int) -> None:
        self._count(held, -len(held.values.pop(part)), -1)
        self._offsets[held.partition].remove(held.offsets.pop(part))

    def _count(self, held: Held, nbytes: int, messages: int) -> None:
        held.nbytes += nbytes
        self.nbytes += nbytes + messages * MESSAGE_BYTES
        self._bytes[held.model] += nbytes + messages * MESSAGE_BYTES

    def remove(self, held: Held) -> None:
        """Hold a delta no longer: it is applied, parked, or not wanted."""
        for part in list(held.values):
            self._drop_part(held, part)
        seqs = self._models[held.model]
        seqs[held.seq].remove(held)
        if not seqs[held.seq]:
            del seqs[held.seq]
        if not seqs:
            del self._models[held.model]

    def remove_model(self, model: str) -> None:
        """Hold nothing of a model, and forget that there was something."""
        for held in [held for same in self._models.get(model, {}).values() for held in same]:
            self.remove(held)
        self.forgotten.pop(model, None)

    def _shrink(self) -> None:
        while self.nbytes > self._limit:
            many = [model for model, seqs in self._models.items() if len(seqs) > 1]
            if not many:
                return
            model = max(many, key=lambda name: self._bytes[name])
            for held in list(self._models[model][max(self._models[model])]):
                again = self.forgotten.setdefault(model, {})
                again[held.partition] = min(held.first_offset, again.get(held.partition, held.first_offset))
                self.remove(held)

    def models(self) -> list[str]:
        """The models of which something is held."""
        return list(self._models)

    def seqs(self, model: str) -> list[int]:
        """What is held of a model, ascending."""
        return sorted(self._models.get(model, ()))

    def at(self, model: str, seq: int) -> list[Held]:
        """The deltas of one seq, in the order in which they were read: one, or more where their contents differ."""
        return list(self._models.get(model, {}).get(seq, ()))

    def upto(self, model: str, seq: int) -> Iterator[Held]:
        """What is held of a model up to a seq."""
        for other in self.seqs(model):
            if other > seq:
                return
            yield from self.at(model, other)

    def needed(self, partition: int, position: int, *, without: Collection[Held] = ()) -> int:
        """The lowest offset of a partition that has to be read again after a crash, where `position` is read next.

        `without`: deltas that count as applied.
        """
        offsets = self._offsets.get(partition)
        mine = [offset for held in without if held.partition == partition for offset in held.offsets.values()]
        if offsets is not None:
            for offset in mine:
                offsets.remove(offset)
            smallest = offsets.smallest()
            position = position if smallest is None else min(position, smallest)
            for offset in mine:
                offsets.add(offset)
        for again in self.forgotten.values():
            position = min(position, again.get(partition, position))
        return position

    def read_again(self, model: str) -> dict[int, int]:
        """Partition → offset from which to read what was forgotten of a model; whatever lies
        behind it is expected again.
        """
        wanted = self.forgotten.pop(model, {})
        for partition in wanted:
            for name, again in list(self.forgotten.items()):
                wanted[partition] = min(wanted[partition], again.pop(partition, wanted[partition]))
                if not again:
                    del self.forgotten[name]
        return wanted
