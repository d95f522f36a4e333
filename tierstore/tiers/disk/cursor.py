"""A RocksDB iterator that steps over many entries in short blocks, so that other threads get their turn.

`database.py` makes sure that no step is made on a closed database. For one thread at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import islice, repeat, starmap
from operator import itemgetter
from typing import Any

from tierstore.tiers.background import yield_to_requests

_SCAN_BLOCK = 2048  # entries stepped over with the interpreter lock held


class Cursor:
    """A RocksDB iterator up to the stored key `end`. `Database.close` ends it."""

    def __init__(self, end: bytes, *, values: bool = True) -> None:
        self.end, self.values = end, values
        self.iterator: Any = None  # used only inside the database's `entered`; None once it is closed

    def next(self, entries: int) -> tuple[list[bytes], list[bytes], bool]:
        """Step over up to `entries`; the last item says whether there may be more."""
        stored: list[bytes] = []
        values: list[bytes] = []
        more = True
        while more and len(stored) < entries:
            more = self._next_block(min(_SCAN_BLOCK, entries - len(stored)), stored, values)
            yield_to_requests()
        return stored, values, more

    def _next_block(self, wanted: int, stored: list[bytes], values: list[bytes]) -> bool:
        """Add up to `wanted` entries. Returns whether there may be more."""
        iterator, nothing = self.iterator, repeat(())
        # key() is None at the end, and ends the zip before a value is read and a step is made
        steps = zip(
            iter(iterator.key, None),
            starmap(iterator.value, nothing) if self.values else repeat(b""),
            starmap(iterator.next, nothing),
            strict=False,
        )
        try:
            block = list(islice(steps, wanted))
            stored.extend(map(itemgetter(0), block))
            values.extend(map(itemgetter(1), block))
            if len(block) < wanted:
                iterator.status()  # an iterator also stops at a damaged block; then this raises
        finally:
            del iterator, steps  # an error keeps this frame alive, and an iterator keeps the database open
        if len(block) < wanted or stored[-1] >= self.end:
            keep = bisect_left(stored, self.end)
            del stored[keep:], values[keep:]
            return False
        return True
