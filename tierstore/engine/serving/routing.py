"""The routing of a model at one moment: the active version's view, maybe a canary's, and which requests get which.

Immutable, so any thread may use one; the publisher replaces it as a whole.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import xxhash

from tierstore.engine.reads.view import View
from tierstore.engine.versions.version import Version
from tierstore.errors import NotFound, NotReady

STABLE, CANARY = "stable", "canary"  # labels that always mean the active version and the canary
_HASHES = 2.0**64


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """A routing. `share` (0 to 1) of the requests that name no version go to the canary. `labels`: free labels →
    version.

    `problem` says why nothing is active although something should be.
    """

    active: View | None = None
    canary: View | None = None
    share: float = 0.0
    labels: Mapping[str, int] = field(default_factory=dict)
    problem: str | None = None

    @property
    def views(self) -> tuple[View, ...]:
        """The served views, the active version's first."""
        return tuple(view for view in (self.active, self.canary) if view is not None)

    @property
    def versions(self) -> tuple[int, ...]:
        """Numbers of the served versions, the active version's first."""
        return tuple(view.version for view in self.views)

    def view_of(self, version: Version) -> View | None:
        """The view of an open version, if it is served."""
        return next((view for view in self.views if view.open_version is version), None)

    def numbered(self, number: int) -> View | None:
        """The view of the version with that number, if it is served."""
        return next((view for view in self.views if view.version == number), None)

    def all_labels(self) -> dict[str, int]:
        """Every label and its version: `stable`, `canary`, then the free ones by name."""
        own = zip((STABLE, CANARY), (self.active, self.canary), strict=True)
        fixed = {name: view.version for name, view in own if view is not None}
        return fixed | dict(sorted(self.labels.items()))

    def with_views(self, views: Iterable[View]) -> Routing:
        """The same routing with newer views of served versions."""
        newer = {id(view.open_version): view for view in views}

        def newest(view: View | None) -> View | None:
            return None if view is None else newer.get(id(view.open_version), view)

        return replace(self, active=newest(self.active), canary=newest(self.canary))

    def nothing(self, model: str, then: str = "") -> NotReady:
        """The error if nothing is active; `then` is what can be done once something is."""
        if self.problem is not None:
            return NotReady(f"model {model!r} does not serve: {self.problem}")
        return NotReady(f"model {model!r} has no active version; load or activate one{then}")

    def choose(self, model: str, wanted: int | str | None, route: bytes | str | None) -> View:
        """The view that answers a request: of the version or label that it names, or by the share.

        Equal `route`s get equal versions while canary and share stay the same; a route that got the canary at a
        smaller share still gets it at a larger one. NotReady for a version that is not served, NotFound for an unknown
        label.
        """
        active, canary = self.active, self.canary
        if active is None:
            raise self.nothing(model)
        if wanted is None:
            if canary is None:
                return active
            if route is None:
                return canary if random.random() < self.share else active
            text = route.encode() if isinstance(route, str) else route
            # seeded, so that the next canary is not tried on the same requests again
            return canary if xxhash.xxh3_64_intdigest(text, canary.version) < self.share * _HASHES else active
        if wanted == STABLE:
            return active
        if canary is not None and wanted == CANARY:
            return canary
        number = wanted if isinstance(wanted, int) else self.labels.get(wanted) if isinstance(wanted, str) else None
        if number is None:
            raise NotFound(f"model {model!r} has no label {str(wanted)[:80]!r}; it has {', '.join(self.all_labels())}")
        if active.version == number:
            return active
        if canary is not None and canary.version == number:
            return canary
        serves = " and ".join(map(str, self.versions))
        raise NotReady(
            f"model {model!r} serves version{'s' if canary else ''} {serves}, not {number}; activate that one first"
        )
