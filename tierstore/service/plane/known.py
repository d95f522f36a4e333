"""What is known of requests that came before: most clients send the same JSON again and again, with other data behind it.

Any thread. Nothing of a request's data is kept. A plan that is kept with a request is checked against the version
that answers whenever it is used, so a switch of versions needs no clearing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

KNOWN_REQUESTS = 256
KNOWN_BYTES = 16 << 10  # of the JSON of one


class KnownRequests:
    """Parsed requests, with their latest plans, by their own bytes; the least recently used makes room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()  # guarded by _lock

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: Hashable) -> Any:
        """What was kept under `key`, or None."""
        with self._lock:
            asked = self._kept.get(key)
            if asked is not None:
                self._kept.move_to_end(key)
            return asked

    def keep(self, key: Hashable, asked: Any) -> None:
        with self._lock:
            self._kept[key] = asked
            if len(self._kept) > KNOWN_REQUESTS:
                self._kept.popitem(last=False)
