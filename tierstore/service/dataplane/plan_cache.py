"""The plan cache: plans for requests that come again in the same structure. Any thread.

No data of a request is kept. A kept plan is checked against the version that answers whenever it is used, so a switch
needs no clearing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

MOST_CACHED = 256


class PlanCache:
    """Plans, or requests with their plans, by what is the same; the least recently used makes room."""

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
