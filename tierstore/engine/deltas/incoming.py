"""An incoming delta: identified before it is decoded, and decoded within a memory budget for all of them.

Any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tierstore.engine.data.budget import DecodeBudget, OverlayBudget
from tierstore.engine.deltas.origin import Origin
from tierstore.errors import DeltaError
from tierstore.formats.delta.reader import Delta, DeltaHeader, Undecoded, read_delta
from tierstore.formats.delta.source import DeltaSource, delta_bytes
from tierstore.tiers.background import in_background

LARGE_BYTES = 1 << 20  # larger deltas take milliseconds of a processor, which look-ups would wait for
KEPT_BYTES = 16 << 20
_KEY_BYTES = 32  # of a row in an overlay beside its numbers, at most: key, index, marks
T = TypeVar("T")
Incoming = tuple[Delta, bytes | memoryview, Origin | None]  # a delta, what it was read from, and its origin


class IncomingDelta:
    """A delta, given as bytes or a path. DeltaError if it cannot be read, or is not the expected one."""

    def __init__(self, source: DeltaSource, model: str | None, seq: int | None) -> None:
        self.data = delta_bytes(source)
        self._undecoded = Undecoded(self.data)
        self.header: DeltaHeader = self._undecoded.header
        if model is not None and self.header.model != model:
            raise DeltaError(f"expected a delta of model {model!r}, got one of {self.header.model!r}")
        if seq is not None and self.header.seq != seq:
            raise DeltaError(f"expected delta {seq} of model {self.header.model!r}, got delta {self.header.seq}")

    @contextmanager
    def decoded(self, decoding: DecodeBudget, unfolded: OverlayBudget) -> Iterator[Delta]:
        """Decode the delta, once; its bytes stay reserved for the block. Overloaded if other deltas have them.

        The bytes are those of its batches, of the rows gathered from them, and of these as stored.
        """
        with decoding.reserved(self.header.decoded_bytes) as more:
            delta = gently(len(self.data), unfolded, lambda: self._undecoded.decode(more))
            more(_bytes_in_memory(delta))
            yield delta


def may_run(delta: Delta) -> bool:
    """Whether a delta can be applied together with others: it changes rows alone, and of every version."""
    return not delta.dense and delta.base_version is None


class DecodedDeltas:
    """Decoded deltas of a node's models, kept by one part of the node for the parts that need them next.

    By digest, the newest that fit into `KEPT_BYTES`. Any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # guarded by _lock
        self._kept: dict[str, Delta] = {}  # oldest first
        self._bytes = 0

    def add(self, delta: Delta) -> Delta:
        with self._lock:
            if delta.digest not in self._kept:
                self._kept[delta.digest] = delta
                self._bytes += _bytes_in_memory(delta)
            while self._bytes > KEPT_BYTES:
                self._bytes -= _bytes_in_memory(self._kept.pop(next(iter(self._kept))))
        return delta

    def read(self, data: bytes, digest: str) -> Delta:
        """Decode the delta in these bytes. DeltaError if they are none."""
        return self._kept.get(digest) or self.add(read_delta(data))


def _bytes_in_memory(delta: Delta) -> int:
    """An upper bound on the bytes of its rows and keys."""
    return sum(len(table.keys) * (4 * (table.dim or 0) + _KEY_BYTES) for table in delta.tables.values())


def gently(nbytes: int, unfolded: OverlayBudget, work: Callable[[], T]) -> T:
    """Do `work` on so many bytes of deltas, if they are many at a low priority, unless deltas arrive faster than they
    are folded.
    """
    return work() if nbytes < LARGE_BYTES or unfolded.used else in_background(work)
