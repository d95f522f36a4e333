"""The durable record of how a model routes requests: its canary, the canary's share, and the free labels.

`routes.json` in the model's directory names the active version for which it is valid; if CURRENT names another one it
means nothing. So a switch, which publishes CURRENT, voids the record in the same step, whenever a crash happens. No
record means no canary and no labels. Pure functions and immutable values; the model writes, one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tierstore.engine.serving.routing import CANARY, STABLE, Routing
from tierstore.errors import Corruption, InvalidInput, NotFound, TierstoreError
from tierstore.formats import files
from tierstore.formats.release import WRITER, of_another_release
from tierstore.types import check_name, check_share

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """The record, valid while version `active` is active: the canary's number, its share of requests (0 to 1), free
    labels.
    """

    active: int | None = None
    canary: int | None = None
    share: float = 0.0
    labels: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def for_routing(cls, served: Routing, awaited: RoutingRecord | None = None) -> RoutingRecord:
        """The record for a restart: what is served, and the canary that is `awaited`."""
        active, canary = (None if view is None else view.version for view in (served.active, served.canary))
        labels = dict(served.labels)
        if awaited is None:
            return cls(active, canary, served.share, labels)
        return cls(active, awaited.canary, awaited.share, {**awaited.labels, **labels})

    def without_label(self, name: str) -> RoutingRecord:
        return replace(self, labels={label: version for label, version in self.labels.items() if label != name})

    def for_active(self, active: int) -> RoutingRecord:
        """The valid part of the record if `active` is the active version.

        An active canary was promoted, and a crash came before the record said so: it keeps its labels.
        """
        canary = self.canary if active == self.active else None
        labels = {name: number for name, number in self.labels.items() if number in (active, canary)}
        return RoutingRecord(active, canary, self.share if canary is not None else 0.0, labels)

    def document(self) -> dict[str, Any] | None:
        """The record as JSON; None if it is empty."""
        if self.canary is None and not self.labels:
            return None
        canary = None if self.canary is None else {"version": self.canary, "share": self.share}
        return {"format": FORMAT, "active": self.active, "canary": canary, "labels": dict(self.labels)}


def read_routes(path: Path) -> RoutingRecord:
    """The record at `path`; empty if there is none. Corruption if it is invalid."""
    try:
        document = files.read_json(path)
    except NotFound:
        return RoutingRecord()
    try:
        if document["format"] != FORMAT:
            raise of_another_release(path, document["format"], str(FORMAT), document)
        canary = document["canary"] or {}
        labels = {check_label(name): int(number) for name, number in document["labels"].items()}
        number, share = canary.get("version"), check_share(canary.get("share", 0.0))
        return RoutingRecord(int(document["active"]), None if number is None else int(number), share, labels)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Corruption(f"{path} is invalid ({error}); remove it to serve without canary and labels") from error


def save_routes(path: Path, routes: RoutingRecord) -> None:
    """Publish the record, or remove it if it is empty. An unchanged record is not written again."""
    document = routes.document()
    if document is None:
        if files.exists(path):
            files.remove_file(path)
        return
    try:
        written = files.read_json(path)
        if {name: value for name, value in written.items() if name != WRITER} == document:
            return
    except TierstoreError:
        pass  # missing, or damaged
    files.publish_record(path, document)


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
