"""The plan cache: requests that came before.

Most clients send the same JSON again and again, with other data behind it.

Any thread. None of a request's data is kept. A plan that is kept with a request is checked against the version that
answers whenever it is used, so a switch of versions needs no clearing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

MOST_CACHED = 256
MOST_CACHED_BYTES = 16 << 10  # of the JSON of one


class PlanCache:
    """Parsed requests with their latest plans, by their own bytes; the least recently used makes room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[Hashable, Any] = OrderedDict()  # guarded by _lock

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: Hashable) -> Any:
        """What was kept under `key`, or None."""
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
