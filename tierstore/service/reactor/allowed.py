"""The headers by which reactors answer look-ups: values of Host and Authorization that have passed the check of access before.

One caller has at most `EACH` pairs, however many values it sends: beyond them its oldest makes room. Where all callers have
`MOST`, the oldest of all does. What is replaced is kept until no reader is at it.

For the event loop. Reactors read what is published, without a lock.
"""

from __future__ import annotations

import numpy as np

from tierstore.engine.serving.epochs import Epochs
from tierstore.kernels.codec import address_of

MOST = 64  # pairs, which a reactor compares one by one; what is beyond is for Python to check
EACH = 8  # of one caller: several clients of a token may know the service by different names

Pair = tuple[bytes, bytes]


class Allowed:
    """Publishes its table in the word at an address, one of those that reactors share."""

    def __init__(self, word: int, epochs: Epochs) -> None:
        self._word, self._epochs = word, epochs
        self._callers: dict[Pair, str] = {}  # the oldest pair first
        self._published: object = None  # what reactors read
        self._publish()

    def add(self, host: bytes, authorization: bytes, caller: str) -> None:
        """Answer look-ups with these values, by which `caller` has passed; an empty `authorization` stands for any, or none."""
        pair = host, authorization
        if pair in self._callers:
            return
        own = [other for other, name in self._callers.items() if name == caller]
        if len(own) >= EACH:
            del self._callers[own[0]]
        elif len(self._callers) >= MOST:
            del self._callers[next(iter(self._callers))]
        self._callers[pair] = caller
        self._publish()

    def clear(self) -> None:
        """Answer no look-ups until `add` is called again: tokens have changed."""
        self._callers.clear()
        self._publish()

    def _publish(self) -> None:
        values = [value for pair in self._callers for value in pair]
        data = np.frombuffer(b"".join(values) or b"\0", np.uint8)
        words, at = [len(self._callers)], address_of(data)
        for value in values:
            words += (at, len(value))
            at += len(value)
        table = np.array(words, np.int64)
        old, self._published = self._published, (table, data)
        generation = self._epochs.publish(self._word, address_of(table))
        self._epochs.retire(generation, old, lambda: None)
