"""What is served now, and which older views are still read (read-copy-update).

A delta is folded only when nobody reads a view from before it, and a version that is not served any more is closed
only when its last reader has left. Any thread may call anything. Nothing here survives a crash.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from tierstore.engine.served import Served
from tierstore.engine.version import Version
from tierstore.engine.view import View


class Publisher:
    """What one model serves, and the views before that somebody still reads."""

    def __init__(self, model: str, told: Sequence[Callable[[], None]] = ()) -> None:
        """Each of `told` is called at each publication, under `changed`: it must not wait for anything."""
        self._model, self._told = model, told
        self._lock = threading.RLock()  # the one in `changed`, which costs a request half as much to take as that does
        self.changed = threading.Condition(
            self._lock
        )  # notified at each publication and when a retired view is left by its last reader
        self._served = Served()
        self._retired: list[View] = []
        self._pinned: list[Version] = []
        self._beside: list[View] = []  # read by what is no request, once for each reader

    @property
    def served(self) -> Served:
        return self._served

    @property
    def current(self) -> View | None:
        """The active version's view."""
        return self._served.active

    def under_way(self) -> bool:
        """Whether somebody reads what is served: a request, or a worker process, which holds a view all the time."""
        return any(view.readers > self._beside.count(view) for view in self._served.views)

    def publish(self, served: Served) -> None:
        """From now on requests that start work on a view of `served`. One atomic step."""
        with self.changed:
            old, self._served = self._served, served
            for view in old.views:
                if view.readers and view not in served.views:
                    self._retired.append(view)
            for tell in self._told:
                tell()
            self.changed.notify_all()

    def enter(self, asked: int | str | None = None, route: bytes | str | None = None) -> View:
        """Begin to read the view that `Served.choose` says, with its errors."""
        with self._lock:
            served = self._served
            view = served.active
            if view is None or asked is not None or served.canary is not None:  # else there is nothing to choose
                view = served.choose(self._model, asked, route)
            view.readers += 1
            return view

    def enter_all(self) -> Served:
        """Begin to read every view that is served, for somebody who routes requests by himself."""
        with self.changed:
            for view in self._served.views:
                view.readers += 1
            return self._served

    @contextmanager
    def beside(self) -> Iterator[Served]:
        """Read every view that is served, for work that is no request."""
        with self.changed:
            served = self.enter_all()
            self._beside += served.views
        try:
            yield served
        finally:
            with self.changed:
                for view in served.views:
                    self._beside.remove(view)
                    self.leave(view)

    def leave(self, view: View) -> None:
        with self._lock:
            view.readers -= 1
            if not view.readers and view is not self._served.active and view is not self._served.canary:
                self._retired.remove(view)
                self.changed.notify_all()

    def read_below(self, version: Version, seq: int) -> bool:
        """Whether somebody still reads `version` as it was before `seq`. Call it under `changed`."""
        return any(view.holder is version and view.seq < seq for view in self._retired)

    def reads(self, version: Version) -> bool:
        """Whether `version` is served, still read, or pinned. Call it under `changed`."""
        if self._served.of(version) is not None or version in self._pinned:
            return True
        return any(view.holder is version for view in self._retired)

    @contextmanager
    def pinned(self, number: int | None = None) -> Iterator[Version | None]:
        """Keep a served version open for long work that is no look-up: unlike a view, it holds no fold back.

        The one with that number, or the active one; yields None where it is not served.
        """
        with self.changed:
            view = self._served.active if number is None else self._served.numbered(number)
            version = None if view is None else view.holder
            if version is not None:
                self._pinned.append(version)
        try:
            yield version
        finally:
            if version is not None:
                with self.changed:
                    self._pinned.remove(version)
                    self.changed.notify_all()


class Lease:
    """`with` this to hold a view for the length of a request."""

    __slots__ = ("_asked", "_publisher", "_route", "_view")

    def __init__(self, publisher: Publisher, asked: int | str | None = None, route: bytes | str | None = None) -> None:
        self._publisher, self._asked, self._route = publisher, asked, route

    def __enter__(self) -> View:
        self._view = self._publisher.enter(self._asked, self._route)
        return self._view

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._publisher.leave(self._view)
