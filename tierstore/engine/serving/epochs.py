"""Compiled readers of views: which exist, what is published for them, and when they stop using what it replaced.

They take no lock and notify no thread when they are done (`kernels/epochs.py`). So `retire` keeps what is replaced
while a compiled reader may use it, and one thread polls until they have gone on, which usually takes microseconds.

Any thread may call anything.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tierstore.kernels import epochs as kernel
from tierstore.kernels.codec import address_of
from tierstore.threads import Thread

MOST_MODELS = 1 << 16  # that compiled readers can serve; Python alone serves further ones
_LOOK_S = 0.0005


class Epochs:
    """The compiled readers of one store's views, and the generation that each is at."""

    def __init__(self) -> None:
        # the views that compiled readers find, by the address of their words
        self.views: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # constant after construction; their memory is read by compiled threads
        self.generation = np.ones(8, np.int64)
        self._nowhere = np.zeros(1, np.int64)
        self.models = np.zeros(MOST_MODELS, np.int64)  # a model's `Served` as words, by its slot; 0: none
        self._lock = threading.Lock()
        # guarded by _lock
        self._slots: dict[str, int] = {}
        self._readers: list[tuple[npt.NDArray[np.int64], int, int, int]] = []
        self._retired: list[tuple[int, Any, Callable[[], None]]] = []
        self._collectors: list[Callable[[], None]] = []
        self._offers: list[Callable[[], None]] = []
        self._tables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._table_ids = itertools.count(1)
        self._thread: threading.Thread | None = None

    @property
    def active(self) -> bool:
        """Whether there are compiled readers."""
        return bool(self._readers)

    def slot(self, model: str) -> int | None:
        """The index of a model in `models`, which never changes; None if `models` is full."""
        with self._lock:
            if model not in self._slots and len(self._slots) == MOST_MODELS:
                return None
            return self._slots.setdefault(model, len(self._slots))

    def table_id(self, table: Any) -> int:
        """The number of a table of an open version for compiled readers; the same as long as it lives."""
        with self._lock:
            if table.epochs_id is None:
                table.epochs_id = next(self._table_ids)
                self._tables[table.epochs_id] = table
            return int(table.epochs_id)

    def table(self, number: int) -> Any:
        """The table with a number; None if it is gone."""
        return self._tables.get(number)

    def add_readers(self, words: npt.NDArray[Any]) -> None:
        """Add readers. They announce themselves in `words["announced"]`, int64, zeros until they do."""
        with self._lock:
            announced = words["announced"]
            self._readers.append((words, int(announced.ctypes.data), len(words), announced.strides[0] // 8))

    def remove_readers(self, words: npt.NDArray[Any]) -> None:
        """Remove the readers of `words`, which have ended."""
        with self._lock:
            self._readers = [entry for entry in self._readers if entry[0] is not words]

    def add_collector(self, collect: Callable[[], None]) -> None:
        """Add a function that adds what compiled readers have counted since its last call."""
        with self._lock:
            self._collectors.append(collect)

    def remove_collector(self, collect: Callable[[], None]) -> None:
        with self._lock:
            self._collectors.remove(collect)

    def collect(self) -> None:
        """Add what compiled readers have counted until now."""
        for collect in list(self._collectors):
            collect()

    def add_offers(self, await_offers: Callable[[], None]) -> None:
        """Add a function that waits until everything that compiled readers have offered to caches was handled."""
        with self._lock:
            self._offers.append(await_offers)

    def remove_offers(self, await_offers: Callable[[], None]) -> None:
        with self._lock:
            self._offers.remove(await_offers)

    def await_offers(self) -> None:
        """Wait until no row that a compiled reader has offered to a cache so far is still on its way there."""
        for await_offers in list(self._offers):
            await_offers()

    def publish(self, location: int, address: int) -> int:
        """Store `address` at `location`, where compiled readers look, and begin a generation. Returns the
        generation.
        """
        return int(kernel.publish(location, address, address_of(self.generation)))

    def retire(self, generation: int, kept: Any, then: Callable[[], None]) -> bool:
        """Keep what was replaced when `generation` began until no reader uses it, then call `then` on another thread.

        False if no reader uses it now: nothing is kept, and `then` is not called.
        """
        with self._lock:
            if not self._held_below(generation):
                return False
            self._retired.append((generation, kept, then))
            if self._thread is None:
                thread = Thread(target=self._look, name="tierstore-epochs", daemon=True)
                with contextlib.suppress(
                    RuntimeError
                ):  # no thread can be started: the next call of `retire` tries again
                    thread.start()
                    self._thread = thread
            return True

    def once_unread(self, then: Callable[[], None]) -> None:
        """Call `then` once no reader uses what readers could find until now, here or on another thread."""
        if not self.retire(self.publish(address_of(self._nowhere), 0), None, then):
            then()

    def _held_below(self, generation: int) -> bool:
        return any(kernel.held_below(address, count, stride, generation) for _, address, count, stride in self._readers)

    def _look(self) -> None:
        """Poll until nothing is retired any more."""
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                free = [entry for entry in self._retired if not self._held_below(entry[0])]
                self._retired = [entry for entry in self._retired if entry not in free]
                if not self._retired:
                    self._thread = None
                last = self._thread is None
            for *_, then in free:
                then()
            if last:
                return
