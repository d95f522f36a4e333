"""What is known of TensorFlow Serving's requests that came before: most clients send the same tensors, with other data.

Both of its interfaces name their inputs, so their order means nothing: a request is known by its tensors in the order
of their names, whatever order they came in. Nothing of a request's data is kept. A plan that is kept with a request is
checked against the version that answers whenever it is used, so a switch of versions needs no clearing. Any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from tierstore.service.dataplane import Request, RequestedOutput
from tierstore.service.tensors import TensorSpec

KNOWN_REQUESTS = 256
KNOWN_NAMES_BYTES = 16 << 10  # of the names in one


class KnownRequests:
    """Requests, with their latest plans, by what they ask; the least recently used makes room."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[object, Request] = OrderedDict()  # guarded by _lock

    def __len__(self) -> int:
        return len(self._kept)

    def request(self, model: str, inputs: Sequence[TensorSpec], outputs: Sequence[RequestedOutput]) -> Request:
        """The request for `inputs`, which lie in the order of their names."""
        key = (
            model,
            tuple((spec.name, spec.datatype, spec.shape) for spec in inputs),
            tuple((output.name, output.datatype) for output in outputs),
        )
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
        made = Request(inputs, outputs)
        if sum(len(spec.name) for spec in inputs) + sum(len(output.name) for output in outputs) <= KNOWN_NAMES_BYTES:
            with self._lock:
                made = self._kept.setdefault(key, made)
                if len(self._kept) > KNOWN_REQUESTS:
                    self._kept.popitem(last=False)
        return made
