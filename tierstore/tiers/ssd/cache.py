"""The cache on the local SSD of a node whose rows are on other machines: all tables of all versions in one file, within one budget.

Rows that look-ups have read elsewhere wait in a bounded queue; one thread writes them. Each table fills a segment of the file at a time. If no
segment is free, the one that was filled first makes room, whichever table has it: its rows that were asked for since are written again, the others
are dropped; if most were asked for, it stays and the next segment makes room (a clock of segments). So the budget goes to the tables and versions
that are asked for, and the disk is written in long pieces.

Any thread may call anything. A disk that fails, or is full, switches the cache off; look-ups go on without it.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierstore.threads import Thread
from tierstore.tiers.disk.reader_pool import ReaderPool
from tierstore.tiers.ssd import index as ssd_index
from tierstore.tiers.ssd.file import Bytes, CacheFile
from tierstore.tiers.ssd.table import Offer, SsdTable, slot_keys
from tierstore.types import Keys

_CHANCES = 4  # segments that may stay before one must make room
WAITING_BYTES = 32 << 20  # of rows that wait to be written; more are refused


class SsdCache:
    """The cache and the thread that writes it. Arguments as for `CacheFile`."""

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        readers: ReaderPool,
        check_room: Callable[[int], None] = lambda _: None,
    ) -> None:
        # constant after construction
        self.file = CacheFile(directory, budget_bytes, readers, check_room)
        self._queue: queue.SimpleQueue[Offer | SsdTable | threading.Event | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._run, name="tierstore-ssd", daemon=True)
        # guarded by _lock
        self._lock = threading.Lock()
        self._waiting_bytes = self._dropped = self._tables = 0
        # of the thread
        self._full: deque[tuple[SsdTable, int]] = deque()  # segments, in the order in which they were filled
        self._thread.start()

    def table(self, rows: int, row_bytes: int) -> SsdTable | None:
        """A new table for a version. None if its rows are larger than a segment."""
        if row_bytes + ssd_index.HEAD_BYTES > self.file.segment_bytes:
            return None
        with self._lock:
            self._tables += 1
            return SsdTable(self.file, self._tables, rows, row_bytes, self._put)

    def drop(self, table: SsdTable) -> None:
        """Free the segments of a table whose version was closed."""
        table.close()
        self._queue.put(table)

    def drain(self) -> None:
        """Wait until everything offered so far is written."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()

    def close(self) -> None:
        """Close the cache. No look-up may be running."""
        self._queue.put(None)
        self._thread.join()
        self.file.close()

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                "used": self.file.bytes_in_use, "total": self.file.budget_bytes, "problem": self.file.problem,
                "waiting_bytes": self._waiting_bytes, "waiting_limit": WAITING_BYTES, "dropped_rows": self._dropped,
            }  # fmt: skip

    def _put(self, offer: Offer) -> None:
        with self._lock:
            if self._waiting_bytes and self._waiting_bytes + offer.rows.nbytes > WAITING_BYTES:
                self._dropped += len(offer.keys)
                return
            self._waiting_bytes += offer.rows.nbytes
        self._queue.put(offer)

    # --- the thread

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
                continue
            try:
                if self.file.problem is None:
                    self._free(job) if isinstance(job, SsdTable) else self._admit(job)
            except Exception as error:  # noqa: BLE001 - whatever it is, look-ups do without the cache
                self.file.switch_off(error)
            if self.file.problem is not None:
                self.file.shrink()  # it may have been written to after it was switched off
            if isinstance(job, Offer):
                with self._lock:
                    self._waiting_bytes -= job.rows.nbytes

    def _admit(self, offer: Offer) -> None:
        table = offer.table
        if table.closed:
            return
        self._append(table, table.pack(offer.keys, offer.rows), lambda keys, first: table.admit(keys, first, offer.seq))

    def _append(self, table: SsdTable, slots: Bytes, admit: Callable[[Keys, int], None]) -> None:
        """Write slots of a table.

        Once they can be read, `admit` is called with their keys and the first slot's number.
        """
        done = 0
        while done < len(slots):
            while table.open is None:  # making room may have opened one, for rows that are kept
                segment = self.file.reserve()
                if segment is not None:
                    table.open, table.filled, table.segments = segment, 0, table.segments + 1
                elif not self._make_room():
                    return
            part = slots[done : done + table.per_segment - table.filled]
            self.file.write(table.open, table.filled * table.slot_bytes, part)
            admit(slot_keys(part), table.open * table.per_segment + table.filled)
            table.filled += len(part)
            done += len(part)
            if table.filled == table.per_segment:
                self._full.append((table, table.open))
                table.open = None

    def _make_room(self) -> bool:
        """Free the segment that was filled first. False if no segment is full: tables are filling all of them."""
        for chance in range(len(self._full)):
            table, segment = self._full.popleft()
            kept = table.release(segment, may_stay=chance < _CHANCES)
            if kept is not None:
                break
            self._full.append((table, segment))
        else:
            return False
        self.file.free(segment)
        table.segments -= 1
        if len(kept.slots):
            self._append(table, kept.slots, lambda keys, first: table.admit_again(keys, first, kept.changes))
        return True

    def _free(self, table: SsdTable) -> None:
        segments = [segment for of, segment in self._full if of is table]
        self._full = deque(entry for entry in self._full if entry[0] is not table)
        for segment in segments if table.open is None else [*segments, table.open]:
            self.file.free(segment)
        table.open, table.segments = None, 0
