"""The document of a model, `state.json`: what its directory means. Immutable values and pure functions.

It says which versions there are and which line of each counts, which is active and which the canary, the labels, in
which order versions served and why each was left, which deltas are undone, where the log begins, which loads are under
way, and up to which delta a version accepted dense parts while it served. A verb is one new document, published whole
by `state_file.py`: so whatever it changes, changes in one step, and after a crash the document before counts or the new
one. Its checksum shows every other content; `serial` grows by one with each.

What is not in it, and why:

- Rows, and what must change in one step with them: the watermark, the identity, the names of patches, which dense part
  is valid or passed over, and which undone deltas the rows are without. They are records in the version's RocksDB.
- What is acknowledged with a delta: its content, its origin, and which versions passed over its dense part. That is the
  entry of the log; a document for each delta would be a second flush.
- The end of the log (`log.end`), which moves with every delta and is written without a flush.
- `changed.keys`, which must be durable before RocksDB has a delta, not after.
- What belongs to one version and never changes, `version.json`, which lies with it: so a version is there once that is,
  and a drop takes its directory's name away, which a full disk does not refuse. A version that the document does not
  list, but whose record is whole, is kept, as one that never served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tierstore.arguments import check_name, check_share
from tierstore.engine.serving.order import Serving, ServingOrder
from tierstore.engine.serving.routing import CANARY, STABLE, Routing
from tierstore.engine.serving.undone import Undone, ordinal
from tierstore.errors import Corruption, InvalidInput
from tierstore.formats import files
from tierstore.formats.names import ModelDirectory
from tierstore.formats.release import of_another_release

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedRoutes:
    """What the next start serves: the active version, the canary, its share of requests (0 to 1), free labels."""

    active: int | None = None
    canary: int | None = None
    share: float = 0.0
    labels: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def for_routing(cls, served: Routing, awaited: SavedRoutes | None = None) -> SavedRoutes:
        """The routes for a restart: what is served, and the canary that is `awaited`."""
        active, canary = (None if view is None else view.version for view in (served.active, served.canary))
        labels = dict(served.labels)
        if awaited is None:
            return cls(active, canary, served.share, labels)
        return cls(active, awaited.canary, awaited.share, {**awaited.labels, **labels})

    @property
    def serving(self) -> Serving:
        return self.active, self.canary

    def without_label(self, name: str) -> SavedRoutes:
        return replace(self, labels={label: version for label, version in self.labels.items() if label != name})


@dataclass(frozen=True, slots=True)
class StateDocument:
    """The document. `loads`: by version the identity of the snapshot that is being loaded, until the load and the
    switch to it are over. `accepted`: by version the newest delta whose dense part it accepted while it served.
    `log_start`: entries up to that seq do not count; None: the log has not begun.
    """

    serial: int = 0
    versions: tuple[int, ...] = ()  # at the time of publishing, ascending
    routes: SavedRoutes = field(default_factory=SavedRoutes)
    order: ServingOrder = field(default_factory=ServingOrder)
    undone: Undone = field(default_factory=Undone)
    log_start: int | None = None
    loads: Mapping[int, str] = field(default_factory=dict)
    accepted: Mapping[int, int] = field(default_factory=dict)

    def means_the_same(self, other: StateDocument) -> bool:
        """Whether nothing differs that the next start would notice."""
        passing = ("serial", "versions")
        return all(getattr(self, of.name) == getattr(other, of.name) for of in fields(self) if of.name not in passing)

    def without_version(self, version: int) -> StateDocument:
        """The same, once a version is gone, or is another one. The number of its line stays: a load may be using it."""
        return replace(
            self,
            versions=tuple(number for number in self.versions if number != version),
            order=self.order.without([version]),
            undone=self.undone.without([version]),
            loads=self.without_load(version).loads,
            accepted={number: of for number, of in self.accepted.items() if number != version},
        )

    def without_load(self, version: int) -> StateDocument:
        return replace(self, loads={number: of for number, of in self.loads.items() if number != version})

    def to_json(self, model: str) -> dict[str, Any]:
        routes = self.routes
        canary = None if routes.canary is None else {"version": routes.canary, "share": routes.share}
        return {
            "format": FORMAT,
            "model": model,
            "serial": self.serial,
            "versions": list(self.versions),
            "active": routes.active,
            "canary": canary,
            "labels": dict(routes.labels),
            "left": self.order.document(),
            "undone": self.undone.document(),
            "log_start": self.log_start,
            "loads": {str(number): identity for number, identity in sorted(self.loads.items())},
            "dense_accepted": {str(number): seq for number, seq in sorted(self.accepted.items())},
        }


def read_document(where: ModelDirectory, model: str) -> StateDocument:
    """The document of a model. NotFound if there is none, Corruption for an invalid one, StorageError."""
    path = where.state
    try:
        document = files.read_json(path)
        if document.get("format") != FORMAT:
            raise of_another_release(path, document.get("format"), str(FORMAT), document)
        return _parse(document, model)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corruption(f"{path} is invalid: {error!r}") from error


def _parse(document: Mapping[str, Any], model: str) -> StateDocument:
    if document["model"] != model:
        raise ValueError(f"it is of model {document['model']!r}, expected {model!r}")
    canary = document["canary"] or {}
    start = document["log_start"]
    return StateDocument(
        serial=ordinal(document["serial"]),
        versions=tuple(map(ordinal, document["versions"])),
        routes=SavedRoutes(
            active=_number_or_none(document["active"]),
            canary=_number_or_none(canary.get("version")),
            share=check_share(canary.get("share", 0.0)),
            labels={check_label(name): ordinal(number) for name, number in document["labels"].items()},
        ),
        order=ServingOrder.parse(document["left"]),
        undone=Undone.parse(document["undone"]),
        log_start=_number_or_none(start),
        loads={ordinal(number): str(identity) for number, identity in document["loads"].items()},
        accepted={ordinal(number): ordinal(seq) for number, seq in document["dense_accepted"].items()},
    )


def _number_or_none(value: Any) -> int | None:
    return None if value is None else ordinal(value)


def check_label(name: object) -> str:
    """`name`, if it may be a free label: a name that is not a number, nor one of the two labels with a fixed
    meaning.
    """
    label = check_name("label", name)
    if label.isdigit():
        raise InvalidInput(f"label {label!r} would be taken for a version; use a name that is not all digits")
    if label in (STABLE, CANARY):
        raise InvalidInput(f"label {label!r} is set by promote, activate and canary; use another name")
    return label
