"""A store as a borrower sees it: look-ups in the owner's memory, and the owner asked for what is not there.

`MirrorStore` stands in for `Store` where only look-ups are needed. Before a request takes a view it compares one word
of shared memory; if the owner has published anything since, the newest views are taken over first. So a delta is
seen by every request that starts after it was acknowledged, in whichever process. Any thread may call anything.
Nothing here is written to, but heat and counts; nothing survives the process or the owner.
"""

from __future__ import annotations

import os
import threading
from typing import Any, Protocol, cast

from tierstore.engine.overlay import Overlay
from tierstore.engine.publisher import Lease, Publisher
from tierstore.engine.served import Served
from tierstore.engine.sharing import Changes, MirrorVersion, mirror_overlay
from tierstore.engine.table import LookupCounts
from tierstore.engine.version import Version
from tierstore.engine.view import View
from tierstore.errors import NotFound
from tierstore.types import Keys, Rows, States


class Owner(Protocol):
    """The process that has the store; see `lending.Lender` for what each call does there. Any thread."""

    def sync(self, known: dict[str, list[int]]) -> tuple[dict[str, Any], list[int]]: ...
    def fetch(self, serial: int, table_id: int, keys: Keys, rows: Rows, state: States) -> None: ...
    def give_back(self, view_id: int) -> None: ...
    def give_up(self, error: BaseException) -> None:
        """End this process, so that its owner takes back all that it has lent."""


class _OwnersDisk:
    """The row store of one version, read by its owner."""

    def __init__(self, owner: Owner, serial: int) -> None:
        self._owner, self._serial = owner, serial

    def get(self, table_id: int, keys: Keys, rows: Rows, state: States) -> None:
        self._owner.fetch(self._serial, table_id, keys, rows, state)

    def close(self) -> None:
        pass


class _View(View):
    """A view that is lent. `serials` are the owner's names of its overlays."""

    __slots__ = ("_unserved", "serials", "view_id")

    def __init__(self, entry: dict[str, Any], version: MirrorVersion, overlays: tuple[Overlay, ...]) -> None:
        super().__init__(cast(Version, version), overlays, entry["seq"])
        self.view_id, self.serials = entry["view"], entry["overlays"]
        self.dense_elsewhere = bool(entry["dense"])
        self._unserved: str | None = entry["unserved"]

    @property
    def unserved(self) -> str | None:
        return self._unserved

    @property
    def mirror(self) -> MirrorVersion:
        return cast(MirrorVersion, self.holder)


class _Publisher(Publisher):
    """Gives a view back to the owner when it is not served any more and its last reader has left."""

    def __init__(self, model: str, owner: Owner) -> None:
        super().__init__(model)
        self._owner = owner

    def publish(self, served: Served) -> None:
        with self.changed:
            old = self.served
            super().publish(served)
            unread = [view for view in old.views if view not in served.views and not view.readers]
        for view in unread:
            self._owner.give_back(cast(_View, view).view_id)

    def leave(self, view: View) -> None:
        with self.changed:
            super().leave(view)
            unread = not view.readers and view not in self.served.views
        if unread:
            self._owner.give_back(cast(_View, view).view_id)


class MirrorModel:
    """What requests need of a model."""

    def __init__(self, name: str, store: MirrorStore, owner: Owner) -> None:
        self.name = name
        self.publisher = _Publisher(name, owner)
        self.counts: dict[str, LookupCounts] = {}
        self._store = store

    def view(self, version: int | str | None = None, route: bytes | str | None = None) -> Lease:
        """As `Model.view`, but a version that is not there is told like one that is not served: NotReady."""
        self._store.refresh()
        return Lease(self.publisher, version, route)

    @property
    def served(self) -> Served:
        """What requests get right now, without looking for something newer."""
        return self.publisher.served

    @property
    def active_version(self) -> int | None:
        self._store.refresh()
        view = self.publisher.current
        return None if view is None else view.version

    @property
    def ready(self) -> bool:
        return self.active_version is not None

    def counts_of(self, table: str) -> LookupCounts:
        return self.counts.setdefault(table, LookupCounts())


class MirrorStore:
    """The owner's models. `changes` is the owner's counter."""

    def __init__(self, owner: Owner, changes: Changes) -> None:
        self._owner, self._changes = owner, changes
        self._lock = threading.Lock()
        # guarded by _lock; `_models` is replaced whole
        self._seen = -1
        self._models: dict[str, MirrorModel] = {}
        self.observers: list[Any] = []

    @property
    def fresh(self) -> bool:
        """Whether all that the owner has published is here."""
        return self._seen == self._changes.value

    def refresh(self) -> None:
        """Take over what the owner has published, if it has; returns when it is what requests work on."""
        if self._seen == self._changes.value:
            return
        with self._lock:
            if self._seen != self._changes.value:
                try:
                    self._take(*self._owner.sync(self._known()))
                except BaseException as error:
                    self._owner.give_up(error)  # the owner lent what this process does not know of
                    raise

    def models(self) -> list[str]:
        self.refresh()
        return sorted(self._models)

    def model(self, name: str) -> MirrorModel:
        self.refresh()
        model = self._models.get(name)
        if model is None:
            raise NotFound(f"no model {name!r}; there is {', '.join(sorted(self._models)) or 'none yet'}")
        return model

    def served(self, name: str) -> Served:
        """What requests of a model get right now, without looking for something newer; nothing if there is no such model."""
        model = self._models.get(name)
        return Served() if model is None else model.served

    def take_counts(self) -> dict[str, dict[str, list[int]]]:
        """Keys looked up since the last call, by model and table, one number a `Tier`."""
        taken = {
            name: {table: counts.take() for table, counts in model.counts.copy().items()}
            for name, model in self._models.items()
        }
        return {name: counted for name, of in taken.items() if (counted := {t: c for t, c in of.items() if any(c)})}

    def _current(self) -> list[_View]:
        return [cast(_View, view) for model in self._models.values() for view in model.served.views]

    def _known(self) -> dict[str, list[int]]:
        views = self._current()
        return {
            "versions": sorted({view.mirror.serial for view in views}),
            "overlays": sorted({serial for view in views for serial in view.serials}),
        }

    def _take(self, document: dict[str, Any], fds: list[int]) -> None:
        versions = {view.mirror.serial: view.mirror for view in self._current()}
        overlays = {
            serial: overlay
            for view in self._current()
            for serial, overlay in zip(view.serials, view.overlays, strict=True)
        }
        left = list(fds)
        models = {name: self._models.get(name) or MirrorModel(name, self, self._owner) for name in document["models"]}
        taken: dict[str, Served] = {}
        try:
            for name, entry in document["models"].items():
                views = [self._view(models[name], one, document, left, versions, overlays) for one in entry["views"]]
                active, canary = [*views, None, None][:2]
                taken[name] = Served(active, canary, entry["share"], entry["labels"], entry["problem"])
        finally:
            for fd in left:
                os.close(fd)
        gone = [model for name, model in self._models.items() if name not in models]
        self._models = models
        for model in gone:
            model.publisher.publish(Served())
        for name, served in taken.items():
            models[name].publisher.publish(served)
        self._seen = document["change"]  # last: from here on requests do not wait for this

    def _view(
        self,
        model: MirrorModel,
        entry: dict[str, Any],
        document: dict[str, Any],
        left: list[int],
        versions: dict[int, MirrorVersion],
        overlays: dict[int, Overlay],
    ) -> _View:
        """The view of `entry`, that which is here already if it is. Descriptors come in the order in which versions and overlays are first named."""
        for held in model.served.views:
            if cast(_View, held).view_id == entry["view"]:
                return cast(_View, held)
        serial = entry["version"]
        version = versions.get(serial)
        if version is None:
            described = document["versions"][str(serial)]
            mine, left[:] = left[: described["fds"]], left[described["fds"] :]
            version = versions[serial] = MirrorVersion(
                serial, described, mine, _OwnersDisk(self._owner, serial), model.counts_of
            )
        for number in entry["overlays"]:
            if number not in overlays:
                overlays[number] = mirror_overlay(document["overlays"][str(number)], left.pop(0), version.specs)
        return _View(entry, version, tuple(overlays[n] for n in entry["overlays"]))
