"""The publisher of one model's views: what is served now, and which older views are still read (read-copy-update).

A delta is folded only when no request reads a view from before it, and a version that is not served any more is closed
only when its last reader has ended. Python's readers are counted; compiled ones announce themselves (`epochs.py`), and
count as readers of everything that they may use. Any thread may call anything.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tierstore.engine.reads.view import View
from tierstore.engine.serving.epochs import Epochs
from tierstore.engine.serving.routing import Routing
from tierstore.engine.serving.served import PublishedWords
from tierstore.engine.versions.version import Version
from tierstore.forks import refuse
from tierstore.kernels.codec import address_of

_tokens = itertools.count(1)


class Changed(threading.Condition):
    """A condition that also calls `then`, with its lock held, when all its waiters are notified."""

    then: Callable[[], None] = staticmethod(lambda: None)

    def notify_all(self) -> None:
        super().notify_all()
        self.then()


class Publisher:
    """What one model serves, and the former views that are still read."""

    def __init__(self, model: str, epochs: Epochs | None = None) -> None:
        """`epochs` knows the compiled readers, if there may be any."""
        self._model, self._epochs = model, epochs
        self._lock = (
            threading.RLock()
        )  # the lock in `changed`, which costs a request half as much to acquire as that does
        self.changed = Changed(
            self._lock
        )  # notified at each publication and when the last reader of a retired view has ended
        self._served = Routing()
        self._retired: list[View] = []
        self._pinned: list[Version] = []
        self._background: list[View] = []  # held by background work, once for each hold
        self._words: list[PublishedWords] = []  # for compiled readers: one, unless a publication was interrupted
        self._announced: list[tuple[View, ...]] = []  # served before, and perhaps in use by a compiled reader
        self._tokens: list[tuple[int, View]] = []  # of the latest two views that cannot share plans

    @property
    def served(self) -> Routing:
        return self._served

    @property
    def current(self) -> View | None:
        """The active version's view."""
        return self._served.active

    def under_way(self) -> bool:
        """Whether a request reads what is served."""
        served = self._served  # called for each of hundreds of models, again and again
        return any(
            view is not None and view.readers and view.readers > self._background.count(view)
            for view in (served.active, served.canary)
        )

    def publish(self, served: Routing) -> None:
        """Let requests that start from now on use a view of `served`. One atomic step.

        After an exception in between (Ctrl-C, no memory) it may be done or not, or done for compiled readers alone;
        the next publication does it whole.
        """
        with self.changed:
            if self._epochs is not None and self._epochs.active:
                self._publish_words(self._epochs, served)
            former = dict.fromkeys((*self._retired, *self._served.views))
            self._retired = [view for view in former if view.readers and view not in served.views]
            for view in served.views:
                view.publisher = self
            self._served = served
            self.changed.notify_all()

    def publish_words(self) -> None:
        """Publish what is served to compiled readers, now that there are some."""
        with self.changed:
            if self._epochs is not None:
                self._publish_words(self._epochs, self._served)

    def _publish_words(self, epochs: Epochs, served: Routing) -> None:
        slot = epochs.slot(self._model)
        if slot is None:
            return
        words = PublishedWords(served, self._token, epochs)
        self._tokens = [(token, view) for token, view in self._tokens if view in served.views]
        replaced = list(self._words)
        self._words.append(words)  # before they can be found
        generation = epochs.publish(address_of(epochs.models) + 8 * slot, words.address)
        before = dict.fromkeys(view for old in replaced for view in old.served.views)
        former = tuple(view for view in before if view not in served.views)

        def free() -> None:
            with self.changed:
                self._announced.remove(former)
                self.changed.notify_all()

        self._announced.append(former)
        if not epochs.retire(generation, replaced, free):
            self._announced.pop()
        self._words = [words]

    def _token(self, view: View) -> int:
        """A number for a version with its heads: equal for views that can share plans."""
        token = self._existing_token(view) or next(_tokens)
        self._tokens = [(token, view), *(entry for entry in self._tokens if entry[0] != token)][:2]
        return token

    def _existing_token(self, view: View) -> int | None:
        return next((token for token, other in self._tokens if other.shares_plans_with(view)), None)

    def token(self, view: View) -> int | None:
        """The token of a view for compiled readers; None if neither it nor a view like it was published lately."""
        with self._lock:
            return self._existing_token(view)

    def acquire(self, wanted: int | str | None = None, route: bytes | str | None = None) -> View:
        """Begin to read the view that `Routing.choose` returns, with its errors."""
        with self._lock:
            served = self._served
            view = served.active
            if view is None or wanted is not None or served.canary is not None:  # otherwise there is nothing to choose
                view = served.choose(self._model, wanted, route)
            view.readers += 1
            return view

    def retain(self, view: View) -> None:
        """Hold a view once more that the caller holds, beyond the end of the call, until `release`."""
        with self._lock:
            view.readers += 1

    def hold(self, *views: View) -> tuple[View, ...]:
        """Hold views, by default all that are served, for work that is not a request, until `unhold`. Returns them.

        Given views must be served or held.
        """
        with self.changed:
            held = views or self._served.views
            for view in held:
                view.readers += 1
            self._background += held
            return held

    def unhold(self, *views: View) -> None:
        """Release held views."""
        with self.changed:
            for view in views:
                self._background.remove(view)
                self.release(view)

    @contextmanager
    def hold_all(self) -> Iterator[Routing]:
        """Hold every served view in the block, for work that is not a request."""
        with self.changed:
            served = self._served
            held = self.hold(*served.views) if served.views else ()
        try:
            yield served
        finally:
            self.unhold(*held)

    def release(self, view: View) -> None:
        with self._lock:
            view.readers -= 1
            if not view.readers and view in self._retired:
                self._retired.remove(view)
                self.changed.notify_all()

    def read_below(self, version: Version, seq: int) -> bool:
        """Whether `version` is still read as it was before `seq`. Call it under `changed`."""
        return any(view.open_version is version and view.seq < seq for view in self._former())

    def read_before(self, version: Version) -> list[View]:
        """Views of `version` from before the latest publication that are still read. Call it under `changed`."""
        return [view for view in self._former() if view.open_version is version]

    def are_read(self, views: Iterable[View]) -> bool:
        """Whether one of these views, which are not served any more, is still read. Call it under `changed`."""
        read = set(map(id, self._former()))
        return any(id(view) in read for view in views)

    def lowest_seq(self) -> int | None:
        """The lowest seq of the views that are served or still read; None if there are none."""
        with self.changed:
            return min((view.seq for view in (*self._served.views, *self._former())), default=None)

    def reads(self, version: Version) -> bool:
        """Whether `version` is served, still read, or pinned. Call it under `changed`."""
        if self._served.view_of(version) is not None or version in self._pinned:
            return True
        return bool(self.read_before(version))

    def _former(self) -> Iterator[View]:
        """Views that are not served any more, and may still be read."""
        yield from self._retired
        for views in self._announced:
            yield from views

    def refuse(self) -> None:
        """In a forked child: views raise Closed, and those that are held can be released."""
        for view in dict.fromkeys((*self._served.views, *self._retired)):
            for each in (*view.under_heads(), view):
                refuse(each)
        refuse(self, "release", "unhold")

    @contextmanager
    def pinned(self, number: int | None = None) -> Iterator[Version | None]:
        """Keep a served version open for long work that is not a look-up: unlike a view, it holds no fold back.

        The version with that number, or the active one; yields None if it is not served.
        """
        with self.changed:
            view = self._served.active if number is None else self._served.numbered(number)
            version = None if view is None else view.open_version
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
    """A held view for the length of a request: use it in a `with`."""

    __slots__ = ("_head", "_publisher", "_route", "_view", "_wanted")

    def __init__(
        self,
        publisher: Publisher,
        wanted: int | str | None = None,
        route: bytes | str | None = None,
        head: str = "",
    ) -> None:
        self._publisher, self._wanted, self._route, self._head = publisher, wanted, route, head

    def __enter__(self) -> View:
        view = self._view = self._publisher.acquire(self._wanted, self._route)
        try:
            return view.under(self._head)
        except BaseException:
            self._publisher.release(view)
            raise

    def __exit__(self, *_: object) -> None:
        self._publisher.release(self._view)
