"""Lending views to other processes on this machine: they look up in the owner's memory, under the owner's rules.

A borrower is one more reader of a view, by the same count as a request of this process: it holds the views that each
model serves (the active version's, and a canary's) from when it takes them until it says that none of its requests
reads them any more. It routes requests between them as the owner does. So a delta is folded only when
no process reads a view from before it, a version is closed only when no process reads it, and who never gives back
holds up folding as a slow request does. A borrower that dies is `end`ed, and all that it held is free.

Any thread may call anything. Nothing survives the owner.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from typing import Any

from tierstore.engine.model import Model
from tierstore.engine.overlay import Overlay
from tierstore.engine.publisher import Publisher
from tierstore.engine.served import Served
from tierstore.engine.sharing import Changes, SharedOverlay, describe_version
from tierstore.engine.store import Store
from tierstore.engine.version import Version
from tierstore.engine.view import View
from tierstore.errors import NotFound
from tierstore.tiers.host import HostTable
from tierstore.types import Keys, Rows, States


class Borrower:
    """What one process holds. Guarded by the lender's lock."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[Publisher, View]] = {}
        self.ended = False


class Lender:
    """Lends the views of one store. `changes` moves on whenever there is something new to take."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.changes = Changes()
        self._lock = threading.Lock()
        # guarded by _lock; serials are never used twice, and an object keeps its own while it is of use to anybody
        self._next = itertools.count(1)
        self._borrowers: list[Borrower] = []
        self._overlays: dict[int, tuple[int, SharedOverlay]] = {}  # id(overlay) → (serial, its copy, which keeps it)
        self._versions: dict[int, tuple[int, Version]] = {}

    def begin(self) -> Borrower:
        """A new process."""
        borrower = Borrower()
        with self._lock:
            self._borrowers.append(borrower)
        return borrower

    def end(self, borrower: Borrower) -> None:
        """Give back all that a process held. It must be dead, and nothing may be under way for it."""
        with self._lock:
            borrower.ended = True
            held, borrower.held = borrower.held, {}
            if borrower in self._borrowers:
                self._borrowers.remove(borrower)
            self._forget()
        for publisher, view in held.values():
            publisher.leave(view)

    def sync(self, borrower: Borrower, known: dict[str, list[int]]) -> tuple[dict[str, Any], list[int]]:
        """Lend the views that every model serves; returns a document and the descriptors that go with it, in order.

        `known` are the serials of `versions` and `overlays` that the borrower has and keeps for as long as it holds
        what this returns. The descriptors are to be duplicated (sent) before the borrower gives anything back.
        """
        change = self.changes.value  # before the views: what is published from here on is noticed
        document: dict[str, Any] = {"change": change, "models": {}, "versions": {}, "overlays": {}}
        fds: list[int] = []
        known_versions, known_overlays = set(known["versions"]), set(known["overlays"])
        with self._lock:
            for name in self._store.models():
                served, lent = self._lend(borrower, name)
                views: list[dict[str, Any]] = []
                for view_id, view in lent:
                    serial = self._serial_of(view.holder)
                    if serial not in known_versions:
                        known_versions.add(serial)
                        document["versions"][serial], of_tables = describe_version(view.holder)
                        document["versions"][serial]["fds"] = len(of_tables)
                        fds += of_tables
                    overlays = []
                    for overlay in view.overlays:
                        number, copy = self._copy_of(overlay)
                        overlays.append(number)
                        if number not in known_overlays:
                            known_overlays.add(number)
                            document["overlays"][number] = copy.document
                            fds.append(copy.fd)
                    views.append(
                        {
                            "view": view_id,
                            "version": serial,
                            "seq": view.seq,
                            "overlays": overlays,
                            "dense": view.predictor is not None,
                            "unserved": view.unserved,
                        }
                    )
                # the active version's view comes first
                document["models"][name] = {
                    "views": views,
                    "share": served.share,
                    "labels": dict(served.labels),
                    "problem": served.problem,
                }
            self._forget()
        return document, fds

    def _lend(self, borrower: Borrower, name: str) -> tuple[Served, list[tuple[int, View]]]:
        try:
            publisher = self._store.model(name).publisher
        except NotFound:  # a first load that failed has just taken its model away
            return Served(), []
        served = publisher.enter_all()
        lent = []
        for view in served.views:
            view_id = next((number for number, (_, held) in borrower.held.items() if held is view), None)
            if view_id is None:
                view_id = next(self._next)
                borrower.held[view_id] = publisher, view
            else:
                publisher.leave(view)
            lent.append((view_id, view))
        return served, lent

    def give_back(self, borrower: Borrower, view_id: int) -> None:
        """No request of the borrower reads that view any more, or will."""
        with self._lock:
            held = borrower.held.pop(view_id, None)
            self._forget()
        if held is not None:
            publisher, view = held
            publisher.leave(view)

    def fetch(self, borrower: Borrower, serial: int, table_id: int, keys: Keys) -> tuple[Rows, States]:
        """`Table.fetch` on behalf of a borrower, for a version that it holds a view of, and promotion on the way.

        The promotion counts as read under the oldest view of that version that the borrower holds, which is no newer
        than the one that its request reads: at worst it is refused where it need not be.
        """
        with self._lock:
            views = [view for _, view in borrower.held.values() if self._serial_of(view.holder) == serial]
        if not views:
            raise NotFound(f"version {serial} is not lent to that process")
        tables = views[0].holder.tables.values()
        table = next(table for table in tables if table.table_id == table_id)
        return table.fetch(min(view.seq for view in views), keys)

    def lagging(self, borrower: Borrower) -> set[int]:
        """Views that the borrower holds though newer ones are there."""
        with self._lock:
            return {
                view_id for view_id, (publisher, view) in borrower.held.items() if view not in publisher.served.views
            }

    def collapse(self, limit: int) -> int:
        """Have some of the served versions' host tables in huge pages, for every process; returns how many pages.

        A millisecond each. Zero when there is nothing to gain for now.
        """
        done = 0
        for name in self._store.models():
            with contextlib.suppress(NotFound):
                publisher = self._store.model(name).publisher
                for number in publisher.served.versions:
                    with publisher.pinned(number) as version:
                        for table in version.tables.values() if version is not None else ():
                            if isinstance(table.host, HostTable) and done < limit:
                                done += table.host.collapse(limit - done)
        return done

    def model(self, name: str) -> Model:
        return self._store.model(name)

    def close(self) -> None:
        """After the last borrower has ended."""
        with self._lock:
            self._forget()
        self.changes.close()

    def _serial_of(self, version: Version) -> int:
        if id(version) not in self._versions:
            self._versions[id(version)] = next(self._next), version
        return self._versions[id(version)][0]

    def _copy_of(self, overlay: Overlay) -> tuple[int, SharedOverlay]:
        if id(overlay) not in self._overlays:
            self._overlays[id(overlay)] = next(self._next), SharedOverlay(overlay)
        return self._overlays[id(overlay)]

    def _forget(self) -> None:
        """Let go of what no borrower holds. Serials that a borrower has of it are of no use to it any more."""
        views = [view for borrower in self._borrowers for _, view in borrower.held.values()]
        versions = {id(view.holder) for view in views}
        overlays = {id(overlay) for view in views for overlay in view.overlays}
        for key in self._versions.keys() - versions:
            del self._versions[key]
        for key in self._overlays.keys() - overlays:
            self._overlays.pop(key)[1].close()
