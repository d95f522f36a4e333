"""The plan cache: parsed requests and their plans, for requests that come again.

Most clients send the same JSON again and again, with other data behind it. Any thread. No data of a request is kept. A
kept plan is checked against the version that answers whenever it is used, so a switch needs no clearing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

MOST_CACHED = 256
MOST_CACHED_BYTES = 16 << 10  # of one request's JSON


class PlanCache:
    """Parsed requests with their latest plans, by their own bytes; the least recently used makes room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()  # guarded by _lock

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable) -> Any:
        """The value under `key`, or None."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
            return entry

    def keep(self, key: Hashable, entry: Any) -> None:
        with self._lock:
            self._entries[key] = entry
            if len(self._entries) > MOST_CACHED:
                self._entries.popitem(last=False)
